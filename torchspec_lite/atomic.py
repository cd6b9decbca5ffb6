"""Directories that appear whole or not at all: written under a temporary name, flushed to disk, then renamed."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchspec_lite.errors import UserError

PARTIAL = ".partial"
FULL_BYTES = 1 << 20  # a disk with less room than this is full


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `final`; leaving the block flushes and renames it to `final`.

    Whatever fails inside removes the temporary directory. Raises UserError when `final` is there already or the disk
    is full.
    """
    with no_space_explained(final):
        partial = open_partial(final)
        try:
            yield partial
            commit(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def open_partial(final: Path) -> Path:
    """Make the temporary directory of `final`, without what a crash left in it.

    Raises UserError when `final` is there already.
    """
    if final.exists():
        raise UserError(f"{final}: already there and never written over; move it away or choose another run name")
    partial = final.with_name(f".{final.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, final: Path) -> None:
    """Flush every file of `partial` to disk and rename it to `final`."""
    for path in [*partial.rglob("*"), partial]:
        _flush(path)
    partial.rename(final)
    _flush(final.parent)


@contextmanager
def no_space_explained(place: Path) -> Iterator[None]:
    """Turn a full disk or quota into a UserError that names the place.

    The error number is looked for in the whole chain of causes; torch's own writer drops it, so a disk without room
    at that moment counts too.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError):
            raise
        if any(map(_is_full, _causes(error))) or shutil.disk_usage(place.parent).free < FULL_BYTES:
            raise UserError(f"{place.parent}: no space left on the disk while writing {place.name}; nothing was kept "
                            "of it. Free some space or set run_root to another disk") from error
        raise


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_full(error):
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _causes(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
