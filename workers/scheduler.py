"""The engines' schedulers: vLLM's own, without the draft tokens that nobody wants or that cost more than they give."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from torchspec_lite.break_even import Paying

BREAK_EVEN = "break_even"
"""Key of vLLM's `additional_config` that holds `serve.break_even`."""
SECOND_PRIORITY = 2
"""Priority of second answers (`workers.second_answers`): behind users' requests (0), shadow prompts and probes (1)."""


class CaptureScheduler(Scheduler):
    """Never verifies what `extract_hidden_states` drafts.

    That method stores the states of the tokens it is given and, to look like a drafter, offers the token just sampled
    once more. Verifying it doubles the rows of every decode step and is nearly always in vain. Dropped here, a decode
    step has one row per request, as in an engine that captures nothing.
    """

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drop the drafts of a step; the states were stored when they were made."""


class _CountsUsers:
    """Leaves the draft rounds of second answers out of vLLM's statistics: acceptance there, sampled and for nobody, would pass
    for users'."""

    def make_spec_decoding_stats(self, stats, *args, request_id: str, **options):
        if self.requests[request_id].priority >= SECOND_PRIORITY:
            return stats
        return super().make_spec_decoding_stats(stats, *args, request_id=request_id, **options)


class CountingScheduler(_CountsUsers, Scheduler):
    """Without asynchronous scheduling, as on a CPU."""


class AsyncCountingScheduler(_CountsUsers, AsyncScheduler):
    """With asynchronous scheduling, as on a GPU. Written from vLLM 0.32's source; it was not run."""


class _DraftsUpToLimit:
    """Drafts up to a number of running requests (`serve.max_concurrency_for_speculation`), and whatever their number while
    shadow prompts or probes run: these are there to be drafted for.

    It rewrites vLLM's own table of drafts by batch size, which vLLM reads once a step; so drafting resumes where it left
    off, and the drafter's keys and values are written all the while.
    """

    def __init__(self, vllm_config, *args, **options):
        super().__init__(vllm_config, *args, **options)
        self.configured = sum(count > 0 for count in self.dynamic_sd_lookup)

    def limit(self) -> int | None:
        """Up to how many requests this step shall draft; None: whatever their number."""
        return self.configured

    def schedule(self, *args, **options) -> SchedulerOutput:
        most = self.limit()
        if most is None or any(0 < request.priority < SECOND_PRIORITY for request in self.running):
            most = len(self.dynamic_sd_lookup)
        self.dynamic_sd_lookup[:] = [self.num_spec_tokens if running <= most else 0
                                     for running in range(len(self.dynamic_sd_lookup))]
        return super().schedule(*args, **options)


class _DraftsWherePaying(_DraftsUpToLimit):
    """The limit is where drafting pays, by the acceptance of the latest rounds (`auto`)."""

    def __init__(self, vllm_config, *args, **options):
        super().__init__(vllm_config, *args, **options)
        self.paying = Paying({int(running): length for running, length in
                              vllm_config.additional_config[BREAK_EVEN].items()})

    def limit(self) -> int | None:
        return self.paying.step()

    def make_spec_decoding_stats(self, *args, num_draft_tokens: int, num_accepted_tokens: int, **options):
        if num_draft_tokens:
            self.paying.verified(num_accepted_tokens)
        return super().make_spec_decoding_stats(*args, num_draft_tokens=num_draft_tokens,
                                                num_accepted_tokens=num_accepted_tokens, **options)


class LimitedScheduler(_CountsUsers, _DraftsUpToLimit, Scheduler):
    """Without asynchronous scheduling, as on a CPU."""


class AsyncLimitedScheduler(_CountsUsers, _DraftsUpToLimit, AsyncScheduler):
    """With asynchronous scheduling, as on a GPU. Written from vLLM 0.32's source; it was not run."""


class ServingScheduler(_CountsUsers, _DraftsWherePaying, Scheduler):
    """Without asynchronous scheduling, as on a CPU."""


class AsyncServingScheduler(_CountsUsers, _DraftsWherePaying, AsyncScheduler):
    """With asynchronous scheduling, as on a GPU. Written from vLLM 0.32's source; it was not run."""
