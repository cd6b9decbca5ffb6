"""One serving replica: a vLLM engine with its drafter, vLLM's own OpenAI-compatible application, and the hot swap."""

import asyncio
import os
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import REGISTRY
from vllm import AsyncEngineArgs, SamplingParams
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from torchspec_lite.config import Config, ServeConfig
from torchspec_lite.errors import UserError
from torchspec_lite.export import MANIFEST, verify
from torchspec_lite.target import describe
from workers.answer import values_of
from workers.api_key import NeedsKey
from workers.capture_settings import CaptureSettings, capture_settings
from workers.consent import AsksConsent, Sampling
from workers.draft_stats import DraftCounter, DraftMetrics
from workers.engine import engine_args
from workers.refusal import SwapRefused
from workers.scheduler import BREAK_EVEN
from workers.second_answers import SecondAnswers
from workers.tap import SETTING
from workers.target_address import ReceiverAddress, written_down

EXTENSION = "workers.hot_swap.ServingExtension"
ANSWER_S = 120.0
LOW_PRIORITY = 1


class Replica:
    """A plain class; `cluster.pool` makes it a Ray Serve replica. Make one with `await Replica.start(...)`.

    `app` is the ASGI application: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, … of vLLM.
    """

    def __init__(self, engine: AsyncLLM, app: FastAPI, counter: DraftCounter, name: str, target_fingerprint: str,
                 max_num_seqs: int):
        self.engine = engine
        self.app = app
        self.counter = counter
        self.name = name
        self.target_fingerprint = target_fingerprint
        self.fingerprint = ""
        self.runner = ""
        self.swaps = 0
        self.refused = 0
        self.started = time.time()
        self.capture_settings: CaptureSettings | None = None
        self.sampling = Sampling(0.0, False, 0.0)
        self._changing = asyncio.Lock()
        # vLLM gives a seat to whoever is next in line and takes it back from nobody: what the pool asks of itself leaves half.
        self._seats = asyncio.Semaphore(max(1, max_num_seqs // 2))
        self._metrics = DraftMetrics(counter, name)
        self._keys = tempfile.TemporaryDirectory(prefix="torchspec-lite-keys-")

    @classmethod
    async def start(cls, config: Config, target_dir: str, version_dir: str, name: str,
                    api_key: str | None = None, opt_out_key: str | None = None) -> "Replica":
        """Start an engine on the target in `target_dir` with the drafter in `version_dir`.

        The process needs `workers.engine.engine_env` from its birth. Takes 10 to 30 s on a CPU. Raises UserError when
        a folder is missing or a drafter is not as its manifest says, and whatever vLLM raises when it cannot run the
        pair.
        """
        drafter_dir = Path(version_dir)
        if not (drafter_dir / "config.json").is_file():
            raise UserError(f"drafter {version_dir}: no config.json there; give a drafter folder, like "
                            "runs/NAME/drafters/v000001")
        target = describe(target_dir)
        if (drafter_dir / MANIFEST).is_file():
            verify(drafter_dir, target.fingerprint)
        args = serving_args(config, target_dir, version_dir)
        counter = DraftCounter(drafter_dir.name, config.serve.num_speculative_tokens)
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args), stat_loggers=[lambda vllm_config, index: counter])
        model_name = config.serve.model_name or target.name
        app = await _openai_app(engine, args, model_name, api_key, opt_out_key)
        replica = cls(engine, app, counter, name, target.fingerprint, config.serve.max_num_seqs)
        replica.capture_settings = capture_settings(config, name, target, 0.0)
        if config.traffic.fraction:
            traffic = config.traffic
            replica.sampling = Sampling(traffic.fraction, traffic.whole_prompts, traffic.max_age_s)
            if traffic.second_answers:
                replica.sampling.second = SecondAnswers(
                    engine.generate, lambda: counter.running + counter.waiting, name, traffic.second_answers,
                    traffic.second_answers_below, config.data.max_length, traffic.max_age_s)
            replica.sampling.mark_requests_of(engine)
        app.state.openai_serving_models = _ModelsWithDrafter(engine, model_name, target_dir, replica)
        REGISTRY.register(replica._metrics)
        described = await replica._all_ranks("swap_describe")
        replica.fingerprint = ",".join(answer["fingerprint"] for answer in described)
        replica.runner = described[0]["runner"]
        return replica

    async def swap(self, version_dir: str) -> dict:
        """Make the running engine draft with another version; requests in flight go on.

        Every rank checks the version first, then every rank loads it and reads it back. Raises SwapRefused when any
        step fails anywhere; the old weights then draft on. Returns {version, fingerprint, load_ms, total_ms}: load_ms
        is the pause that a running request can see.
        """
        async with self._changing:
            begin = time.perf_counter()
            version = Path(version_dir).name
            try:
                await self._stage("check", "swap_prepare", version_dir, self.target_fingerprint)
                self.counter.begin_swap()
                loading = time.perf_counter()
                try:
                    fingerprints = await self._stage("load", "swap_load")
                except BaseException:
                    await self._all_ranks("swap_undo")
                    self.counter.end_swap(self.counter.version)
                    raise
                loaded = time.perf_counter()
                await self._all_ranks("swap_keep")
            except SwapRefused:
                self.refused += 1
                raise
            self.counter.end_swap(version)
            self.fingerprint = ",".join(fingerprints)
            self.swaps += 1
            return {"version": version, "fingerprint": self.fingerprint, "load_ms": (loaded - loading) * 1e3,
                    "total_ms": (time.perf_counter() - begin) * 1e3}

    async def probe(self, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        """What the engine drafts for some prompts (token ids), greedily, with nothing read from the prefix cache.

        Returns per prompt {"token_ids": the prompt and the answer, "rounds": [(n, drafted ids), …]}: after the first n
        of those tokens were known, the drafter proposed these for the places after them.
        """
        async with self._changing:
            await self._all_ranks("draft_log_start")
            try:
                answers = await self._generate(prompts, max_tokens, priority=LOW_PRIORITY)
            finally:
                logs = await self._all_ranks("draft_log_take")
        found = []
        for prompt, (request_id, output) in zip(prompts, answers, strict=True):
            token_ids = [*prompt, *output.token_ids]
            rounds = [(known, list(drafted)) for owner, known, newest, drafted in logs[0]
                      if owner.startswith(request_id) and known <= len(token_ids) and token_ids[known - 1] == newest]
            found.append({"token_ids": token_ids, "rounds": rounds})
        return found

    async def shadow(self, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        """Answer prompts (token ids) greedily at low priority, behind all real requests, to have rounds to compare. They
        take at most half of the engine's seats, so that a user's request finds one.

        Returns per prompt {drafts, accepted, per_position}, by vLLM's own count for that request.
        """
        answers = await self._generate(prompts, max_tokens, priority=LOW_PRIORITY)
        return [_draft_counts(output.spec_decode_metrics) for _, output in answers]

    async def capture(self, receivers: list[ReceiverAddress]) -> None:
        """Stream the states of sampled requests to these receivers, one a trainer rank, from the next request on."""
        await self._all_ranks("capture_on", asdict(self.capture_settings), written_down(receivers, self._keys.name))

    def recent_prompts(self, count: int) -> list[list[int]]:
        """Token ids of the prompts sampled last that are not too old, newest first; they are in memory only."""
        return self.sampling.recent(count)

    def second_answers(self, wanted: bool) -> None:
        """Whether trainers have use for second answers (`traffic.second_answers`) just now."""
        if self.sampling.second is not None:
            self.sampling.second.want(wanted)

    async def traffic(self) -> dict:
        """What was captured: {replica, requests, excluded} and, while it captures, `Courier.values()`.

        The driver asks at every report, so no prompt outlives `traffic.max_age_s` by more than a report's interval.
        """
        self.sampling.forget_old()
        found = next((found for found in await self._all_ranks("capture_stats") if found), {})
        return {"replica": self.name, "requests": self.sampling.requests, "excluded": self.sampling.excluded, **found}

    async def set_drafting(self, enabled: bool) -> bool:
        """Switch drafting off to measure what it gains, or on again; returns whether this engine can (see DraftLog)."""
        return all(await self._all_ranks_plain("drafting", enabled))

    def stats(self) -> dict:
        """Plain values: what `DraftCounter.snapshot` says, and {replica, pid, fingerprint, swaps, refused, runner,
        started}."""
        return {**self.counter.snapshot(), "replica": self.name, "pid": os.getpid(), "fingerprint": self.fingerprint,
                "swaps": self.swaps, "refused": self.refused, "runner": self.runner, "started": self.started}

    async def check_health(self) -> None:
        """Raises vLLM's EngineDeadError once the engine is gone; Ray Serve then replaces the replica."""
        await self.engine.check_health()

    def close(self) -> None:
        """Stop the engine and its processes."""
        if self._metrics is not None:
            REGISTRY.unregister(self._metrics)
            self._metrics = None
            if self.sampling.second is not None:
                self.sampling.second.close()
            self.engine.shutdown()
            self._keys.cleanup()

    async def _generate(self, prompts, max_tokens, priority):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, skip_reading_prefix_cache=True)

        async def answer(prompt):
            request_id = f"{self.name}-{uuid.uuid4().hex}"
            async with self._seats:
                async for output in self.engine.generate({"prompt_token_ids": prompt}, params, request_id,
                                                         priority=priority):
                    if output.finished:
                        return request_id, output.outputs[0]
            raise RuntimeError(f"replica {self.name}: vLLM ended request {request_id} without an answer")

        return await asyncio.gather(*(answer(prompt) for prompt in prompts))

    async def _stage(self, stage: str, method: str, *args) -> list:
        try:
            return await self._all_ranks(method, *args)
        except RuntimeError as error:
            raise SwapRefused(stage, str(error)) from error

    async def _all_ranks(self, method: str, *args) -> list:
        """Call an answering method (`workers.answer`) on every rank; raises RuntimeError if any rank failed."""
        return values_of(await self._all_ranks_plain(method, *args))

    async def _all_ranks_plain(self, method: str, *args) -> list:
        try:
            return await asyncio.wait_for(self.engine.collective_rpc(method, args=args), ANSWER_S)
        except TimeoutError:
            raise RuntimeError(
                f"replica {self.name} waited {ANSWER_S:.0f} s for its engine to answer {method}") from None


def serving_args(config: Config, target_dir: str, version_dir: str) -> dict:
    """Keyword arguments of vLLM's AsyncEngineArgs for a replica: the target, the drafter, the swap extension."""
    serve = config.serve
    args = engine_args(config.target, target_dir, max_num_seqs=serve.max_num_seqs, kv_cache_mib=serve.kv_cache_mib,
                       gpu_memory_utilization=serve.gpu_memory_utilization, gpus=serve.gpus,
                       max_num_batched_tokens=None, prefix_caching=True, seeds=True)
    return args | {
        "worker_extension_cls": EXTENSION,
        "per_request_spec_decode_metrics": "summary",
        "scheduling_policy": "priority",
        "speculative_config": speculative_config(serve, version_dir),
        "additional_config": {SETTING: config.traffic.fraction > 0, BREAK_EVEN: serve.break_even},
    } | _scheduler(serve, config.traffic.second_answers > 0)


def speculative_config(serve: ServeConfig, version_dir: str) -> dict:
    """vLLM's `speculative_config`. Above `max_concurrency_for_speculation` requests vLLM drafts nothing, and goes on
    writing the drafter's keys and values, so that drafting resumes where it left off."""
    chosen = {"method": "eagle3", "model": version_dir, "num_speculative_tokens": serve.num_speculative_tokens}
    most = serve.max_concurrency_for_speculation
    if most == "auto":
        most = serve.max_num_seqs - 1  # to begin with; the scheduler goes on from there
    if most is not None and 0 < most < serve.max_num_seqs:
        chosen["num_speculative_tokens_per_batch_size"] = [
            (1, most, serve.num_speculative_tokens), (most + 1, serve.max_num_seqs, 0)]
    return chosen


def _scheduler(serve: ServeConfig, second_answers: bool) -> dict:
    """The scheduler that stops drafting above a number of requests, but for shadow prompts and probes, where that is asked
    for and there is anything to switch; where second answers are given, one that does not count their rounds."""
    most = serve.max_concurrency_for_speculation
    if most == "auto" and serve.max_num_seqs > 1:
        kind = "ServingScheduler"
    elif isinstance(most, int) and most < serve.max_num_seqs:
        kind = "LimitedScheduler"
    elif second_answers:
        kind = "CountingScheduler"
    else:
        return {}
    return {"scheduler_cls": f"workers.scheduler.{'Async' if serve.gpus else ''}{kind}"}


def _draft_counts(metrics) -> dict:
    """vLLM's metrics of one request as {drafts, accepted, per_position}; it has none when no draft was verified."""
    if metrics is None:
        return {"drafts": 0, "accepted": 0, "per_position": []}
    values = metrics.to_dict()
    rounds = values["acceptance_histogram"]
    return {"drafts": values["num_spec_steps"], "accepted": values["num_accepted_draft_tokens"],
            "per_position": [sum(rounds[place:]) for place in range(1, len(rounds))]}


class _ModelsWithDrafter(OpenAIServingModels):
    """vLLM's model list, each card with the drafter that serves it: `drafter: {version, fingerprint}`."""

    def __init__(self, engine: AsyncLLM, model_name: str, model_path: str, replica: Replica):
        super().__init__(engine, [BaseModelPath(name=model_name, model_path=model_path)])
        self._replica = replica

    async def show_available_models(self):
        models = await super().show_available_models()
        drafter = {"version": self._replica.counter.version, "fingerprint": self._replica.fingerprint}
        models.data = [type(card)(**card.model_dump(), drafter=drafter) for card in models.data]
        return models


async def _openai_app(engine: AsyncLLM, args: dict, model_name: str, api_key: str | None,
                      opt_out_key: str | None) -> FastAPI:
    options = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in args.items():
        setattr(options, name, value)
    options.served_model_name = [model_name]
    # Without a key of its own the endpoint is open to all, and the opt-out key only marks requests.
    keys = [api_key, *([opt_out_key] if opt_out_key else [])] if api_key else []
    options.api_key = keys or None
    tasks = await engine.get_supported_tasks()
    app = build_app(options, tasks, engine.model_config)
    # vLLM hands the application over with its middleware in place already, so these go around the outside.
    app.middleware_stack = AsksConsent(app.middleware_stack or app.build_middleware_stack(), opt_out_key)
    if keys:
        app.middleware_stack = NeedsKey(app.middleware_stack, keys)
    await init_app_state(engine, app.state, options, tasks)
    return app
