"""A lock on a file that one process holds at a time; the kernel frees it with the process, however that ends."""

import fcntl
import time
from pathlib import Path
from typing import TextIO

from torchspec_lite.errors import UserError


def hold(path: Path, wait_s: float, problem: str) -> TextIO:
    """The open file, made if there is none; closing it frees the lock. Raises UserError with `problem` when another still
    holds it after `wait_s`."""
    lock, deadline = path.open("a"), time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                lock.close()
                raise UserError(problem) from error
            time.sleep(0.1)
