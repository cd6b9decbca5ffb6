"""The rollout of a drafter version: gate → canary → compare → promote one by one, or roll back (DESIGN contract 7)."""

import asyncio
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.pool import Pool, ReplicaGone
from torchspec_lite.acceptance import Counts, Interval, compare, compare_pairs
from torchspec_lite.config import Config, RolloutConfig
from torchspec_lite.errors import UserError
from torchspec_lite.export import verify, versions
from torchspec_lite.parity import compare_drafts
from workers.refusal import SwapRefused
from workers.reports import Export

LOOK_FOR_TRAFFIC_S = 15.0
"""How long users' requests are waited for before the rest of the pool counts as idle."""
REPLICA_WAIT_S = 300.0
"""A replica that was lost comes back with the promoted version within this time."""
RETRY_S = 1.0
RECENT_S = 90.0
"""Users' prompts this young are asked of the next version too: the serving one need not be measured again. Older ones are
no longer present traffic, and have been trained on."""
Decision = Literal["promote", "roll_back", "wait"]


@dataclass(frozen=True)
class Evidence:
    """What is known of a new version against the one that serves.

    `live_new`, `live_old`: draft rounds of users' requests in the same period. `shadow_new`, `shadow_old`: rounds of the
    same held-out prompts, prompt by prompt.
    """

    live_new: Counts
    live_old: Counts
    shadow_new: Sequence[Counts]
    shadow_old: Sequence[Counts]

    @property
    def new(self) -> Counts:
        return sum(self.shadow_new, self.live_new)

    @property
    def old(self) -> Counts:
        return sum(self.shadow_old, self.live_old)

    def interval(self, options: RolloutConfig) -> tuple[Interval, str]:
        """Difference in acceptance length and where it comes from: users' traffic once it is thick enough on both
        sides, else the shadow prompts, paired."""
        if min(self.live_new.rounds, self.live_old.rounds) >= options.min_rounds:
            return compare(self.live_new, self.live_old, options.confidence), "users' requests"
        return compare_pairs(self.shadow_new, self.shadow_old, options.confidence), "shadow prompts"


def decide(evidence: Evidence, options: RolloutConfig, exhausted: bool) -> tuple[Decision, str]:
    """Promote, roll back, or wait for more rounds, and why in words.

    Acceptance at or under the alarm level rolls back at once. A version is promoted when it is, with confidence, not
    worse than the serving one by more than the margin, and rolled back when it is worse by more. The margin keeps two
    equal versions from replacing each other for ever on noise. `exhausted`: no more rounds will come, so the mean decides.
    """
    new, old = evidence.new, evidence.old
    if new.rounds and new.acceptance_length <= options.alarm_acceptance < old.acceptance_length:
        return "roll_back", (f"acceptance length {new.acceptance_length:.3f} after the swap: the drafter's weights are not "
                             "what was trained (alarm)")
    interval, source = evidence.interval(options)
    found = (f"acceptance length {new.acceptance_length:.3f} against {old.acceptance_length:.3f}, difference "
             f"{interval.difference:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}] on {source}, "
             f"{new.rounds} and {old.rounds} rounds")
    if interval.high < -options.worse_margin:
        return "roll_back", f"worse: {found}"
    if min(new.rounds, old.rounds) >= options.min_rounds and interval.low >= -options.worse_margin:
        return "promote", found
    if exhausted:
        better = interval.difference > 0
        return ("promote" if better else "roll_back"), f"{'better' if better else 'not better'} in the mean: {found}"
    return "wait", found


class Rollout:
    """Brings versions into the pool, one at a time. `serving` is the version all replicas fall back to.

    `shadow_prompts`: token ids of held-out prompts, asked at low priority where users' traffic is too thin.
    """

    def __init__(self, config: Config, pool: Pool, coordinator, shadow_prompts: list[list[int]], fingerprint: str,
                 serving: Export):
        self.config, self.options = config, config.rollout
        self.pool, self.coordinator, self.fingerprint = pool, coordinator, fingerprint
        self.shadow_prompts, self.serving, self.parent = shadow_prompts, serving, serving
        self.shadow: dict[int, list[Counts]] = {}
        self.asked_at = -math.inf  # when the present shadow prompts were taken from users' traffic
        self.best = serving
        self.known: dict[int, Export] = {serving.version: serving}
        self.tried = serving
        self.canaries: list[str] = []
        self.changing = asyncio.Lock()
        self.allowed = asyncio.Event()
        self.allowed.set()

    async def introduce(self, export: Export) -> str:
        """Try a version, or the newest that came while the serving one was measured (`tried`); returns its final state
        (`promoted`, `rolled_back` or `refused`)."""
        await self.allowed.wait()
        async with self.changing:
            try:
                await self._ask_as_users_do()
                return await self._introduce(export)
            finally:
                self.canaries = []

    async def _introduce(self, export: Export) -> str:
        self.known[export.version] = self.tried = export
        refusal = self._gate(export)
        if refusal:
            return await self._end(export, "refused", refusal)
        replicas = await self.pool.replicas()
        if not self._capacity_allows(replicas):
            return await self._end(export, "refused", f"only {len(replicas)} of {self.pool.replica_count} replicas are up; "
                                   f"rollout.min_capacity asks for {self.options.min_capacity:.0%} while one is changed")
        canaries = self.canaries = replicas[:max(1, math.floor(self.options.canary_share * len(replicas)))]
        await self.measure(self.serving)
        newest = await self.coordinator.next_export(False)
        if newest is not None and newest.version != export.version:
            return await self._introduce(newest)
        await self._state(export, "canary", f"on {len(canaries)} of {len(replicas)} replicas")
        try:
            for name in canaries:
                await self._swap(name, export)
            # With nobody beside the canaries only shadow prompts can tell: asked at once, beside the probes.
            ahead = self.options.shadow_prompts if len(canaries) == len(replicas) else 0
            mismatch, _ = await asyncio.gather(self._parity(canaries[0], export), self._ask(canaries[0], export, ahead))
            if mismatch:
                return await self._roll_back(export, canaries, mismatch)
            decision, reason = await self._compare(export, canaries)
            if decision != "promote":
                return await self._roll_back(export, canaries, reason)
            return await self._promote(export, [name for name in replicas if name not in canaries], reason)
        except SwapRefused as refused:
            return await self._roll_back(export, canaries, f"swap refused at {refused}", state="refused")
        except ReplicaGone as gone:
            return await self._roll_back(export, canaries, f"a replica was lost during the rollout: {gone}")

    async def overrule(self, action: str, version: int | None) -> None:
        """A person's word: pause, resume, promote VERSION or rollback (to the serving version's parent)."""
        if action == "pause":
            self.allowed.clear()
            return
        if action == "resume":
            self.allowed.set()
            return
        export = self.known.get(version) if action == "promote" else self.parent
        if export is None or not Path(export.directory).is_dir():
            await self.coordinator.event("override", f"{action} {version}: no such version here", version)
            return
        async with self.changing:
            if action == "rollback":
                await self._state(self.serving, "rolled_back", "by hand")
            await self._promote(export, await self.pool.replicas(), f"by hand ({action})")

    def _gate(self, export: Export) -> str | None:
        """What speaks against trying a version at all, before any replica is touched."""
        try:
            verify(Path(export.directory), self.fingerprint)
        except UserError as error:
            return str(error)
        predicted, serving = export.predicted_walked, export.serving_walked
        if serving is None:
            serving = self.serving.predicted_walked
        if predicted is not None and serving is not None and predicted < serving - self.options.gate_margin:
            return f"predicted acceptance length {predicted:.3f}, the serving version's is {serving:.3f}"
        return None

    def _capacity_allows(self, replicas: list[str]) -> bool:
        # A swap does not take a replica out of service, but one that fails may: count it as down.
        return len(replicas) > 0 and (
            self.pool.replica_count == 1 or len(replicas) - 1 >= self.options.min_capacity * self.pool.replica_count - 1e-9)

    async def _ask_as_users_do(self) -> None:
        """Where traffic is captured, shadow prompts are recent ones of users: versions are made for present traffic."""
        young = time.monotonic() - self.asked_at < RECENT_S
        if not self.config.traffic.fraction or young and len(self.shadow.get(self.serving.version, [])) == len(self.shadow_prompts):
            return
        recent = await self.pool.recent_prompts(self.options.shadow_prompts)
        if len(recent) == self.options.shadow_prompts:
            self.ask(recent)
            self.asked_at = time.monotonic()

    def ask(self, prompts: list[list[int]]) -> None:
        """Compare and measure versions on these shadow prompts from now on."""
        self.shadow_prompts = prompts
        self.shadow.clear()

    async def _swap(self, name: str, export: Export) -> None:
        result = await self.pool.swap(name, export.directory)
        await self.coordinator.swapped(name, export.version, result["load_ms"] / 1e3)

    async def _parity(self, name: str, export: Export) -> str | None:
        """Whether the replica drafts what the trainer's drafter drafts; the reason if it does not."""
        if not export.probes:
            return None
        most = max(probe.answer_tokens for probe in export.probes)
        served = await self.pool.probe(name, [probe.prompt for probe in export.probes], most)
        pairs = [compare_drafts(probe, found["token_ids"], found["rounds"])
                 for probe, found in zip(export.probes, served, strict=True)]
        equal, compared = (sum(numbers) for numbers in zip(*pairs))
        await self.coordinator.event("parity", f"{equal} of {compared} drafted tokens equal the trainer's", export.version, name)
        if upper_share(equal, compared) < self.options.parity:
            return (f"train/serve parity: {equal} of {compared} drafted tokens are equal; rollout.parity asks for "
                    f"{self.options.parity:.0%}")
        return None

    async def _compare(self, export: Export, canaries: list[str]) -> tuple[Decision, str]:
        """Collect rounds until they decide, or there are no more prompts and no more time."""
        before = {stats["replica"]: stats for stats in await self.pool.stats()}
        deadline, quiet = time.monotonic() + self.options.wait_s, time.monotonic() + LOOK_FOR_TRAFFIC_S
        new: list[Counts] = self.shadow.setdefault(export.version, [])
        asked = len(new)
        ask_more = not asked  # what was asked ahead may do
        while True:
            live_new, live_old = await self._live(before, canaries, sum(new[asked:], Counts(0, ())))
            if ask_more and min(live_new.rounds, live_old.rounds) < self.options.min_rounds:
                await self._ask(canaries[0], export, self.options.shadow_prompts)
            evidence = Evidence(live_new, live_old, new, self.shadow[self.serving.version][:len(new)])
            all_asked = len(new) == len(self.shadow_prompts)
            # Users' requests may only just not have come to the other replicas yet.
            alone = before.keys() <= set(canaries) or live_old.rounds == 0 and time.monotonic() >= quiet
            exhausted = all_asked and (alone or time.monotonic() >= deadline)
            decision, reason = decide(evidence, self.options, exhausted)
            if decision != "wait":
                return decision, reason
            ask_more = True
            if all_asked:
                await asyncio.sleep(min(5.0, self.options.wait_s))  # only users' requests can tell more now

    async def measure(self, export: Export) -> Counts:
        """Rounds of a version on all shadow prompts; asked once and kept. Where no replica runs it just now, waits for
        one. Raises ReplicaGone after REPLICA_WAIT_S."""
        deadline = time.monotonic() + REPLICA_WAIT_S
        while True:
            names = [stats["replica"] for stats in await self.pool.stats() if stats["version"] == Path(export.directory).name]
            try:
                if not names:
                    raise ReplicaGone(f"the rollout waited {REPLICA_WAIT_S:g} s for a replica that runs version {export.version}")
                await self._ask(names[0], export, len(self.shadow_prompts))
                return sum(self.shadow[export.version], Counts(0, ()))
            except ReplicaGone:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)  # its start is seen only by asking

    async def _live(self, before: dict[str, dict], canaries: list[str], shadow: Counts) -> tuple[Counts, Counts]:
        """Users' draft rounds since `before`, of the canaries (less our own shadow rounds) and of the rest."""
        sides = {True: Counts(0, ()), False: Counts(0, ())}
        for stats in await self.pool.stats():
            name = stats["replica"]
            if name in before and stats["version"] == before[name]["version"]:
                sides[name in canaries] += version_counts(stats) - version_counts(before[name])
        return without(sides[True], shadow), sides[False]

    async def _ask(self, name: str, export: Export, count: int) -> None:
        """Ask the next `count` shadow prompts of a replica that runs `export`."""
        known = self.shadow.setdefault(export.version, [])
        prompts = self.shadow_prompts[len(known):len(known) + count]
        if prompts:
            answers = await self.pool.shadow(name, prompts, self.options.shadow_tokens)
            known += [Counts(answer["drafts"], tuple(answer["per_position"])) for answer in answers]
            counts = sum(known, Counts(0, ()))
            if counts.rounds:
                await self.coordinator.served(export.version, counts.acceptance_length, list(counts.per_position),
                                              export is self.serving)

    async def _promote(self, export: Export, rest: list[str], reason: str) -> str:
        # First the name that restarted replicas read, then those that run, so that a replica lost in between comes
        # back with the new version.
        self.pool.promote(export.directory)
        for place, name in enumerate(rest):
            try:
                await self._swap(name, export)
            except ReplicaGone:
                continue  # its successor starts with the promoted version
            except SwapRefused:
                self.pool.promote(self.serving.directory)
                await self._restore(rest[:place], export)
                raise
        self.parent, self.serving = self.serving, export
        if (export.predicted_walked or 0) >= (self.best.predicted_walked or 0):
            self.best = export
        await self._end(export, "promoted", reason)
        counts = sum(self.shadow.get(export.version, []), Counts(0, ()))
        if counts.rounds:
            await self.coordinator.served(export.version, counts.acceptance_length, list(counts.per_position), True)
        self._retain()
        return "promoted"

    async def _roll_back(self, export: Export, canaries: list[str], reason: str, state: str = "rolled_back") -> str:
        """Give the canaries their old weights again, and say why."""
        await self._restore(canaries, export)
        if "alarm" in reason or "parity" in reason or state == "refused":
            await self.coordinator.raise_alarm(f"version {export.version}: {reason}")
        return await self._end(export, state, reason)

    async def _restore(self, names: list[str], export: Export) -> None:
        """Bring replicas back to the serving version. One that is gone comes back with it by itself."""
        for name in names:
            try:
                await self._swap(name, self.serving)
            except (ReplicaGone, SwapRefused) as error:
                await self.coordinator.event("rollback", f"replica {name}: {error}", export.version, name)

    async def _state(self, export: Export, state: str, reason: str) -> None:
        await self.coordinator.version_state(export.version, state, reason)

    async def _end(self, export: Export, state: str, reason: str) -> str:
        await self._state(export, state, reason)
        return state

    def _retain(self) -> None:
        """Delete version folders beyond the newest few; the serving one, its parent and the best stay."""
        found = versions(self.config.run_dir / "drafters")
        stay = {self.serving.version, self.parent.version, self.best.version, *sorted(found)[-self.options.keep:]}
        for version, path in found.items():
            if version not in stay:
                shutil.rmtree(path)


def upper_share(equal: int, compared: int) -> float:
    """Upper end of the share's 98 % interval (Wilson, 1927): a few hundred tokens cannot tell 97 % from 98 %, and a
    drafter with wrong weights is far below either. 0 when nothing was compared."""
    if not compared:
        return 0.0
    z, share = 2.33, equal / compared
    middle, spread = share + z * z / 2 / compared, z * math.sqrt(share * (1 - share) / compared + (z / 2 / compared) ** 2)
    return (middle + spread) / (1 + z * z / compared)


def version_counts(stats: dict) -> Counts:
    """Draft rounds of a replica's present version since the replica started, from `Replica.stats()`."""
    for version in stats["versions"]:
        if version["version"] == stats["version"]:
            return Counts(version["drafts"], tuple(version["per_position"]))
    return Counts(0, ())


def without(counts: Counts, shadow: Counts) -> Counts:
    """`counts` less the shadow prompts' own rounds; nothing when these are all there is (vLLM's two ways of counting
    differ by the rounds around a swap)."""
    if counts.rounds <= shadow.rounds or any(
            mine < theirs for mine, theirs in zip(counts.accepted_per_position, shadow.accepted_per_position)):
        return Counts(0, ())
    return counts - shadow
