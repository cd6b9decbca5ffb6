"""A process that was started by one that is killed must not stay."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection

import pytest

from workers.parent import end_with_parent

LIMIT_S = 60
SPAWN = multiprocessing.get_context("spawn")


def engine(alive) -> None:
    """`alive` is open as long as this process lives; whoever holds its other end sees it close."""
    end_with_parent()
    alive.send(os.getpid())
    signal.pause()


def front(alive) -> None:
    process = SPAWN.Process(target=engine, args=(alive,))
    process.start()
    alive.close()
    process.join()


def test_an_engine_ends_when_its_front_is_killed():
    ours, theirs = SPAWN.Pipe()
    started = SPAWN.Process(target=front, args=(theirs,))
    started.start()
    theirs.close()
    assert ours.poll(LIMIT_S)
    pid = ours.recv()
    assert not connection.wait([ours], 0.0) and os.path.exists(f"/proc/{pid}")
    started.kill()
    assert connection.wait([ours], LIMIT_S), f"process {pid} is still there"
    with pytest.raises(EOFError):
        ours.recv()


def test_a_process_that_nobody_spawned_goes_on():
    assert multiprocessing.parent_process() is None
    end_with_parent()
    assert "parent" not in [thread.name for thread in threading.enumerate()]
