"""Engines of others as a serving pool: plain `vllm serve` processes that were started with our worker extension.

They are asked over HTTP: requests like any client's, and vLLM's `/collective_rpc` (its development mode) for the
extension's methods. They are neither started nor stopped here. A version's folder must be visible to each of them.
"""

import asyncio
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.pool import ReplicaGone, write_promoted
from torchspec_lite.acceptance import Counts
from torchspec_lite.config import Config, resolve_secret
from torchspec_lite.errors import UserError
from torchspec_lite.target import TargetInfo
from workers.capture_settings import capture_settings
from workers.refusal import SwapRefused
from workers.target_address import ReceiverAddress, written_down

ANSWER_S = 300.0
COUNTERS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted",
            "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
            "vllm:generation_tokens": "generated", "vllm:request_success": "requests"}
START = ("vllm serve MODEL … --worker-extension-cls workers.hot_swap.ServingExtension --additional-config "
         "'{\"torchspec_lite_capture\": true}', with VLLM_SERVER_DEV_MODE=1")


class Engine:
    """One `vllm serve` process. Draft rounds are kept by version: what its counters grew by while the version served."""

    def __init__(self, url: str, api_key: str | None):
        self.name = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_S)
        self.version = "v000000"
        self.base: dict[str, Counts] = {}
        self.before = Counts(0, ())
        self.busy = asyncio.Lock()

    async def rpc(self, method: str, *args) -> list:
        """The method's value on every rank. Raises ReplicaGone when the engine does not answer, UserError when it was not
        started for this."""
        try:
            answer = await self.client.post("/collective_rpc", json={"method": method, "args": list(args)})
        except httpx.HTTPError as error:
            raise ReplicaGone(f"engine {self.name} does not answer {method}: {error!r}") from error
        if answer.status_code != 200:
            raise UserError(f"engine {self.name}: {method} is refused with status {answer.status_code}; start it as {START}")
        return answer.json()["results"] if answer.content else []

    async def answered(self, stage: str, method: str, *args) -> list:
        """As `workers.server`: every rank's value, or SwapRefused for any rank's error."""
        answers = await self.rpc(method, *args)
        errors = [answer["error"] for answer in answers if not answer["ok"]]
        if errors:
            raise SwapRefused(stage, "; ".join(errors))
        return [answer["value"] for answer in answers]

    async def counters(self) -> tuple[dict, Counts]:
        """vLLM's counters since the engine started: totals, and the draft rounds among them. Raises ReplicaGone."""
        try:
            text = (await self.client.get("/metrics")).text
        except httpx.HTTPError as error:
            raise ReplicaGone(f"engine {self.name} does not answer: {error!r}") from error
        totals, positions = dict.fromkeys(COUNTERS.values(), 0), {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.name in COUNTERS and not sample.name.endswith("_created"):
                    totals[COUNTERS[family.name]] += int(sample.value)
                elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                    positions[int(sample.labels["position"])] = int(sample.value)
        return totals, Counts(totals["drafts"], tuple(positions[place] for place in sorted(positions)))

    async def swap(self, version_dir: str, fingerprint: str) -> dict:
        async with self.busy:
            begin = time.perf_counter()
            await self.answered("check", "swap_prepare", version_dir, fingerprint)
            loading = time.perf_counter()
            try:
                fingerprints = await self.answered("load", "swap_load")
            except BaseException:
                await self.answered("undo", "swap_undo")
                raise
            loaded = time.perf_counter()
            await self.answered("keep", "swap_keep")
            _, now = await self.counters()
            self._close_account(now)
            self.version = Path(version_dir).name
            return {"version": self.version, "fingerprint": ",".join(fingerprints), "load_ms": (loaded - loading) * 1e3,
                    "total_ms": (time.perf_counter() - begin) * 1e3}

    def _close_account(self, now: Counts) -> None:
        self.base[self.version] = self.base.get(self.version, Counts(0, ())) + (now - self.before)
        self.before = now

    async def stats(self) -> dict:
        totals, now = await self.counters()
        versions = dict(self.base)
        versions[self.version] = versions.get(self.version, Counts(0, ())) + (now - self.before)
        return {"replica": self.name, "version": self.version, **totals, "versions": [
            {"version": version, "drafts": counts.rounds, "accepted": counts.accepted,
             "per_position": list(counts.accepted_per_position)} for version, counts in versions.items()]}

    async def logged(self, model: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        """Greedy answers to prompts with every draft round along them, as `Replica.probe`."""
        async with self.busy:
            await self.rpc("draft_log_start")
            try:
                answers = await asyncio.gather(*(self._complete(model, prompt, max_tokens) for prompt in prompts))
            finally:
                logs = await self.rpc("draft_log_take")
        found = []
        for prompt, (request, tokens) in zip(prompts, answers):
            token_ids = [*prompt, *tokens]
            found.append({"token_ids": token_ids, "rounds": [
                (known, drafted) for owner, known, newest, drafted in logs[0]
                if request in owner and known <= len(token_ids) and token_ids[known - 1] == newest]})
        return found

    async def _complete(self, model: str, prompt: list[int], max_tokens: int) -> tuple[str, list[int]]:
        request = uuid.uuid4().hex
        answer = await self.client.post("/v1/completions", headers={"X-Request-Id": request}, json={
            "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True,
            "vllm_xargs": {"torchspec_lite_capture": 0}})
        answer.raise_for_status()
        return request, answer.json()["choices"][0]["token_ids"]


class ExternalPool:
    """The interface of `cluster.pool.Pool` over engines of others. `connect` first."""

    def __init__(self, config: Config, info: TargetInfo, run_dir: str):
        self.config, self.info, self.run_dir = config, info, run_dir
        key = resolve_secret(config.serve.api_key, "serve.api_key")
        self.engines = {url: Engine(url, key) for url in config.serve.external}
        self.url, self.replica_count = config.serve.external[0], len(self.engines)
        self.model = config.serve.model_name or info.name
        self.keys = tempfile.TemporaryDirectory(prefix="torchspec-lite-keys-")

    async def connect(self, version_dir: str) -> None:
        """Have every engine draft with the first version. Raises UserError when one cannot."""
        for engine in self.engines.values():
            try:
                await engine.answered("describe", "swap_describe")
                await engine.swap(version_dir, self.info.fingerprint)
            except (ReplicaGone, SwapRefused) as error:
                raise UserError(f"config serve.external {engine.name}: {error}; start it as {START}, with the drafter of "
                                "drafter.init_from") from error
        self.promote(version_dir)

    async def stats(self) -> list[dict]:
        found = await asyncio.gather(*(engine.stats() for engine in self.engines.values()), return_exceptions=True)
        return [stats for stats in found if isinstance(stats, dict)]

    async def replicas(self) -> list[str]:
        return [stats["replica"] for stats in await self.stats()]

    async def swap(self, replica: str, version_dir: str) -> dict:
        return await self.engines[replica].swap(version_dir, self.info.fingerprint)

    async def probe(self, replica: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        return await self.engines[replica].logged(self.model, prompts, max_tokens)

    async def shadow(self, replica: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        """As `Pool.shadow`, from the draft log: what lies between two rounds of a request was accepted by the first. An
        answer's last round is left out unless all was accepted: the end of the answer may have cut it short."""
        found, steps = [], self.config.serve.num_speculative_tokens
        for answer in await self.probe(replica, prompts, max_tokens):
            length = len(answer["token_ids"])
            places = [known for known, _ in answer["rounds"] if known < length]
            ends = [*places[1:], *([length] if places and length - places[-1] - 1 >= steps else [])]
            counts = Counts.of_rounds([min(steps, end - place - 1) for place, end in zip(places, ends)], steps)
            found.append({"drafts": counts.rounds, "accepted": counts.accepted, "per_position": list(counts.accepted_per_position)})
        return found

    def promote(self, version_dir: str) -> None:
        write_promoted(self.run_dir, version_dir)

    async def traffic(self) -> list[dict]:
        found = []
        for engine in self.engines.values():
            try:
                values = next((values for values in await engine.rpc("capture_stats") if values), {})
                totals, _ = await engine.counters()
                found.append({"replica": engine.name, "requests": totals["requests"], **values})
            except ReplicaGone:
                continue
        return found

    async def capture(self, replica: str, receivers: list[ReceiverAddress]) -> None:
        """The engine's worker itself chooses `traffic.fraction` of the requests that do not forbid it."""
        settings = capture_settings(self.config, replica, self.info, self.config.traffic.fraction)
        await self.engines[replica].rpc("capture_on", asdict(settings), written_down(receivers, self.keys.name))

    async def recent_prompts(self, count: int) -> list[list[int]]:
        """None: these engines remember no prompt, so versions are compared on held-out ones."""
        return []

    async def close(self) -> None:
        for engine in self.engines.values():
            await engine.client.aclose()
        self.keys.cleanup()
