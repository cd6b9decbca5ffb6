"""A target worker: one frozen vLLM engine that answers (or reads) leased conversations and streams its states."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from torchspec_lite.chat import Reject, load_tokenizer, mask_runs, render_prompt, render_replay
from torchspec_lite.config import Config
from torchspec_lite.conversations import Dataset
from torchspec_lite.keys import save_keys
from torchspec_lite.lease import Lease
from torchspec_lite.sample import MIN_ANSWER_TOKENS
from torchspec_lite.target import TargetInfo
from workers.connector import capture_outcomes
from workers.engine import capture_args, engine_args
from workers.probe import ProbeReport, probe_states
from workers.target_address import ReceiverAddress
from workers.ticket import Outcome, Ticket, sample_seed, sampling

# Beyond the wait for a receiver's credit, a request may take this long before its engine counts as hung, seconds.
REQUEST_LIMIT_S = 900.0


class LeaseSource(Protocol):
    """The coordinator as a target worker sees it."""

    async def lease(self, worker: str, n: int) -> list[Lease] | None:
        """Up to n leases, waiting for the first; an empty list: none yet, ask again; None: there will be no more."""

    async def captured(self, id: str, attempt: int, tokens: int) -> None:
        """The sample of so many tokens is on its way to its trainer."""

    async def rejected(self, id: str, attempt: int, reason: str, detail: str) -> None:
        """The sample cannot be used, now or later."""

    async def failed(self, id: str, attempt: int, detail: str) -> None:
        """The sample did not get away; it may be leased again."""


@dataclass
class TargetStats:
    """Counts since the start. `kv_cache_usage` is the share in use: full when a receiver holds the engine back."""

    worker: str
    captured: int = 0
    rejected: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    in_flight: int = 0
    preemptions: int = 0
    kv_cache_usage: float = 0.0
    busy_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens per second of the time in which requests were in flight."""
        return (self.prompt_tokens + self.output_tokens) / self.busy_s if self.busy_s else 0.0


class OutcomeLogger(StatLoggerBase):
    """Takes the connector's outcomes out of the engine's statistics, where they arrive with each step's outputs."""

    def __init__(self, stats: TargetStats, deliver: Callable[[Outcome], None]):
        self._stats = stats
        self._deliver = deliver

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx: int = 0) -> None:
        if iteration_stats is not None:
            self._stats.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self._stats.kv_cache_usage = scheduler_stats.kv_cache_usage
            for outcome in capture_outcomes(scheduler_stats.kv_connector_stats):
                self._deliver(outcome)

    def log_engine_initialized(self) -> None:
        pass


class TargetWorker:
    """`files`: the conversation files of the run, training and held-out. `receivers`: one address per trainer rank."""

    def __init__(self, name: str, config: Config, info: TargetInfo, files: list[Path],
                 receivers: list[ReceiverAddress]):
        self.name = name
        self.config = config
        self.info = info
        self.layer_ids = tuple(config.capture.layer_ids or info.default_layer_ids())
        self._dataset = Dataset(files)
        self.tokenizer = load_tokenizer(info.path, config.target.trust_remote_code)
        self._receivers = list(receivers)
        self._keys = tempfile.TemporaryDirectory(prefix="torchspec-lite-keys-")
        self._key_files = {}
        self._waiting: dict[tuple[str, int], asyncio.Future[Outcome]] = {}
        self._engine: AsyncLLM | None = None
        self.probe: ProbeReport | None = None
        self._stats = TargetStats(name)
        self._busy_since: float | None = None

    async def start(self) -> None:
        """Load the engine and check a probe prompt against a plain forward (workers.probe).

        Raises ProbeError when the captured states are not those of the target.
        """
        # It would override the configured memory, whoever set it.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        capture, gpus = self.config.capture, self.config.capture.gpus
        args = engine_args(
            self.config.target, self.info.path, max_num_seqs=capture.max_num_seqs, kv_cache_mib=capture.kv_cache_mib,
            gpu_memory_utilization=capture.gpu_memory_utilization, gpus=gpus,
            max_num_batched_tokens=capture.max_num_batched_tokens, prefix_caching=False,
            seeds=self.config.data.temperature > 0)
        args |= capture_args(
            self.config.stream, layer_ids=self.layer_ids, num_layers=self.info.num_layers,
            fingerprint=self.info.fingerprint, identity=self.name, gpus=gpus)
        self._engine = await asyncio.to_thread(
            AsyncLLM.from_engine_args, AsyncEngineArgs(**args),
            stat_loggers=[lambda vllm_config, engine_index: OutcomeLogger(self._stats, self._deliver)])
        self.probe = await probe_states(self)

    async def run(self, source: LeaseSource) -> None:
        """Work through leases until there are no more; an error of any sample's task ends the run."""
        places = self.config.capture.max_num_seqs
        # A few more than the engine runs at once, so that it never waits for a lease.
        slots = asyncio.Semaphore(places + max(2, places // 4))
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await slots.acquire()
                    free = 1
                    while not slots.locked():
                        await slots.acquire()
                        free += 1
                    leases = await source.lease(self.name, free)
                    for _ in range(free - len(leases or [])):
                        slots.release()
                    if leases is None:
                        break
                    for lease in leases:
                        task = group.create_task(self._work(lease, source))
                        task.add_done_callback(lambda _: slots.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await self.flush()

    async def flush(self) -> None:
        """Wait until receivers have acknowledged what was sent. Raises an error that names the one that did not."""
        await self._engine.collective_rpc("capture_flush", args=(self.config.stream.wait_s,))

    async def set_receiver(self, rank: int, receiver: ReceiverAddress) -> None:
        """A trainer rank came back at another address. Samples that wait for the old one fail, to be leased anew."""
        old, self._receivers[rank] = self._receivers[rank], receiver
        if old.endpoint != receiver.endpoint:
            await self._engine.collective_rpc("capture_move", args=(old.endpoint, receiver.endpoint))

    async def drop_receiver(self, endpoint: str) -> None:
        """Close the sender to a receiver that is gone."""
        await self._engine.collective_rpc("capture_drop_sender", args=(endpoint,))

    def stats(self) -> dict:
        """`TargetStats` and tokens per second, as plain values."""
        self._clock()
        self._stats.in_flight = len(self._waiting)
        return {**asdict(self._stats), "tokens_per_s": self._stats.tokens_per_s}

    async def sender_stats(self) -> list[dict]:
        """What each receiver's sender holds and waits for (`torchspec_lite.stream.SenderStats`)."""
        return (await self._engine.collective_rpc("capture_sender_stats"))[0]

    async def close(self) -> None:
        """Stop the engine. Samples not yet acknowledged are lost to their receivers; `run` waits for them."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)
            self._engine = None
        self._keys.cleanup()

    async def capture(self, prompt: list[int], params: SamplingParams, ticket: Ticket) -> tuple[list[int], Outcome]:
        """One request through the engine: the token ids it generated, and what became of the sample.

        Raises TimeoutError naming the sample when the engine or the connector says nothing within the limit.
        """
        key = ticket.sample, ticket.attempt
        limit = self.config.stream.wait_s + REQUEST_LIMIT_S
        outcome = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._clock()
        request, generated = f"{ticket.sample}/{ticket.attempt}", []
        try:
            async with asyncio.timeout(limit):
                async for output in self._engine.generate({"prompt_token_ids": prompt}, params, request):
                    generated = output.outputs[0].token_ids
                if ticket.last_token is None and len(generated) < MIN_ANSWER_TOKENS:
                    detail = f"the target answers with {len(generated)} token"
                    return generated, Outcome(*key, "rejected", "empty_mask", detail)
                return generated, await outcome
        except TimeoutError as error:
            raise TimeoutError(f"target worker {self.name} waited {limit:g} s for its engine to answer and send sample "
                               f"{ticket.sample}") from error
        finally:
            del self._waiting[key]
            self._clock()

    async def _work(self, lease: Lease, source: LeaseSource) -> None:
        try:
            prompt, params, ticket = self._prepare(lease)
        except Reject as reject:
            self._stats.rejected += 1
            await source.rejected(lease.id, lease.attempt, reject.reason, reject.detail)
            return
        generated, outcome = await self.capture(prompt, params, ticket)
        replayed = ticket.last_token is not None
        match outcome.kind:
            case "sent":
                self._stats.captured += 1
                self._stats.prompt_tokens += len(prompt)
                self._stats.output_tokens += len(generated)
                await source.captured(lease.id, lease.attempt, len(prompt) + (1 if replayed else len(generated)))
            case "rejected":
                self._stats.rejected += 1
                await source.rejected(lease.id, lease.attempt, outcome.reason, outcome.detail)
            case "failed":
                self._stats.failed += 1
                await source.failed(lease.id, lease.attempt, outcome.detail)

    def _prepare(self, lease: Lease) -> tuple[list[int], SamplingParams, Ticket]:
        """Prompt, sampling parameters and ticket of a lease. Raises Reject."""
        data = self.config.data
        conversation = self._dataset.get(lease.id)
        longest = min(data.max_length, self.config.target.max_model_len)
        ticket = dict(sample=lease.id, attempt=lease.attempt, ordinal=lease.ordinal, purpose=lease.purpose,
                      endpoint=self._receivers[lease.rank].endpoint, key_file=self._key_file(lease.rank))
        if data.mode == "replay":
            rendered = render_replay(self.tokenizer, conversation, longest)
            ticket = Ticket(**ticket, mask_runs=mask_runs(rendered.mask), last_token=rendered.token_ids[-1])
            return rendered.token_ids[:-1], sampling(ticket, 1, 0.0, None), ticket
        prompt = render_prompt(self.tokenizer, conversation, longest)
        ticket = Ticket(**ticket)
        answer = min(data.max_answer_tokens, longest - len(prompt))
        return prompt, sampling(ticket, answer, data.temperature, sample_seed(self.config.seed, lease.ordinal)), ticket

    def _key_file(self, rank: int) -> str | None:
        receiver = self._receivers[rank]
        if receiver.keys is None:
            return None
        if receiver.endpoint not in self._key_files:
            path = Path(self._keys.name) / f"{len(self._key_files)}.json"
            save_keys(path, receiver.keys)
            self._key_files[receiver.endpoint] = str(path)
        return self._key_files[receiver.endpoint]

    def _deliver(self, outcome: Outcome) -> None:
        future = self._waiting.get((outcome.sample, outcome.attempt))
        # A cancelled request no longer waits.
        if future is not None and not future.done():
            future.set_result(outcome)

    def _clock(self) -> None:
        """Add the time since the last call to the busy time if requests were in flight."""
        now = time.monotonic()
        if self._busy_since is not None:
            self._stats.busy_s += now - self._busy_since
        self._busy_since = now if self._waiting else None
