"""The capture engine's scheduler: vLLM's own, without the draft tokens that nobody wants."""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds


class CaptureScheduler(Scheduler):
    """Never verifies what `extract_hidden_states` drafts.

    That method stores the states of the tokens it is given and, to look like a drafter, offers the token just sampled
    once more. Verifying it doubles the rows of every decode step and is nearly always in vain. Dropped here, a decode
    step has one row per request, as in an engine that captures nothing.
    """

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drop the drafts of a step; the states were stored when they were made."""
