"""Up to how many requests an engine drafts: over vLLM's own table, without the rest of its scheduler."""

from types import SimpleNamespace

import pytest
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from torchspec_lite.break_even import LOOK_EVERY, WINDOW
from torchspec_lite.config import ServeConfig
from workers.scheduler import BREAK_EVEN, SECOND_PRIORITY, LimitedScheduler, ServingScheduler
from workers.server import speculative_config

SEATS, STEPS = 8, 3


class Plain:
    """Of vLLM's scheduler what a step reads of the table."""

    def __init__(self, vllm_config):
        self.num_spec_tokens, self.running = STEPS, []
        self.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(vllm_config.table, SEATS, STEPS)

    def schedule(self):
        return self.dynamic_sd_lookup[len(self.running)]

    def make_spec_decoding_stats(self, stats, **options):
        return stats


def make(kind, limit, break_even=None):
    options = ServeConfig(max_num_seqs=SEATS, max_concurrency_for_speculation=limit, break_even=break_even or {})
    config = SimpleNamespace(table=speculative_config(options, "v000001")["num_speculative_tokens_per_batch_size"],
                             additional_config={BREAK_EVEN: options.break_even})
    ours = [one for one in kind.__mro__[1:] if one.__module__ == kind.__module__]
    return type(kind.__name__, (*ours, Plain), {})(config)


def drafts(scheduler, *priorities) -> int:
    scheduler.running = [SimpleNamespace(priority=priority) for priority in priorities]
    return scheduler.schedule()


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_a_number_is_the_limit_but_not_for_shadow_prompts_and_probes(limit):
    scheduler = make(LimitedScheduler, limit)
    for _ in range(2):  # and it is back when they have ended
        assert [drafts(scheduler, *[0] * running) for running in range(1, SEATS + 1)] == [
            STEPS if running <= limit else 0 for running in range(1, SEATS + 1)]
        assert drafts(scheduler, *[1] * SEATS) == drafts(scheduler, *[0] * (SEATS - 1), 1) == STEPS
    assert drafts(scheduler, *[0] * limit, SECOND_PRIORITY) == 0  # answers for the trainers alone are no reason


def test_auto_follows_the_acceptance_and_lifts_its_limit_for_them_too():
    scheduler = make(ServingScheduler, "auto", {1: 1.2, 4: 1.8})
    scheduler.requests = {"user": SimpleNamespace(priority=0)}
    for _ in range(WINDOW):  # acceptance length 1.5 pays for two at once
        scheduler.make_spec_decoding_stats(None, num_draft_tokens=STEPS, num_accepted_tokens=0.5, request_id="user")
    steps = [drafts(scheduler, *[0] * running) for running in (2, 3) * (LOOK_EVERY // 2)]
    assert steps == [STEPS, 0] * (LOOK_EVERY // 2 - 1) + [STEPS, STEPS]  # the last one looks
    assert drafts(scheduler, 0, 0, 0, 1) == STEPS and drafts(scheduler, 0, 0, 0) == 0
