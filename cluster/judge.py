"""The judge: has the pool serve the newest version that is good enough, and measures what it brings."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from cluster import pool as pools
from cluster.evidence import version_counts
from cluster.external import ExternalPool
from cluster.pool import Pool, ReplicaGone
from cluster.retention import gone, retain
from cluster.rollout import Rollout
from cluster.screen import Screen
from cluster.summary import Measurement
from torchspec_lite.break_even import pays_up_to
from torchspec_lite.chat import Reject, load_tokenizer, render_prompt
from torchspec_lite.config import Config, ServeConfig
from torchspec_lite.conversations import Dataset, resolve_files
from torchspec_lite.snapshot import Replica
from torchspec_lite.target import TargetInfo
from torchspec_lite.target_folder import cache_dir
from workers.link import Awaited
from workers.reports import Export
from workers.target_address import ReceiverAddress


class Judge:
    """One for a run. `judge_versions` starts the pool with the first version and takes each later one through the
    rollout; `report` tells the coordinator how the replicas are."""

    def __init__(self, config: Config, info: TargetInfo, coordinator, screen: Screen,
                 receivers: Callable[[], list[ReceiverAddress]]):
        """`receivers`: where the present trainers take served requests."""
        self.config, self.info, self.screen, self.receivers = config, info, screen, receivers
        self.coordinator = Awaited(coordinator)
        self.pool: Pool | ExternalPool | None = None
        self.rollout: Rollout | None = None
        self.over = asyncio.Event()
        self.telling: asyncio.Future | None = None

    def no_more(self) -> None:
        """The trainers are done: what they exported already is judged, then it ends."""
        self.over.set()
        self.telling = asyncio.ensure_future(self.coordinator.no_more_exports())

    async def judge_versions(self) -> tuple[Measurement | None, Measurement | None, float | None]:
        """Until the trainers are done; the held-out acceptance before and after, and what the trainer predicts now."""
        first, parent = await self._first()
        if first is None or not self.config.serve.replicas:
            return None, None, await self._newest_prediction(first)
        self.screen.say(f"version {first.version} is there; the serving pool starts with it")
        self.pool = await self._open_pool(first.directory)
        self.screen.say(f"serving at {self.pool.url}/v1")
        await self.coordinator.link("endpoint", self.pool.url)
        await self.coordinator.version_state(first.version, "promoted", "the pool began with it")
        held_out = self._held_out_prompts()
        self.rollout = Rollout(self.config, self.pool, self.coordinator, held_out,
                               self.info.fingerprint, first, parent)
        before = Measurement(first.version, await self.rollout.measure(first))
        beside = asyncio.create_task(self._hear_overrides()), asyncio.create_task(self._keep_few(self.rollout.retain))
        try:
            while (export := await self._next()) is not None:
                state = await self.rollout.introduce(export)
                self.screen.say(f"version {self.rollout.tried.version}: {state.replace('_', ' ')}")
        finally:
            for task in beside:
                task.cancel()
        serving = self.rollout.serving
        self.rollout.ask(held_out)  # as before, whatever users asked meanwhile
        return before, Measurement(serving.version, await self.rollout.measure(serving)), serving.predicted_walked

    async def _open_pool(self, version_dir: str) -> Pool | ExternalPool:
        """Start a pool, or have the engines of others draft with the version."""
        run_dir = str(self.config.run_dir)
        if not self.config.serve.external:
            return await asyncio.to_thread(pools.start, self.config, self.info.path, version_dir, run_dir)
        pool = ExternalPool(self.config, self.info, run_dir)
        await pool.connect(version_dir)
        return pool

    async def report(self) -> None:
        """The replicas' state, for the live page."""
        if self.pool is None:
            return
        canary = self.rollout.canaries if self.rollout is not None else ()
        found = await self.pool.stats()
        await self.coordinator.pool_report(
            tuple(replica_state(stats, "canary" if stats["replica"] in canary else "serving", self.config.serve)
                  for stats in found),
            sum(version["drafts"] for stats in found for version in stats["versions"]),
            sum(version["accepted"] for stats in found for version in stats["versions"]),
            sum(stats["generated"] for stats in found))
        if self.config.traffic.fraction:
            await self._direct_traffic()

    async def _direct_traffic(self) -> None:
        """Have each replica, a restarted one too, stream to the trainers of now."""
        receivers, found = self.receivers(), await self.pool.traffic()
        for replica in found:
            if receivers and replica.get("receivers") != [receiver.endpoint for receiver in receivers]:
                try:
                    await self.pool.capture(replica["replica"], receivers)
                except ReplicaGone:
                    continue
        training = await self.coordinator.traffic_report(found)
        if self.config.traffic.second_answers:
            await self.pool.second_answers(training)

    async def _first(self) -> tuple[Export | None, Export | None]:
        """The version to start the pool with and the one before it: of a resumed run those that served last, else the first
        exported and none."""
        await self.coordinator.abandon_canaries()
        served = [export for export in await self.coordinator.served_last() if export is not None and not gone(export)]
        if served:
            return served[0], served[1] if len(served) > 1 else None
        while (export := await self._next()) is not None and (reason := gone(export)):
            await self.coordinator.version_state(export.version, "refused", reason)
        return export, None

    async def _next(self) -> Export | None:
        """The next version to try; None when the trainers are done and nothing waits."""
        while True:
            ending = self.over.is_set()
            export = await self.coordinator.next_export(not ending)
            if export is not None or ending:
                return export

    async def _newest_prediction(self, first: Export | None) -> float | None:
        """Of a run that serves nothing, when it is over. Its newest version stays untried, for a resumed run that serves."""
        tidy = partial(retain, self.config, self.coordinator)
        keeping = asyncio.create_task(self._keep_few(tidy))
        try:
            await self.over.wait()
        finally:
            keeping.cancel()
        await tidy()
        newest = await self.coordinator.next_export(False) or first
        return newest.predicted_walked if newest is not None else None

    async def _keep_few(self, tidy: Callable[[], Awaitable[None]]) -> None:
        """Have old versions deleted whenever a new one came, whether or not any is tried."""
        newest = None
        while True:
            found = await self.coordinator.newest_version(newest)
            if found != newest:
                newest = found
                await tidy()

    async def _hear_overrides(self) -> None:
        while True:
            word = await self.coordinator.next_override()
            if word is not None:
                await self.rollout.overrule(*word)

    def _held_out_prompts(self) -> list[list[int]]:
        """Token ids of the held-out prompts; one that cannot be rendered is the ledger's business, not the pool's."""
        data = self.config.data
        tokenizer = load_tokenizer(self.info.path, self.config.target.trust_remote_code)
        dataset = Dataset(resolve_files(data.held_out, "held_out", cache_dir()))
        longest = min(data.max_length, self.config.target.max_model_len)  # as target workers do
        prompts = []
        for id in dataset.order(self.config.seed, 1, data.held_out_prompts):
            try:
                prompts.append(render_prompt(tokenizer, dataset.get(id), longest))
            except Reject:
                continue
        return prompts


def replica_state(stats: dict, role: str, options: ServeConfig) -> Replica:
    """A replica for the live page, from `workers.server.Replica.stats`."""
    counts, limit = version_counts(stats), options.max_concurrency_for_speculation
    drafting = counts.rounds > 0 and limit != "auto" and (limit is None or stats["running"] <= limit)
    pays = pays_up_to(options.break_even, counts.acceptance_length) if drafting and options.break_even else None
    return Replica(name=stats["replica"], version=int(stats["version"].removeprefix("v")), state="ready", role=role,
                   acceptance_length=counts.acceptance_length if counts.rounds else None, running=stats["running"],
                   waiting=stats["waiting"], requests=stats["requests"], tokens=stats["generated"],
                   drafting_pays_up_to=pays)
