"""Engines of others as a serving pool: plain `vllm serve` processes that were started with our worker extension.

They are asked over HTTP: requests like any client's, and vLLM's `/collective_rpc` (its development mode) for the
extension's methods. They are neither started nor stopped here. A version's folder must be visible to each of them.
One that its owner restarts is given the promoted version before it is listed again, under a new name.
"""

import asyncio
import logging
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.pool import STATS_WAIT_S, ReplicaGone, promoted, write_promoted
from torchspec_lite.acceptance import Counts
from torchspec_lite.config import Config, resolve_secret
from torchspec_lite.errors import UserError
from torchspec_lite.target import TargetInfo
from workers.answer import RankFailed, values_of
from workers.capture_settings import capture_settings
from workers.refusal import SwapRefused
from workers.target_address import ReceiverAddress, written_down

log = logging.getLogger(__name__)

ANSWER_S = 300.0
JOIN_AGAIN_S = 15.0
"""An engine that did not take the promoted version is asked again after so long: each try reads a drafter from disk."""
CAPTURE_AGAIN_S = 60.0
"""An engine that refused to capture is asked again after so long: it was started so, and seldom thinks better of it."""
LEAVE_S = 15.0
"""Longest wait for all engines to stop capturing at the end of a run; each stops by itself when the trainers are gone."""
START_UP = "v000000"
"""The version under which rounds of the drafter that an engine was started with are counted."""
COUNTERS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted",
            "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
            "vllm:generation_tokens": "generated", "vllm:request_success": "requests",
            "process_start_time_seconds": "started"}  # 0 where several API servers share the engine
GROWING = ("drafts", "accepted", "generated", "requests")
START = ("vllm serve MODEL … --worker-extension-cls workers.hot_swap.ServingExtension --additional-config "
         "'{\"torchspec_lite_capture\": true}', with VLLM_SERVER_DEV_MODE=1")


class Engine:
    """The `vllm serve` at an address. Draft rounds are kept by version: what its counters grew by while the version served.

    `joined`: the process that is there now was given one of our versions. `name` is another after each restart, as a pool's
    is, so that what is asked of the process that was there before is never answered by the one after it. `at_once`: most
    prompts of our own that it answers at the same time.
    """

    def __init__(self, url: str, api_key: str | None, at_once: int):
        self.url = self.name = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_S)
        self.restarts = 0
        self.last: tuple[dict, Counts] | None = None
        self.said: dict[str, str | None] = {}
        self.busy, self.reading = asyncio.Lock(), asyncio.Lock()
        self.seats = asyncio.Semaphore(at_once)
        self._begin()

    def _begin(self) -> None:
        """What is true of a process that has just been found."""
        self.version, self.joined, self.join_at, self.capture_at = START_UP, False, 0.0, 0.0
        self.base: dict[str, Counts] = {}
        self.before = Counts(0, ())

    async def _ask(self, what: str, kind: str, path: str, **options) -> httpx.Response:
        """Raises ReplicaGone where nothing answers, or only a server whose engine has failed."""
        try:
            answer = await self.client.request(kind, path, **options)
        except httpx.HTTPError as error:
            raise ReplicaGone(f"engine {self.name} does not answer {what}: {error!r}") from error
        if answer.is_server_error:
            raise ReplicaGone(f"engine {self.name} answers {what} with status {answer.status_code}: {answer.text[:300]}")
        return answer

    def _refused(self, what: str, answer: httpx.Response) -> UserError:
        return UserError(f"engine {self.name}: {what} is refused with status {answer.status_code}; start it as {START}")

    async def rpc(self, method: str, *args, wait_s: float = ANSWER_S) -> list:
        """What every rank answers (`workers.answer`). Raises ReplicaGone when the engine does not answer or fails, UserError when it
        was not started for this."""
        answer = await self._ask(method, "POST", "/collective_rpc", json={"method": method, "args": list(args)}, timeout=wait_s)
        if answer.status_code != 200:
            raise self._refused(method, answer)
        return answer.json()["results"] if answer.content else []

    async def answered(self, stage: str, method: str, *args) -> list:
        """As `workers.server`: every rank's value, or SwapRefused for any rank's error."""
        try:
            return values_of(await self.rpc(method, *args))
        except RankFailed as error:
            raise SwapRefused(stage, str(error)) from error

    async def told(self, method: str, *args, wait_s: float = ANSWER_S) -> list:
        """Every rank's value of a method that no sound engine refuses. Raises ReplicaGone for any rank's error too."""
        try:
            return values_of(await self.rpc(method, *args, wait_s=wait_s))
        except RankFailed as error:
            raise ReplicaGone(f"engine {self.name} fails at {method}: {error}") from error

    async def counters(self) -> tuple[dict, Counts]:
        """vLLM's counters since the engine started: totals, and the draft rounds among them. Notices a restart. Raises
        ReplicaGone, or UserError when there are none."""
        async with self.reading:  # of two pages at once the older could come last, and look like a restart
            answer = await self._ask("metrics", "GET", "/metrics", timeout=STATS_WAIT_S)
            if answer.status_code != 200:
                raise self._refused("metrics", answer)
            totals, positions = dict.fromkeys(COUNTERS.values(), 0), {}
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    if family.name in COUNTERS and not sample.name.endswith("_created"):
                        totals[COUNTERS[family.name]] += int(sample.value)
                    elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                        positions[int(sample.labels["position"])] = int(sample.value)
            found = totals, Counts(totals["drafts"], tuple(positions[place] for place in sorted(positions)))
            if self.last is not None and _is_another(self.last, found):
                self.restarts += 1
                self.name = f"{self.url}#{self.restarts + 1}"
                log.warning(f"engine {self.url} was restarted; it is called {self.name} from now on")
                self._begin()
            self.last = found
        return found

    async def join(self, newest: Callable[[], str], fingerprint: str) -> None:
        """Have a process that was just found draft with the version folder that `newest` names, be it another meanwhile.
        Does nothing where that is done, or failed less than JOIN_AGAIN_S ago. Raises ReplicaGone, SwapRefused, or UserError
        when it was not started for this."""
        async with self.busy:
            if self.joined or time.monotonic() < self.join_at:
                return
            self.join_at = time.monotonic() + JOIN_AGAIN_S
            name, taken = self.name, None
            await self.answered("describe", "swap_describe")
            while taken != (wanted := newest()):
                await self._take(wanted, fingerprint)
                taken = wanted
            self.joined = self.name == name

    async def swap(self, version_dir: str, fingerprint: str) -> dict:
        async with self.busy:
            return await self._take(version_dir, fingerprint)

    async def _take(self, version_dir: str, fingerprint: str) -> dict:
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

    async def stats(self) -> dict | None:
        """As `Replica.stats`; None while the process is not `joined`."""
        totals, now = await self.counters()
        if not self.joined:
            return None
        versions = dict(self.base)
        versions[self.version] = versions.get(self.version, Counts(0, ())) + (now - self.before)
        return {"replica": self.name, "version": self.version, **totals, "versions": [
            {"version": version, "drafts": counts.rounds, "accepted": counts.accepted,
             "per_position": list(counts.accepted_per_position)} for version, counts in versions.items()]}

    async def logged(self, model: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        """Greedy answers to prompts with every draft round along them, as `Replica.probe`."""
        async with self.busy:
            await self.told("draft_log_start")
            try:
                answers = await asyncio.gather(*(self._complete(model, prompt, max_tokens) for prompt in prompts))
            finally:
                logs = await self.told("draft_log_take")
        found = []
        for prompt, (request, tokens) in zip(prompts, answers):
            token_ids = [*prompt, *tokens]
            found.append({"token_ids": token_ids, "rounds": [
                (known, drafted) for owner, known, newest, drafted in logs[0]
                if request in owner and known <= len(token_ids) and token_ids[known - 1] == newest]})
        return found

    async def _complete(self, model: str, prompt: list[int], max_tokens: int) -> tuple[str, list[int]]:
        request = uuid.uuid4().hex
        async with self.seats:
            # A salt of its own: cached blocks hold the keys and values of the drafter that wrote them, which may be another.
            answer = await self._ask("a prompt", "POST", "/v1/completions", headers={"X-Request-Id": request}, json={
                "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True,
                "cache_salt": uuid.uuid4().hex, "vllm_xargs": {"torchspec_lite_capture": 0}})
        answer.raise_for_status()
        return request, answer.json()["choices"][0]["token_ids"]

    def say(self, about: str, trouble: str | None) -> None:
        """Log what does not work just now, once and not at every look; None: it works."""
        if trouble != self.said.get(about):
            log.log(logging.WARNING if trouble else logging.INFO, trouble or f"engine {self.name}: {about} works again")
        self.said[about] = trouble


def _is_another(last: tuple[dict, Counts], found: tuple[dict, Counts]) -> bool:
    """Whether two readings in a row are of two processes."""
    (old, old_counts), (new, new_counts) = last, found
    backwards = any(new[name] < old[name] for name in GROWING) or any(
        after < before for before, after in zip(old_counts.accepted_per_position, new_counts.accepted_per_position))
    return backwards or new["started"] != old["started"]


class ExternalPool:
    """The interface of `cluster.pool.Pool` over engines of others. `connect` first, `leave` when the run ends."""

    def __init__(self, config: Config, info: TargetInfo, run_dir: str):
        self.config, self.info, self.run_dir = config, info, run_dir
        key = resolve_secret(config.serve.api_key, "serve.api_key")
        at_once = max(1, config.serve.max_num_seqs // 2)  # as our own replicas; how many seats these have, they do not say
        self.engines = {url: Engine(url, key, at_once) for url in config.serve.external}
        self.url, self.replica_count = config.serve.external[0], len(self.engines)
        self.model = config.serve.model_name or info.name
        self.keys = tempfile.TemporaryDirectory(prefix="torchspec-lite-keys-")
        self.left = False

    async def connect(self, version_dir: str) -> None:
        """Have every engine draft with the first version. Raises UserError when one cannot."""
        self.promote(version_dir)
        for engine in self.engines.values():
            try:
                await self._join(engine)
            except (ReplicaGone, SwapRefused) as error:
                raise UserError(f"config serve.external {engine.name}: {error}; start it as {START}, with the drafter of "
                                "drafter.init_from") from error

    async def _join(self, engine: Engine) -> None:
        await engine.join(lambda: promoted(self.run_dir), self.info.fingerprint)

    async def stats(self) -> list[dict]:
        """Of every engine that answers and drafts with one of our versions; one that was restarted gets the promoted one
        here."""
        found = await asyncio.gather(*(self._look(engine) for engine in self.engines.values()))
        return [stats for stats in found if stats is not None]

    async def _look(self, engine: Engine) -> dict | None:
        try:
            stats = await engine.stats()
            if stats is None:
                await self._join(engine)
                stats = await engine.stats()
        except (ReplicaGone, SwapRefused, UserError) as error:
            engine.say("serving", f"engine {engine.name} is not counted as a replica: {error}")
            return None
        if stats is not None:
            engine.say("serving", None)
        return stats

    async def replicas(self) -> list[str]:
        return [stats["replica"] for stats in await self.stats()]

    async def _replica(self, name: str) -> Engine:
        """The engine of that name. Raises ReplicaGone when there is none any more."""
        for engine in self.engines.values():
            if engine.name == name:
                await engine.counters()  # a restart since the last look shows here
                if engine.name == name and engine.joined:
                    return engine
        raise ReplicaGone(f"engine {name} was restarted or does not draft with a version of this run")

    async def swap(self, replica: str, version_dir: str) -> dict:
        return await (await self._replica(replica)).swap(version_dir, self.info.fingerprint)

    async def probe(self, replica: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        return await (await self._replica(replica)).logged(self.model, prompts, max_tokens)

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
        """As `Pool.traffic`. A server whose engine died never answers a call that was under way."""
        found = []
        for engine in self.engines.values():
            if not engine.joined:
                continue
            try:
                values = next((values for values in await engine.told("capture_stats", wait_s=STATS_WAIT_S) if values), {})
                totals, _ = await engine.counters()
            except ReplicaGone:
                continue
            if engine.joined:  # else these counters showed a restart
                found.append({"replica": engine.name, "requests": totals["requests"], **values})
        return found

    async def capture(self, replica: str, receivers: list[ReceiverAddress]) -> None:
        """The engine's worker itself chooses `traffic.fraction` of the requests that do not forbid it. What it refuses is
        logged once and asked for again after CAPTURE_AGAIN_S. Raises ReplicaGone."""
        settings = capture_settings(self.config, replica, self.info, self.config.traffic.fraction)
        engine = await self._replica(replica)
        if self.left or time.monotonic() < engine.capture_at:
            return
        try:
            values_of(await engine.rpc("capture_on", asdict(settings), written_down(receivers, self.keys.name)))
        except RankFailed as error:
            engine.capture_at = time.monotonic() + CAPTURE_AGAIN_S
            engine.say("capture", f"engine {engine.name} refuses to capture: {error}; start it as {START}")
        except ReplicaGone as error:
            engine.say("capture", str(error))
            raise
        else:
            engine.say("capture", None)

    async def leave(self) -> None:
        """The run ends: no engine samples requests any more, nor keeps what was not sent. Takes LEAVE_S at most and raises
        nothing, whatever the engines do. `capture` does nothing after it."""
        self.left = True
        await asyncio.gather(*(self._let_go(engine) for engine in self.engines.values()))

    async def _let_go(self, engine: Engine) -> None:
        try:
            await asyncio.wait_for(engine.told("capture_off"), LEAVE_S)
        except Exception as error:  # the run is over, and nothing else depends on it
            log.warning("engine %s was not told to stop capturing (%r); it stops by itself after traffic.max_age_s without a "
                        "trainer", engine.name, error)

    async def recent_prompts(self, count: int) -> list[list[int]]:
        """None: these engines remember no prompt, so versions are compared on held-out ones."""
        return []

    async def close(self) -> None:
        for engine in self.engines.values():
            await engine.client.aclose()
        self.keys.cleanup()
