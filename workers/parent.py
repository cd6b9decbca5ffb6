"""A process ends with the one that started it.

vLLM's engine process waits for requests for ever when its front is killed, and keeps its memory. Ray ends what a dead worker leaves
behind, but not when Ray's own processes are killed with it.
"""

import multiprocessing
import os
import threading
from multiprocessing import connection

_watching = threading.Lock()


def end_with_parent() -> None:
    """From now on this process ends when its parent is gone. Only where `multiprocessing` started it, once is enough:
    an engine within its caller's own process has nobody to outlive."""
    parent = multiprocessing.parent_process()
    if parent is not None and _watching.acquire(blocking=False):
        end_with(parent.sentinel)


def end_with(sentinel: int) -> None:
    """From now on this process ends when `sentinel` does: a descriptor that becomes readable as its other end closes."""
    threading.Thread(target=_wait_for, args=(sentinel,), name="parent", daemon=True).start()


def _wait_for(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)  # other threads wait in native code, so no exception would end them
