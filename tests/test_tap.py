"""The tap on vLLM's second model runner, which needs a GPU: a stand-in calls what vllm/v1/worker/gpu/model_runner.py calls."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState

from torchspec_lite.traffic import Trail
from workers import tap
from workers.draft_log import DraftLog
from workers.tap import SETTING, Tap

LAYERS, HIDDEN, K = 30, 8, 3
OWN = (2, 15, 27)
GARBAGE = 4575657222473777152


class Speculator:
    """Notes how many states it is given."""

    def __init__(self):
        self.saw = []

    def propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
                num_rejected, last_sampled, next_prefill_tokens, temperature=None, seeds=None, dummy_run=False):
        self.saw.append(len(aux_hidden_states))
        return torch.full((input_batch.num_reqs, K), 40 + len(self.saw))


class Runner:
    """Of vLLM's runner V2 what the tap and the draft log touch. `step` runs a batch as an engine step does."""

    def __init__(self, reads=OWN):
        speculation = SimpleNamespace(draft_model_config=SimpleNamespace(
            hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=list(reads))))
        self.vllm_config = SimpleNamespace(
            additional_config={SETTING: True}, speculative_config=speculation,
            model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: LAYERS))
        self.captured = tuple(sorted({*reads, LAYERS}))
        self.speculator = Speculator()
        self.execute_model_state = None
        self.req_states = SimpleNamespace(
            last_sampled_tokens=torch.zeros(6, 1, dtype=torch.int64), next_prefill_tokens=torch.zeros(1, 6, dtype=torch.int32))

    def execute_model(self, batch, dummy_run=False):
        states = [torch.full((len(batch.input_ids), HIDDEN), float(layer)) + batch.input_ids[:, None] / 100 for layer in self.captured]
        self.execute_model_state = ExecuteModelState(batch, None, None, states[0], states, None, set(), None, None, K)

    def sample(self, hidden_states, batch, grammar):
        return SimpleNamespace(sampled_token_ids=batch.sampled), batch.num_sampled, batch.num_rejected

    def sample_tokens(self, grammar):
        state, self.execute_model_state = self.execute_model_state, None
        _, count, rejected = self.sample(state.hidden_states, state.input_batch, grammar)
        return self.speculator.propose(state.input_batch, state.attn_metadata, state.slot_mappings_by_layer,
                                       state.hidden_states, state.aux_hidden_states, count, rejected,
                                       self.req_states.last_sampled_tokens, self.req_states.next_prefill_tokens, None, None)

    def dummy_run(self):
        self.execute_model(batch(["warm"], [0], [[1, 1]], [[0] * (K + 1)], [1]), dummy_run=True)
        state, self.execute_model_state = self.execute_model_state, None
        self.speculator.propose(
            input_batch=state.input_batch, attn_metadata=state.attn_metadata, slot_mappings=state.slot_mappings_by_layer,
            last_hidden_states=state.hidden_states, aux_hidden_states=state.aux_hidden_states,
            num_sampled=torch.ones(1), num_rejected=torch.zeros(1), last_sampled=self.req_states.last_sampled_tokens,
            next_prefill_tokens=self.req_states.next_prefill_tokens, dummy_run=True)

    def step(self, batch, drafts=None):
        self.execute_model(SimpleNamespace(
            **vars(batch), finished_req_ids=set(), scheduled_new_reqs=[], num_scheduled_tokens={},
            scheduled_spec_decode_tokens=drafts or {}))
        return self.sample_tokens(None)


def batch(names, firsts, tokens, sampled, counts, rows=None):
    """`tokens`: input tokens of each request, from its position `first` on. `sampled`: what lies in the sampler's memory."""
    lengths, counts = [len(part) for part in tokens], torch.tensor(counts)
    return SimpleNamespace(
        req_ids=names, num_reqs=len(names), query_start_loc_np=np.array([0, *np.cumsum(lengths)]),
        input_ids=torch.tensor(sum(tokens, [])), sampled=torch.tensor(sampled), num_sampled=counts,
        positions=torch.cat([first + torch.arange(length) for first, length in zip(firsts, lengths)]),
        num_rejected=torch.tensor([max(0, length - int(count)) if int(count) else 0 for length, count in zip(lengths, counts)]),
        seq_lens=torch.tensor([first + length for first, length in zip(firsts, lengths)]),
        idx_mapping=torch.tensor(rows or list(range(len(names)))))


class Watcher:
    """Keeps the trails of requests that are watched."""

    def __init__(self, **trails):
        self.trails = trails

    def watches(self, request):
        return request in self.trails

    def add(self, request, piece):
        self.trails[request].add(piece)


@pytest.mark.parametrize("reads, sees", [(OWN, 3), ((2, 15, LAYERS), 3)])
def test_the_drafter_sees_its_own_states_at_every_start_and_at_every_step(reads, sees):
    runner = Runner(reads)
    Tap(runner)
    runner.dummy_run()
    runner.step(batch(["a"], [0], [[1, 2]], [[5] * (K + 1)], [1]))
    assert runner.speculator.saw == [sees, sees]


def test_the_draft_log_leaves_the_tap_in_its_place_and_reads_the_right_tokens():
    runner = Runner()
    Tap(runner)
    worker = DraftLog()
    worker.rank, worker.model_runner = 0, runner
    assert worker.draft_log_start() == {"ok": True, "value": None}
    runner.req_states.last_sampled_tokens[4] = 9
    runner.req_states.next_prefill_tokens[0, 2] = 8
    # `a`, at place 4 of the runner's memory, has sampled 9 after two accepted drafts; the prompt of `b` is read in parts.
    runner.step(batch(["a", "b"], [10, 0], [[4, 5, 6, 7], [1, 2]], [[5, 6, 9, GARBAGE], [GARBAGE] * 4], [3, 0], rows=[4, 2]))
    assert worker.draft_log_take() == {"ok": True, "value": [("a", 14, 9, [41] * K), ("b", 3, 8, [41] * K)]}
    runner.dummy_run()
    assert runner.speculator.saw == [3, 3]
    again = worker.draft_log_take()
    assert not again["ok"] and again["error"] == "rank 0: RuntimeError: draft_log_take without draft_log_start"


def test_what_the_sampler_left_in_its_memory_is_no_part_of_a_sample():
    runner = Runner()
    taken = Tap(runner)
    trail = Trail(3, 100, max_tokens=50)
    taken.watcher = Watcher(a=trail)
    runner.step(batch(["b", "a"], [7, 0], [[6], [1, 2, 3]], [[3, 1, 1, 1], [4, GARBAGE, GARBAGE, GARBAGE]], [1, 1]))
    # 4 is known, the drafts are 5, 6 and 7: one is accepted, then 9 comes.
    runner.step(batch(["a"], [3], [[4, 5, 6, 7]], [[5, 9, 1065353216, GARBAGE]], [2]), {"a": [5, 6, 7]})
    sample = trail.finish()
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 9] and sample.acceptance_length == 2.0
    assert sample.mask.tolist() == [0, 0, 0, 1, 1, 1]
    own = torch.tensor([1, 2, 3, 4, 5])[:, None, None] / 100 + torch.tensor(OWN, dtype=torch.float32)[None, :, None]
    assert torch.allclose(sample.aux, own.expand(-1, -1, HIDDEN))
    assert torch.allclose(sample.last, own[:, 0] * 0 + torch.tensor([1, 2, 3, 4, 5])[:, None] / 100 + LAYERS)


def test_a_part_of_a_prompt_yields_nothing():
    # V2 counts no token there, whatever its sampler wrote.
    runner = Runner()
    taken = Tap(runner)
    trail = Trail(3, 100, max_tokens=50)
    taken.watcher = Watcher(a=trail)
    runner.step(batch(["a"], [0], [[1, 2]], [[GARBAGE] * 4], [0]))
    runner.step(batch(["a"], [2], [[3]], [[4, GARBAGE, GARBAGE, GARBAGE]], [1]))
    runner.step(batch(["a"], [3], [[4]], [[5]], [1]))  # vLLM's plain sampler, where nothing was drafted
    assert trail.finish().token_ids.tolist() == [1, 2, 3, 4, 5]


def test_both_runners_are_asked_for_the_last_layer_too(monkeypatch):
    import workers.hot_swap  # noqa: F401 (prepares the runners, as in a worker)
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils
    runner = Runner()
    monkeypatch.setattr(tap, "get_current_vllm_config", lambda: runner.vllm_config)
    assert eagle3_utils.get_eagle3_aux_layers_from_config(runner.vllm_config.speculative_config) == runner.captured
    runner.vllm_config.additional_config = {}
    assert eagle3_utils.get_eagle3_aux_layers_from_config(runner.vllm_config.speculative_config) == OWN
