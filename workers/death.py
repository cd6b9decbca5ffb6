"""How Ray tells that a process is gone."""

import logging

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

from torchspec_lite.logs import one_line

log = logging.getLogger(__name__)
DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
"""What a call of an actor raises when its process is gone. The one that Ray's memory monitor ends is no RayActorError."""
LONGEST = 300


def death_in_words(error: BaseException) -> str:
    """One line on why a process is gone, or on another error. Ray's account of a node's memory is pages long, and goes to the
    log."""
    if not isinstance(error, OutOfMemoryError):
        return one_line(error)
    log.info("Ray's account of the node's memory: %s", error)
    words = " ".join(str(error).split())
    return f"memory ran out on its node, and Ray ended it: {words[:LONGEST]}{'…' * (len(words) > LONGEST)}"
