"""The rollout of a drafter version: gate → canary → compare → promote one by one, or roll back (DESIGN contract 7)."""

import asyncio
import math
import time
from collections.abc import Awaitable
from pathlib import Path

from cluster.evidence import Decision, Evidence, decide, decide_on_users, upper_share, version_counts, without
from cluster.pool import Pool, ReplicaGone
from cluster.retention import gone, retain
from torchspec_lite.acceptance import Counts
from torchspec_lite.config import Config
from torchspec_lite.errors import UserError
from torchspec_lite.export import verify
from torchspec_lite.parity import compare_drafts
from workers.refusal import SwapRefused
from workers.reports import Export

LOOK_FOR_TRAFFIC_S = 15.0
"""How long users' requests are waited for before the rest of the pool counts as idle."""
REPLICA_WAIT_S = 300.0
"""A replica that was lost comes back with the promoted version within this time."""
RETRY_S = 1.0
LOOK_S = 0.5
"""Between two looks at what users' requests have brought."""
USERS_WAIT_S = 60.0
PATIENCE = 4
"""A version that looks worse on users' requests is looked at for so long, and for so many times rollout.min_rounds: rounds of
one request resemble each other, so a few hard requests look like a bad drafter. It costs users less than shadow prompts."""


class Rollout:
    """Brings versions into the pool, one at a time. `serving` is the version all replicas fall back to, `parent` the one that
    served before it and that a person may go back to: None where there is none, and after a rollback.

    `shadow_prompts`: token ids of held-out prompts, asked at low priority where users' traffic is too thin.
    """

    def __init__(self, config: Config, pool: Pool, coordinator, shadow_prompts: list[list[int]], fingerprint: str,
                 serving: Export, parent: Export | None = None):
        self.config, self.options = config, config.rollout
        self.pool, self.coordinator, self.fingerprint = pool, coordinator, fingerprint
        self.held_out = self.shadow_prompts = shadow_prompts
        self.serving, self.parent = serving, parent
        self.shadow: dict[int, list[Counts]] = {}
        self.tried = serving
        self.waiting: Export | None = None
        self.by_hand: dict[int, str] = {}
        self.canaries: list[str] = []
        self.changing = asyncio.Lock()
        self.allowed = asyncio.Event()
        self.allowed.set()

    async def introduce(self, export: Export) -> str:
        """Try a version, or the newest that came while the serving one was measured (`tried`); returns its final state
        (`promoted`, `rolled_back` or `refused`)."""
        self.waiting = self.tried = export
        await self.allowed.wait()
        async with self.changing:
            try:
                # While it waited for its turn a person may have decided on it.
                state = self.by_hand.get(export.version)
                if state is None:
                    await self._ask_as_users_do()
                    state = await self._introduce(export)
            finally:
                self.canaries, self.waiting = [], None
                if self.config.traffic.fraction:
                    self.ask(self.held_out)  # users' prompts are kept for one trial only
            await self._retain()
        return state

    async def _introduce(self, export: Export) -> str:
        self.tried = export
        refusal = self._gate(export)
        if refusal:
            return await self._end(export, "refused", refusal)
        replicas = await self.pool.replicas()
        if not self._capacity_allows(replicas):
            return await self._end(export, "refused", f"only {len(replicas)} of {self.pool.replica_count} replicas are up; "
                                   f"rollout.min_capacity asks for {self.options.min_capacity:.0%} while one is changed")
        canaries = self.canaries = replicas[:max(1, math.floor(self.options.canary_share * len(replicas)))]
        tried = len(canaries) == len(replicas) and await self._users_may_tell(export)
        if tried:
            state = await self._guarded(self._try_on_users(export), export)
            if state is not None:
                return state
        await self.measure(self.serving)
        newest = await self.coordinator.next_export(False)
        if newest is not None and newest.version != export.version:
            if tried:
                await self._end(export, "rolled_back", f"users' requests did not tell, and version {newest.version} came meanwhile")
            return await self._introduce(newest)
        return await self._guarded(self._try(export, replicas), export)

    async def _guarded(self, trial: Awaitable[str | None], export: Export) -> str | None:
        """What a trial found; rolled back where a replica refuses the version or is lost."""
        try:
            return await trial
        except SwapRefused as refused:
            return await self._roll_back(export, f"swap refused at {refused}", state="refused")
        except ReplicaGone as gone:
            return await self._roll_back(export, f"a replica was lost during the rollout: {gone}")

    async def _try(self, export: Export, replicas: list[str]) -> str:
        """On the canaries, against the others on users' requests or against the serving version on shadow prompts."""
        canaries = self.canaries
        # With nobody beside the canaries only shadow prompts can tell: asked at once, beside the probes.
        ahead = self.options.shadow_prompts if len(canaries) == len(replicas) else 0
        mismatch = await self._begin_trial(export, f"on {len(canaries)} of {len(replicas)} replicas", ahead)
        if mismatch:
            return await self._roll_back(export, mismatch)
        decision, reason = await self._compare(export, canaries)
        if decision != "promote":
            return await self._roll_back(export, reason)
        return await self._promote(export, reason)

    async def _begin_trial(self, export: Export, where: str, ahead: int = 0) -> str | None:
        """Swap the canaries and check parity, while `ahead` shadow prompts are asked; the reason if it drafts otherwise."""
        await self._state(export, "canary", where)
        for name in self.canaries:
            await self._swap(name, export)
        first = self.canaries[0]
        mismatch, _ = await asyncio.gather(self._parity(first, export), self._ask(first, export, ahead))
        return mismatch

    async def _users_may_tell(self, export: Export) -> bool:
        """Whether users' own requests can stand for shadow prompts, which would slow them: some run just now, and the trainers
        have compared this version and the one that still serves on the newest ones, which they do not train on."""
        if export.serving_version != self.serving.version or Counts.of_list(export.serving_counts).rounds < self.options.min_rounds:
            return False
        return any(stats["running"] for stats in await self.pool.stats())

    async def _try_on_users(self, export: Export) -> str | None:
        """On all replicas at once, by parity and by users' requests; None, with the serving version back, where these
        do not tell."""
        count = len(self.canaries)
        mismatch = await self._begin_trial(export, f"on users' requests, {count} of {count} replicas")
        if mismatch:
            return await self._roll_back(export, mismatch)
        decision, reason, live = await self._ask_users(export)
        if decision == "roll_back":
            return await self._roll_back(export, reason)
        if decision == "wait":
            await self.coordinator.event("trial", f"{reason}: shadow prompts decide", export.version)
            await self._restore(export)
            return None
        return await self._promote(export, reason, live)

    async def _ask_users(self, export: Export) -> tuple[Decision, str, Counts]:
        """What users' rounds from now on say, as soon as they say something; `wait` when they have stopped asking, or when
        PATIENCE or USERS_WAIT_S is over."""
        before = {stats["replica"]: stats for stats in await self.pool.stats()}
        begun = heard = time.monotonic()
        seen = 0
        while True:
            live, _ = self._live(before, await self._look(export), Counts(0, ()))
            decision, reason = decide_on_users(live, export.predicted_walked, Counts.of_list(export.serving_counts), self.options)
            now = time.monotonic()
            if live.rounds > seen:
                seen, heard = live.rounds, now
            if (decision != "wait" or seen >= PATIENCE * self.options.min_rounds or now >= heard + LOOK_FOR_TRAFFIC_S
                    or now >= begun + USERS_WAIT_S):
                return decision, reason, live
            await asyncio.sleep(LOOK_S)  # counters are seen only by asking

    async def overrule(self, action: str, version: int | None) -> None:
        """A person's word: pause, resume, promote VERSION (any of this run whose folder is there) or rollback (to `parent`).
        What cannot be done leaves an event that says why, and all as it was."""
        if action == "pause":
            self.allowed.clear()
        elif action == "resume":
            self.allowed.set()
        else:
            told_of = self.serving
            async with self.changing:
                problem = await self._change_by_hand(action, version, told_of)
                if problem is not None:
                    word = action if version is None else f"{action} {version}"
                    await self.coordinator.event("override", f"{word}: {problem}", version)
                await self._retain()

    async def _change_by_hand(self, action: str, version: int | None, told_of: Export) -> str | None:
        """Promote, or go back from `told_of`, which served when a person said so; the reason where that cannot be."""
        rollback = action == "rollback"
        if rollback and self.serving is not told_of:  # the trial that was waited for has replaced it
            return f"version {self.serving.version} was promoted meanwhile"
        export = self.parent if rollback else await self.coordinator.find_export(version)
        if export is None:
            return "nothing to go back to" if rollback else "no such version in this run"
        if export.version == self.serving.version:
            return "it serves already"
        if broken := self._broken(export):
            return broken
        try:
            await self._promote(export, f"by hand ({action})")
        except SwapRefused as refused:
            return f"swap refused at {refused}"
        self.by_hand[export.version] = "promoted"
        if rollback:
            # Last: a run that dies before goes on with the version that all replicas have already.
            await self._state(told_of, "rolled_back", "by hand")
            self.by_hand[told_of.version], self.parent = "rolled_back", None
        return None

    def _broken(self, export: Export) -> str | None:
        """What is wrong with a version's files."""
        if reason := gone(export):
            return reason
        try:
            verify(Path(export.directory), self.fingerprint)
        except UserError as error:
            return str(error)
        return None

    def _gate(self, export: Export) -> str | None:
        """What speaks against trying a version at all, before any replica is touched."""
        if broken := self._broken(export):
            return broken
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
        if not self.config.traffic.fraction:
            return
        recent = await self.pool.recent_prompts(self.options.shadow_prompts)
        if len(recent) == self.options.shadow_prompts:
            self.ask(recent)

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
        if compared and upper_share(equal, compared) < self.options.parity:
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
            live_new, live_old = self._live(before, await self._look(export), sum(new[asked:], Counts(0, ())))
            if ask_more and min(live_new.rounds, live_old.rounds) < self.options.min_rounds:
                await self._ask(canaries[0], export, self.options.shadow_prompts)
            evidence = Evidence(live_new, live_old, new, self.shadow[self.serving.version][:len(new)])
            all_asked = len(new) == len(self.shadow_prompts)
            # Users' requests may only just not have come to the other replicas yet.
            alone = before.keys() <= set(canaries) or live_old.rounds == 0 and time.monotonic() >= quiet
            exhausted = all_asked and (alone or time.monotonic() >= deadline)
            decision, reason = decide(evidence, self.options, exhausted)
            if decision == "promote":
                await self._look(export)  # a canary that its shadow prompts ended is no proof
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

    async def _look(self, export: Export) -> list[dict]:
        """Counters of all replicas that answer. Raises ReplicaGone when a canary is lost: its successor does not run `export`."""
        for _ in range(2):  # one that is only slow to answer is asked again
            found = await self.pool.stats()
            lost = set(self.canaries) - {stats["replica"] for stats in found if stats["version"] == Path(export.directory).name}
            if not lost:
                return found
            await asyncio.sleep(RETRY_S)
        raise ReplicaGone(f"{', '.join(sorted(lost))} ended while version {export.version} was tried on it")

    def _live(self, before: dict[str, dict], now: list[dict], shadow: Counts) -> tuple[Counts, Counts]:
        """Users' draft rounds between two looks, of the canaries (less our own shadow rounds) and of the rest."""
        sides = {True: Counts(0, ()), False: Counts(0, ())}
        for stats in now:
            name = stats["replica"]
            if name in before and stats["version"] == before[name]["version"]:
                sides[name in self.canaries] += version_counts(stats) - version_counts(before[name])
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

    async def _promote(self, export: Export, reason: str, live: Counts | None = None) -> str:
        """On every replica. `live`: users' rounds, where these were all that was measured."""
        # First the name that restarted replicas read, then those that run, so that a replica lost in between comes
        # back with the new version.
        self.pool.promote(export.directory)
        asked: set[str] = set()
        # Looked at anew each time: a replica that came while the version was tried has read the name before.
        while rest := [name for name in await self._running(export, False) if name not in asked]:
            for name in rest:
                asked.add(name)
                try:
                    await self._swap(name, export)
                except ReplicaGone:
                    continue  # its successor starts with the promoted version
                except SwapRefused:
                    self.pool.promote(self.serving.directory)
                    await self._restore(export, [name for name in await self._running(export) if name not in self.canaries])
                    raise
        self.parent, self.serving = self.serving, export
        await self._end(export, "promoted", reason)
        counts = live or sum(self.shadow.get(export.version, []), Counts(0, ()))
        if counts.rounds:
            await self.coordinator.served(export.version, counts.acceptance_length, list(counts.per_position), True)
        return "promoted"

    async def _running(self, export: Export, this: bool = True) -> list[str]:
        """Names of the replicas that run this version; those that run another where `this` is False."""
        return [stats["replica"] for stats in await self.pool.stats()
                if (stats["version"] == Path(export.directory).name) == this]

    async def _roll_back(self, export: Export, reason: str, state: str = "rolled_back") -> str:
        """Give the canaries their old weights again, and say why."""
        await self._restore(export)
        if "alarm" in reason or "parity" in reason or state == "refused":
            await self.coordinator.raise_alarm(f"version {export.version}: {reason}")
        return await self._end(export, state, reason)

    async def _restore(self, export: Export, names: list[str] | None = None) -> None:
        """Bring replicas, the canaries if none are named, back to the serving version. One that is gone comes back with it
        by itself."""
        for name in self.canaries if names is None else names:
            try:
                await self._swap(name, self.serving)
            except (ReplicaGone, SwapRefused) as error:
                await self.coordinator.event("rollback", f"replica {name}: {error}", export.version, name)

    async def _state(self, export: Export, state: str, reason: str) -> None:
        await self.coordinator.version_state(export.version, state, reason)

    async def _end(self, export: Export, state: str, reason: str) -> str:
        await self._state(export, state, reason)
        return state

    async def retain(self) -> None:
        """Delete version folders that nobody needs. Waits for a trial: it may take up newer versions, and ends with this."""
        async with self.changing:
            await self._retain()

    async def _retain(self) -> None:
        in_use = (self.serving, self.parent, self.waiting)
        await retain(self.config, self.coordinator, [export.version for export in in_use if export is not None])
