"""What each rank's worker answers to a `collective_rpc`: a value or an error, never an exception."""

import functools


class RankFailed(RuntimeError):
    """A method failed on some ranks; says which and why."""


def answered(method):
    """Turn a method's result or error into an answer that every rank gives: {"ok", "value" | "error"}.

    With tensor parallelism an exception in one rank would leave the other ranks' answers unread in vLLM's queues, and
    each later call would get the answer of the one before.
    """
    @functools.wraps(method)
    def answer(self, *args):
        try:
            return {"ok": True, "value": method(self, *args)}
        except Exception as error:
            return {"ok": False, "error": f"rank {self.rank}: {type(error).__name__}: {error}"}
    return answer


def values_of(answers: list[dict]) -> list:
    """The value of each rank's answer. Raises RankFailed if any rank failed."""
    errors = [answer["error"] for answer in answers if not answer["ok"]]
    if errors:
        raise RankFailed("; ".join(errors))
    return [answer["value"] for answer in answers]
