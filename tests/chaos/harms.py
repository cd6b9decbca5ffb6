"""What a process does to its own surroundings before it works, to see whether it bears that."""

import ctypes
import errno
import os
import random
import time
from functools import partial

from torchspec_lite.config import Config

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h
MS_REC, MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
DAYS = 30 * 86400


def jumping_clock(config: Config) -> None:
    """The wall clock jumps back and forth by up to a month at every look at it."""
    chance, true = random.Random(os.getpid()), time.time
    time.time = lambda: true() + chance.uniform(-DAYS, DAYS)


def _full_disk(place: str, config: Config) -> None:
    """A disk of its own, soon full, lies under a folder of the run, seen by this process alone.

    Where the system does not allow that (a container without rights), the system call that fails on a full disk does.
    """
    folder = config.run_dir / place
    folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    for space in (CLONE_NEWNS, CLONE_NEWNS | CLONE_NEWUSER):
        if libc.unshare(space) == 0 and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0 and libc.mount(
                b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=2m") == 0:
            return
    left, fsync = [8], os.fsync

    def full(descriptor):
        left[0] -= place in os.readlink(f"/proc/self/fd/{descriptor}")
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    os.fsync = full


full_disk = {place: partial(_full_disk, place) for place in ("drafters", "checkpoints")}
