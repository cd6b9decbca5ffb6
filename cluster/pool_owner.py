"""Whose a serving pool is: one process at a time serves from a run directory, told by a lock that ends with it."""

from pathlib import Path

from torchspec_lite.file_lock import hold

LOCK = "serving.lock"
WAIT_S = 10.0
"""Longest wait for the one before: a driver that was killed lives a moment longer."""

_held: dict[str, object] = {}


def take(application: str, run_dir: str) -> None:
    """Own the run directory's pool until `give_up`, or until this process ends. Raises UserError while another one does."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    _held[application] = hold(Path(run_dir) / LOCK, WAIT_S, f"run directory {run_dir}: another command serves from it; end "
                              "that, or serve a drafter of it under another name: name=… serve.drafter=FOLDER")


def owns(application: str) -> bool:
    """Whether this process owns the pool of that name in Ray Serve."""
    return application in _held


def give_up(application: str) -> None:
    _held.pop(application).close()
