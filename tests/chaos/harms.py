"""What a process does to its own surroundings before it works, and what is done to a run's disk, to see if it bears that."""

import ctypes
import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torchspec_lite.config import Config
from workers import publisher

DAYS = 30 * 86400
MS_REMOUNT, MNT_DETACH = 32, 2  # linux/mount.h
LIBC = ctypes.CDLL(None, use_errno=True)


def unharmed(config: Config) -> None:
    """Nothing."""


def jumping_clock(config: Config) -> None:
    """The wall clock jumps back and forth by up to a month at every look at it."""
    chance, true = random.Random(os.getpid()), time.time
    time.time = lambda: true() + chance.uniform(-DAYS, DAYS)


def _fails_to_flush(place: Path, config: Config) -> None:
    """After some files under `place`, flushing one fails as on a full disk."""
    left, fsync = 8, os.fsync

    def full(descriptor: int) -> None:
        nonlocal left
        left -= str(place) in os.readlink(f"/proc/self/fd/{descriptor}")
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    os.fsync = full


@contextmanager
def small_disk(place: Path) -> Iterator[tuple[Callable, Callable]]:
    """A disk of 1 MiB at a folder. Gives (harm for the processes, give it more room).

    Who may not mount one gets the failing system call instead.
    """
    place.mkdir()
    where = os.fsencode(place)
    if LIBC.mount(b"tmpfs", where, b"tmpfs", 0, b"size=1m"):
        yield partial(_fails_to_flush, place), lambda: None
        return
    try:
        yield unharmed, lambda: LIBC.mount(b"tmpfs", where, b"tmpfs", MS_REMOUNT, b"size=256m")
    finally:
        LIBC.umount2(where, MNT_DETACH)


def dies_before_version_2(config: Config) -> None:
    """The trainer that is to write version 2 ends in between: its checkpoint is there, the version is not. Once."""
    write, mark = publisher.export, config.run_dir / "died"

    def export(drafter, directory, version, *rest):
        if version == 2 and not mark.exists():
            mark.touch()
            os._exit(9)
        return write(drafter, directory, version, *rest)

    publisher.export = export
