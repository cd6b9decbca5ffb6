"""An engine's process ends with the one that started it.

vLLM's waits for requests for ever when its front is killed, and keeps its memory. Ray ends what a dead worker leaves
behind, but not when Ray's own processes are killed with it.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection

_watching = threading.Lock()


def end_with_parent() -> None:
    """From now on this process is killed when its parent is gone. Only where `multiprocessing` started it, once is enough:
    an engine within its caller's own process has nobody to outlive."""
    parent = multiprocessing.parent_process()
    if parent is not None and _watching.acquire(blocking=False):
        threading.Thread(target=_wait_for, args=(parent,), name="parent", daemon=True).start()


def _wait_for(parent) -> None:
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)  # its other threads wait in native code, so no exception would end it
