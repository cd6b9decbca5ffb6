"""The capture engine's KV connector: when a request finishes, its states leave the cache as a Sample.

vLLM's method `extract_hidden_states` stores, per token, the captured layers' states in a cache of its own, in blocks
like keys and values. This connector only stores: nothing is loaded. It has two halves in vLLM's terms. The scheduler
half notices that a request finished, keeps its blocks and tells the worker half in the next step; the worker half
gathers the states and sends them, one thread per receiver, while the engine goes on. The blocks are freed once the
sample is with its sender. A receiver that gives no credit thus holds blocks, the cache fills, the engine admits no
more requests: it slows down and drops nothing.

What became of each sample comes back to the engine's owner as vLLM's connector statistics, with a step's outputs.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from torchspec_lite.chat import mask_from_runs
from torchspec_lite.errors import UserError
from torchspec_lite.keys import load_keys
from torchspec_lite.sample import MIN_ANSWER_TOKENS, Sample
from torchspec_lite.stream import SampleError, Sender, StreamError, StreamTimeout
from workers.parent import end_with_parent
from workers.ticket import Outcome, Ticket, read_ticket

# An idle engine waits this long for a held request's sending before it looks for new requests again, seconds.
IDLE_WAIT_S = 0.02
# Tokens that leave a GPU at once, through one pinned buffer.
PIECE_TOKENS = 1024
FINISHED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(frozen=True)
class Finished:
    """A finished request whose states are to leave the cache."""

    request: str
    ticket: Ticket
    token_ids: list[int]  # n
    mask_runs: list[list[int]]
    blocks: list[int]


@dataclass
class CaptureMetadata(KVConnectorMetadata):
    """Scheduler half to worker half, once a step. `idle`: the step runs no token, so there is time to wait."""

    finished: list[Finished] = field(default_factory=list)
    idle: bool = False


@dataclass
class CaptureStats(KVConnectorStats):
    """Outcomes since the last step, as plain dictionaries in `data["outcomes"]`."""

    def reset(self) -> None:
        self.data = {"outcomes": []}

    def is_empty(self) -> bool:
        return not self.data["outcomes"]

    def aggregate(self, other: KVConnectorStats) -> "CaptureStats":
        return CaptureStats({"outcomes": self.data["outcomes"] + other.data["outcomes"]})

    def reduce(self) -> dict[str, int | float]:
        kinds = [outcome["kind"] for outcome in self.data["outcomes"]]
        return {kind: kinds.count(kind) for kind in ("sent", "failed", "rejected")}


@dataclass
class Lane:
    """The way to one receiver: a thread that gathers and sends, and the pinned buffer it gathers through on a GPU."""

    sender: Sender
    thread: ThreadPoolExecutor
    staging: torch.Tensor | None  # [PIECE_TOKENS, L + 1, H]


class CaptureConnector(KVConnectorBase_V1, SupportsHMA):
    """Its settings, `kv_connector_extra_config`, are written by `workers.engine.capture_args`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = self._kv_transfer_config.kv_connector_extra_config
        self._group, self._block_size = _state_group(kv_cache_config)
        self._finished: list[Finished] = []
        self._cache: torch.Tensor | None = None  # [blocks, block, L + 1, H]
        self._lanes: dict[str, Lane] = {}
        self._given_up: set[str] = set()
        self._sending: dict[Future, tuple[Finished, Lane]] = {}
        self._outcomes: list[dict] = []

    # Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> CaptureMetadata:
        finished, self._finished = self._finished, []
        return CaptureMetadata(finished, idle=scheduler_output.total_num_scheduled_tokens == 0)

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Keep the blocks (True) of a request that ended by itself; those of an aborted one are freed at once."""
        ticket = read_ticket(request.kv_transfer_params)
        if ticket is None or request.status not in FINISHED_WELL:
            return False, None
        if ticket.last_token is not None:
            token_ids, mask_runs = [*request.prompt_token_ids, ticket.last_token], ticket.mask_runs
        elif request.num_output_tokens >= MIN_ANSWER_TOKENS:
            token_ids = list(request.all_token_ids)
            mask_runs = [[request.num_prompt_tokens, len(token_ids)]]
        else:
            return False, None
        # The blocks are taken here, not followed from step to step: a preempted request was given others meanwhile.
        blocks = list(block_ids[self._group])
        self._finished.append(Finished(request.request_id, ticket, token_ids, mask_runs, blocks))
        return True, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def get_finished_count(self) -> int:
        """One report per request: under tensor parallelism only the first rank sends (all hold the same states)."""
        return 1

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if get_tensor_model_parallel_rank() != 0:
            return
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise RuntimeError(f"capture: vLLM has {len(layers)} caches of hidden states, expected 1")
        cache = kv_caches[next(iter(layers))]  # [blocks, L + 1, block, H]
        states = len(self._settings["layer_ids"]) + 1
        if tuple(cache.shape[1:3]) != (states, self._block_size):
            raise RuntimeError(f"capture: the cache of hidden states is {tuple(cache.shape)}, expected [blocks, "
                               f"{states}, {self._block_size}, H]; supported are vLLM 0.29 to 0.33")
        self._cache = cache.transpose(1, 2)

    def start_load_kv(self, forward_context, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """Start sending what just finished; give the ids of requests whose blocks are needed no longer."""
        if self._cache is None:
            return None, None
        metadata, released = self._get_connector_metadata(), set()
        for finished in metadata.finished:
            # The states of the request's last step were queued before this event, on the same stream.
            ready = torch.cuda.current_stream().record_event() if self._cache.is_cuda else None
            if finished.ticket.endpoint in self._given_up:
                released.add(finished.request)
                error = StreamError(f"receiver {finished.ticket.endpoint} is gone: its trainer came back elsewhere")
                self._outcomes.append(asdict(_outcome(finished.ticket, error)))
                continue
            lane = self._lane(finished.ticket)
            self._sending[lane.thread.submit(self._send, finished, lane, ready)] = finished, lane
        if metadata.idle and self._sending:
            wait(self._sending, timeout=IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        for future in [future for future in self._sending if future.done()]:
            finished, lane = self._sending.pop(future)
            released.add(finished.request)
            error = future.exception()
            self._outcomes.append(asdict(_outcome(finished.ticket, error)))
            broken = isinstance(error, StreamError) and not isinstance(error, StreamTimeout)
            if broken and self._lanes.get(finished.ticket.endpoint) is lane:
                # Turned away for good: the next sample for this receiver starts with a new sender.
                self.drop_sender(finished.ticket.endpoint)
        return released or None, None

    def get_kv_connector_stats(self) -> CaptureStats | None:
        if not self._outcomes:
            return None
        stats, self._outcomes = CaptureStats({"outcomes": self._outcomes}), []
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CaptureStats:
        return CaptureStats(data or {"outcomes": []})

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """Token before layer in memory, so that the states of a block are one piece."""
        return "LBNHC"

    def flush(self, timeout_s: float) -> None:
        """Wait until receivers have acknowledged what was sent. Raises StreamTimeout."""
        for lane in self._lanes.values():
            lane.sender.flush(timeout_s)

    def sender_stats(self) -> list[dict[str, Any]]:
        """`torchspec_lite.stream.SenderStats` of each receiver, as dictionaries."""
        return [asdict(lane.sender.stats()) for lane in self._lanes.values()]

    def move(self, old: str, new: str) -> None:
        """A trainer is at another address: what waits for the old one, and what requests in flight still have for it,
        fails at once and can be captured again."""
        self._given_up.add(old)
        self._given_up.discard(new)
        self.drop_sender(old)

    def drop_sender(self, endpoint: str) -> None:
        """End the sender to a receiver; what waits in it fails at once. The next sample for it starts a new one."""
        lane = self._lanes.pop(endpoint, None)
        if lane is not None:
            lane.sender.close()
            lane.thread.shutdown(wait=False)

    def shutdown(self) -> None:
        for endpoint in list(self._lanes):
            self.drop_sender(endpoint)

    def _lane(self, ticket: Ticket) -> Lane:
        if ticket.endpoint not in self._lanes:
            staging = None
            if self._cache.is_cuda:
                size = max(1, PIECE_TOKENS // self._block_size) * self._block_size
                staging = torch.empty(size, *self._cache.shape[2:], dtype=self._cache.dtype, pin_memory=True)
            thread = ThreadPoolExecutor(1, thread_name_prefix="capture-send")
            self._lanes[ticket.endpoint] = Lane(_sender(ticket, self._settings), thread, staging)
        return self._lanes[ticket.endpoint]

    def _send(self, finished: Finished, lane: Lane, ready: torch.cuda.Event | None) -> None:
        ticket, length = finished.ticket, len(finished.token_ids)
        aux, last = self._gather(finished.blocks, length - 1, lane, ready)
        lane.sender.send(Sample(
            id=ticket.sample, attempt=ticket.attempt, ordinal=ticket.ordinal, purpose=ticket.purpose,
            fingerprint=self._settings["fingerprint"], layer_ids=tuple(self._settings["layer_ids"]),
            token_ids=torch.tensor(finished.token_ids, dtype=torch.int32),
            mask=torch.tensor(mask_from_runs(finished.mask_runs, length), dtype=torch.uint8), aux=aux, last=last,
        ))

    def _gather(self, blocks: list[int], rows: int, lane: Lane, ready: torch.cuda.Event | None):
        """Copy `rows` states out of the cache, block by block, to the host: aux [rows, L, H] and last [rows, H].

        From a GPU they pass through the lane's pinned buffer, PIECE_TOKENS at a time, on a stream of their own that
        waits for `ready`: a long request needs no second copy of its states on the GPU.
        """
        _, _, states, hidden = self._cache.shape
        aux = torch.empty(rows, states - 1, hidden, dtype=self._cache.dtype)
        last = torch.empty(rows, hidden, dtype=self._cache.dtype)
        pieces = _pieces(blocks, rows, self._block_size)
        if lane.staging is None:
            for start, count, block in pieces:
                aux[start:start + count] = self._cache[block, :count, :-1]
                last[start:start + count] = self._cache[block, :count, -1]
            return aux, last
        stream = torch.cuda.Stream(self._cache.device)
        stream.wait_event(ready)
        while group := list(islice(pieces, lane.staging.shape[0] // self._block_size)):
            first, end = group[0][0], group[-1][0] + group[-1][1]
            with torch.cuda.stream(stream):
                for start, count, block in group:
                    part = lane.staging[start - first:start - first + count]
                    part.copy_(self._cache[block, :count], non_blocking=True)
            stream.synchronize()
            aux[first:end] = lane.staging[:end - first, :-1]
            last[first:end] = lane.staging[:end - first, -1]
        return aux, last


class CaptureExtension:
    """Methods of the engine's workers, for `collective_rpc`. Only the first rank has senders."""

    def capture_flush(self, timeout_s: float) -> None:
        _connector().flush(timeout_s)

    def capture_sender_stats(self) -> list[dict[str, Any]]:
        return _connector().sender_stats()

    def capture_drop_sender(self, endpoint: str) -> None:
        _connector().drop_sender(endpoint)

    def capture_move(self, old: str, new: str) -> None:
        _connector().move(old, new)


def capture_outcomes(kv_connector_stats: dict[str, Any] | None) -> list[Outcome]:
    """The outcomes in the connector statistics of one engine step."""
    return [Outcome(**values) for values in (kv_connector_stats or {"outcomes": []})["outcomes"]]


def _connector() -> CaptureConnector:
    return get_kv_transfer_group()


def _pieces(blocks: list[int], rows: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """(first row, rows in it, block id) of each block in use."""
    for place, start in enumerate(range(0, rows, block_size)):
        yield start, min(block_size, rows - start), blocks[place]


def _state_group(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Index and block size of the cache group that holds the states.

    With plain attention it is the only group, shared with keys and values; hybrid models have groups beside it whose
    blocks are of other sizes.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(groups) == 1:
        found = [0]
    if len(found) != 1:
        raise RuntimeError(f"capture: {len(found)} of {len(groups)} cache groups hold hidden states, expected 1; "
                           "targets with latent (MLA) attention are not supported")
    return found[0], groups[found[0]].kv_cache_spec.block_size


def _sender(ticket: Ticket, settings: dict[str, Any]) -> Sender:
    keys = None if ticket.key_file is None else load_keys(Path(ticket.key_file))
    return Sender(ticket.endpoint, settings["identity"], settings["budget_bytes"], keys, settings["heartbeat_s"],
                  settings["wait_s"], settings["shared_memory"])


def _outcome(ticket: Ticket, error: BaseException | None) -> Outcome:
    match error:
        case None:
            return Outcome(ticket.sample, ticket.attempt, "sent")
        case SampleError():
            return Outcome(ticket.sample, ticket.attempt, "rejected", error.kind, error.detail)
        case UserError():
            return Outcome(ticket.sample, ticket.attempt, "rejected", "too_large", str(error))
        case _:
            return Outcome(ticket.sample, ticket.attempt, "failed", "stream", f"{type(error).__name__}: {error}")


end_with_parent()  # imported in an engine before it loads its model, which takes minutes for a large one
