"""The tap on a serving engine's model runner: what each step computes for watched requests, as it computes it.

vLLM's runner keeps a step's hidden states between `execute_model` and `sample_tokens`; both are wrapped here, and the
sampler in between, which says what drafts were accepted. One more layer than the drafter reads is captured, the one
before the target's final norm; the tap takes it out of the drafter's sight again. Written from
vllm/v1/worker/gpu_model_runner.py (V1) and vllm/v1/worker/gpu/model_runner.py (V2) of vLLM 0.32. V1 is tested on the CPU;
V2, which needs a GPU, has not been run: `tests/test_tap.py` holds the tap against a stand-in for it.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner

from torchspec_lite.traffic import Piece

SETTING = "torchspec_lite_capture"
"""Key of vLLM's `additional_config`: {SETTING: true} prepares an engine for capture."""


class Watcher(Protocol):
    """Who wants the states."""

    def started(self, request: str, prompt: list[int] | None, sampling) -> None:
        """A request is scheduled for the first time."""

    def watches(self, request: str) -> bool:
        """Whether its states are wanted."""

    def add(self, request: str, piece: Piece) -> None:
        """What a step computed for a watched request."""

    def finished(self, request: str) -> None:
        """It ended, was stopped or was cancelled."""


def prepare_runners() -> None:
    """Give engines that are started for capture a tap, and have them hand out the stream after the last layer too.

    Call it once, in the worker, before the models are loaded.
    """
    FirstRunner._get_eagle3_aux_layers_from_config = _with_last(
        FirstRunner._get_eagle3_aux_layers_from_config, lambda runner: runner.vllm_config)
    eagle3_utils.get_eagle3_aux_layers_from_config = _with_last(
        eagle3_utils.get_eagle3_aux_layers_from_config, lambda speculation: get_current_vllm_config())
    FirstRunner._setup_eagle3_aux_hidden_state_outputs = _then_tap(FirstRunner._setup_eagle3_aux_hidden_state_outputs)
    SecondRunner.load_model = _then_tap(SecondRunner.load_model)


def _then_tap(load: Callable) -> Callable:
    @functools.wraps(load)
    def loaded(runner, *args, **options):
        load(runner, *args, **options)
        if prepared(runner.vllm_config):
            runner.capture_tap = Tap(runner)
    return loaded


def _with_last(layers_of: Callable, config_of: Callable) -> Callable:
    @functools.wraps(layers_of)
    def layers(owner):
        found = layers_of(owner)
        config = config_of(owner)
        if found is None or not prepared(config):
            return found
        return tuple(sorted({*found, last_layer(config)}))
    return layers


def prepared(vllm_config) -> bool:
    """Whether an engine was started for capture."""
    return bool(vllm_config.additional_config.get(SETTING))


def last_layer(vllm_config) -> int:
    """Id of the residual stream after the last layer."""
    return vllm_config.model_config.get_total_num_hidden_layers()


class Tap:
    """Wraps one runner. Without a watcher it only keeps the additional layer from the drafter."""

    def __init__(self, runner):
        self.runner = runner
        drafter = runner.vllm_config.speculative_config.draft_model_config.hf_config
        # A drafter that reads the last layer itself goes on seeing it.
        self.own_layer = last_layer(runner.vllm_config) in drafter.eagle_aux_hidden_state_layer_ids
        self.watcher: Watcher | None = None
        self.sampled: torch.Tensor | None = None
        self.stream: torch.cuda.Stream | None = None
        self.second = not hasattr(runner, "drafter")
        self._rows = self._rows_v2 if self.second else self._rows_v1
        self.sampler = "sample" if self.second else "_sample"
        self.plain = runner.execute_model, runner.sample_tokens, getattr(runner, self.sampler)
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens
        setattr(runner, self.sampler, self._sample)
        if self.second and runner.speculator is not None:  # the last pipeline stage has one
            self.propose, runner.speculator.propose = runner.speculator.propose, self._propose

    def _execute_model(self, scheduler_output, *args, **options):
        if self.watcher is not None:
            for request in scheduler_output.finished_req_ids:
                self.watcher.finished(request)
            for new in scheduler_output.scheduled_new_reqs:
                self.watcher.started(new.req_id, new.prompt_token_ids, new.sampling_params)
            self.scheduled = scheduler_output.num_scheduled_tokens
            self.drafts = scheduler_output.scheduled_spec_decode_tokens
        return self.plain[0](scheduler_output, *args, **options)

    def _sample(self, *args, **options):
        result = self.plain[2](*args, **options)
        if self.watcher is not None:
            self.sampled = _came_out(result)
        return result

    def _propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, *args, **options):
        """V2 asks for drafts at its dummy runs too, at every start, and not only in `sample_tokens`."""
        return self.propose(input_batch, attn_metadata, slot_mappings, last_hidden_states, self._drafters(aux_hidden_states),
                            *args, **options)

    def _drafters(self, states: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Of the captured layers' states those that the drafter reads."""
        return states if self.own_layer or not states else states[:-1]

    def _sample_tokens(self, *args, **options):
        state, rows = self.runner.execute_model_state, None
        if state is not None and state.aux_hidden_states:
            if self.watcher is not None:
                rows = self._rows(state)
            if not self.second:  # V1 drafts nowhere else, and its dummy runs make states of their own
                self.runner.execute_model_state = state._replace(aux_hidden_states=self._drafters(state.aux_hidden_states))
        result = self.plain[1](*args, **options)
        for place, request, first, tokens, states, drafted in rows or ():
            sampled = self.sampled[place]
            (first, tokens, states, sampled), ready = self._to_host(first, tokens, states, sampled)
            self.watcher.add(request, Piece(first, tokens, states, sampled, drafted, ready))
        self.sampled = None
        return result

    def _rows_v1(self, state) -> list[tuple]:
        """(place in the batch, request, first position, tokens, states, number of drafts) of each watched request."""
        runner, rows, start = self.runner, [], 0
        for place, request in enumerate(runner.input_batch.req_ids):
            count = self.scheduled[request]
            if self.watcher.watches(request):
                part = slice(start, start + count)
                rows.append((place, request, runner.positions[start:start + 1].clone(), runner.input_ids.gpu[part].clone(),
                             torch.stack([layer[part] for layer in state.aux_hidden_states], 1),
                             len(self.drafts.get(request, ()))))
            start += count
        return rows

    def _rows_v2(self, state) -> list[tuple]:
        batch, rows = state.input_batch, []
        starts = batch.query_start_loc_np
        for place, request in enumerate(batch.req_ids):
            if self.watcher.watches(request):
                part = slice(int(starts[place]), int(starts[place + 1]))
                rows.append((place, request, batch.positions[part][:1].clone(), batch.input_ids[part].clone(),
                             torch.stack([layer[part] for layer in state.aux_hidden_states], 1),
                             len(self.drafts.get(request, ()))))
        return rows

    def _to_host(self, *tensors: torch.Tensor):
        """Copies in host memory; from a GPU through pinned memory on a stream of their own, ready after the returned
        call. The tensors are this step's own: buffers that the next step fills anew were cloned before."""
        if not tensors[0].is_cuda:
            return tensors, _nothing
        if self.stream is None:
            self.stream = torch.cuda.Stream(tensors[0].device)
        self.stream.wait_stream(torch.cuda.current_stream())
        copies = []
        with torch.cuda.stream(self.stream):
            for tensor in tensors:
                tensor.record_stream(self.stream)
                copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True))
            event = self.stream.record_event()
        return copies, event.synchronize


def _came_out(result) -> torch.Tensor:
    """Tokens that a step's sampling yielded, [requests, k + 1], -1 for what was rejected.

    V1 fills these places itself. V2 gives (sampler output, number sampled, number rejected) and leaves whatever the memory
    held in the places past the number sampled.
    """
    if not isinstance(result, tuple):
        return result.sampled_token_ids
    tokens, count = result[0].sampled_token_ids, result[1]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(places < count[:, None], tokens, -1)


def _nothing() -> None:
    """A copy on the CPU is there at once."""
