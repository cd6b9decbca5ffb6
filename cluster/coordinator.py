"""The coordinator: who may work on what. It alone writes the ledger; ids and numbers pass through it, never tensors."""

import asyncio
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from cluster.observer import Observer
from torchspec_lite.config import Config
from torchspec_lite.lease import Lease
from torchspec_lite.ledger import Ledger
from torchspec_lite.parity import ParityProbe
from torchspec_lite.snapshot import Replica, Snapshot, ended, write_snapshot
from workers.reports import Export, PaceReport, TargetReport, TrainerReport

LONG_POLL_S = 20.0
"""Longest time a call waits for news before it answers that there is none; callers ask again."""
REJECTS_BEFORE_STOP = 50
PURPOSES = ("train", "held_out")


class Coordinator:
    """Ledger, leases, versions and the run's live state. All methods run on one event loop, so none needs a lock.

    `run_dir/ledger.sqlite` is the truth, and the run's samples are in it before: a coordinator that is started again
    goes on from it.
    """

    def __init__(self, config: Config, run_dir: str, started: float):
        self.config, self.run_dir = config, Path(run_dir)
        self.ledger = Ledger(self.run_dir / "ledger.sqlite", reuse=config.trainer.reuse)
        self.observer = Observer(config, self.run_dir, started)
        self.stopping: str | None = None
        self.exports_over = False
        self.losses: Counter[str] = Counter()  # of each target worker
        self.news = asyncio.Condition()
        self.overrides: asyncio.Queue[tuple[str, int | None]] = asyncio.Queue(maxsize=100)
        for row in self.ledger.versions():
            self.observer.version, self.observer.predicted = row["version"], row["predicted"]
        self.observer.serving_version, _ = self.ledger.served()

    # Target workers

    async def lease(self, worker: str, count: int) -> list[Lease] | None:
        """Up to `count` samples to capture; an empty list when there is none now, None when there will be none."""
        async with asyncio.timeout(LONG_POLL_S + 10), self.news:
            lost = self.losses[worker]
            if not self._may_lease():
                if self._nothing_will_come():
                    return None
                await self._news(self._may_lease)
            if self.losses[worker] != lost:
                return []  # who asked is gone, and would take with it what was queued again just now
            if not self._may_lease():
                return None if self._nothing_will_come() else []
            if self.ledger.account("held_out")["queued"]:
                # First, since predictions need them, and to rank 0, which predicts.
                return self.ledger.lease(worker, count, 0, "held_out")
            backlog = self.ledger.backlog()
            # A rank that does not keep up gets less: its samples would hold the engines' memory while others starve.
            rank = min(range(self.config.trainer.ranks), key=lambda rank: backlog.get(rank, 0))
            return self.ledger.lease(worker, count, rank)

    async def failed(self, id: str, attempt: int, reason: str) -> None:
        """A target could not deliver a sample: it is queued again."""
        self.ledger.requeue_ids([(id, attempt)])
        self.ledger.add_event("requeued", f"sample {id}, attempt {attempt}: {reason}")
        await self._wake()

    async def rejected(self, id: str, attempt: int, reason: str, detail: str = "") -> None:
        """A sample cannot be used. Too large a share of rejected samples stops the run."""
        self.ledger.rejected(id, attempt, reason, detail)
        account = self.ledger.account()
        settled = account["all"] - account["queued"] - account["leased"]
        if settled >= REJECTS_BEFORE_STOP and account["rejected"] > self.config.data.max_reject_share * settled:
            reasons = ", ".join(f"{reason} {number}" for reason, number in self.ledger.reasons().items())
            await self.stop(f"{account['rejected']} of {settled} samples were rejected ({reasons}); more than "
                            f"data.max_reject_share allows")
        await self._wake()

    async def worker_lost(self, worker: str) -> int:
        """A target worker died: what it had leased is queued again."""
        self.losses[worker] += 1
        number = self.ledger.requeue_worker(worker)
        self.observer.targets.pop(worker, None)
        self.alarm(f"target worker {worker} was lost; {number} samples are queued again")
        await self._wake()
        return number

    async def target_report(self, report: TargetReport) -> None:
        self.observer.target(report)

    # Trainers

    async def streamed(self, deliveries: list[tuple[str, int, int]]) -> dict[str, int]:
        """A trainer holds these (id, attempt, tokens). Returns those it may train with the passes they have had."""
        taken = self.ledger.streamed(deliveries)
        self.observer.streamed(sum(tokens for id, _, tokens in deliveries if id in taken))
        await self._wake()
        return taken

    async def arrived(self, deliveries: list[tuple[str, int]], rank: int) -> dict[str, int]:
        """A trainer holds these (id, tokens) of served requests. Returns those it may train with their passes."""
        taken = self.ledger.arrived(deliveries, rank)
        self.observer.streamed(sum(tokens for id, tokens in deliveries if id in taken))
        return taken

    async def trained(self, samples: list[tuple[str, int]], step: int) -> None:
        """Optimizer step `step` used each of these (id, attempt) once."""
        self.ledger.trained(samples, step)

    async def checkpointed(self, step: int) -> None:
        """A whole checkpoint of `step` is on the disk."""
        self.ledger.checkpointed(step)
        await self._wake()

    async def restored(self, step: int) -> int:
        """All trainers start from the weights of `step`; what these do not hold is queued again."""
        number = self.ledger.restore(step)
        if number:
            self.ledger.add_event("restored", f"from step {step}; {number} samples are queued again")
        await self._wake()
        return number

    async def outstanding(self, below: int | None, rank: int) -> int:
        """Training samples (of ordinals below a bound) that may still reach this trainer rank: leased for it, and queued ones
        unless leasing has stopped. Waits a while for the number to become 0.

        Not those leased for other ranks: such a one may wait in a sum for this rank, and takes no sample until then.
        """
        async with asyncio.timeout(LONG_POLL_S + 10), self.news:
            await self._news(lambda: self._outstanding(below, rank) == 0)
            return self._outstanding(below, rank)

    async def coming(self, below: int | None) -> int:
        """The same for all ranks, of now."""
        return self._outstanding(below)

    async def exported(self, export: Export) -> None:
        """A new drafter version is on the disk, verified."""
        self.ledger.add_version(export.version, export.step, export.samples, export.parent, export.predicted_walked)
        predicted = "" if export.predicted_walked is None else f", predicted acceptance length {export.predicted_walked:.2f}"
        self.ledger.add_event("exported", f"version {export.version} of step {export.step}{predicted}", export.version,
                              data=asdict(export))
        self.observer.exported(export.version, export.step, export.predicted_rows, export.predicted_walked,
                               export.per_position)
        await self._wake()

    async def refused(self, id: str, attempt: int, reason: str) -> None:
        """A trainer's receiver refused a sample: it is rejected for that reason."""
        self.observer.refused(reason.partition(":")[0])
        await self.rejected(id, attempt, reason.partition(":")[0], reason)

    async def serving_version(self) -> int | None:
        return self.observer.serving_version

    async def pace(self, report: PaceReport) -> None:
        self.observer.traffic_window(report)

    async def trainer_report(self, report: TrainerReport) -> None:
        self.observer.trainer(report)

    async def drift(self, step: int, diagnostics: dict[str, list[float]]) -> None:
        for name, per_step in diagnostics.items():
            self.observer.drift(step, name, per_step)

    # Driver and rollout

    async def next_export(self, wait: bool) -> Export | None:
        """The newest version not yet tried, or None when there is none (after a while with `wait`); older ones still
        waiting are passed over."""
        async with self.news:
            if wait:
                await self._news(lambda: self._untried() or self.exports_over)
            untried = self._untried()
        if not untried:
            return None
        *passed_over, newest = untried
        for version in passed_over:
            self.ledger.set_version_state(version, "gated", "a newer version came before its turn")
        return self._export(newest)

    async def abandon_canaries(self) -> None:
        """A run that starts again does not go on with what was being tried when it ended."""
        for row in self.ledger.versions():
            if row["state"] == "canary":
                self.ledger.set_version_state(row["version"], "rolled_back", "the run ended while it was being tried")

    async def no_more_exports(self) -> None:
        """The trainers are done: who waits for a version need not."""
        self.exports_over = True
        await self._wake()

    async def served_last(self) -> tuple[Export | None, Export | None]:
        """What the pool served last and what a rollback would go back to, for a resumed run."""
        serving, before = self.ledger.served()
        return await self.find_export(serving), await self.find_export(before)

    async def find_export(self, version: int | None) -> Export | None:
        """A version of this run as it was exported, whatever became of it."""
        return self._export(version) if any(row["version"] == version for row in self.ledger.versions()) else None

    async def newest_version(self, known: int | None) -> int | None:
        """Number of the newest version; waits a while for another than the `known` one."""
        async with self.news:
            await self._news(lambda: self.observer.version != known)
            return self.observer.version

    async def needed_versions(self) -> list[int]:
        """Versions whose folders must stay: the one that serves, the one before it, the best that was promoted, the next to
        be tried."""
        promoted = [row for row in self.ledger.versions() if row["state"] == "promoted"]
        best = sorted(promoted, key=lambda row: row["predicted"] or 0)[-1:]
        needed = (*self.ledger.served(), *(row["version"] for row in best), *self._untried()[-1:])
        return [version for version in needed if version is not None]

    async def version_state(self, version: int, state: str, reason: str) -> None:
        """Move a version to a state of the rollout, with the reason in the history."""
        # The event first: it says what serves. A run that dies between the two sets the state when it starts again.
        self.ledger.add_event(state, reason, version)
        self.ledger.set_version_state(version, state, reason)
        if state == "promoted":
            self.observer.serving_version = version
        if state in ("promoted", "rolled_back", "refused"):
            self.observer.judged(state)

    async def event(self, kind: str, text: str, version: int | None = None, replica: str | None = None) -> None:
        self.ledger.add_event(kind, text, version, replica)

    async def served(self, version: int, acceptance_length: float, per_position: list[float], serving: bool) -> None:
        self.observer.served_by_version(version, acceptance_length, per_position, serving)

    async def swapped(self, replica: str, version: int, seconds: float) -> None:
        self.observer.swap(replica, version, seconds)

    async def pool_report(self, replicas: tuple[Replica, ...], rounds: int, accepted: int, tokens: int) -> None:
        self.observer.pool(replicas, rounds, accepted, tokens)

    async def traffic_refused(self, reason: str) -> None:
        """A receiver refused a served request's states."""
        self.observer.refused(reason)

    async def traffic_report(self, found: list[dict]) -> bool:
        """What each replica captured: `workers.server.Replica.traffic`. Returns whether training goes on, and does not
        rest."""
        self.observer.traffic_captured(found)
        return self.stopping is None and not self.observer.traffic.resting

    async def link(self, name: str, url: str) -> None:
        self.observer.links[name] = url

    def alarm(self, text: str) -> None:
        self.ledger.add_event("alarm", text)
        self.observer.alarm(text)

    async def raise_alarm(self, text: str) -> None:
        self.alarm(text)

    async def override(self, action: str, version: int | None) -> None:
        """A person's word on the rollout: pause, resume, promote VERSION or rollback."""
        self.ledger.add_event("override", action if version is None else f"{action} {version}", version)
        self.overrides.put_nowait((action, version))

    async def next_override(self) -> tuple[str, int | None] | None:
        try:
            return await asyncio.wait_for(self.overrides.get(), LONG_POLL_S)
        except TimeoutError:
            return None

    async def versions(self) -> list[dict]:
        return self.ledger.versions()

    async def stop(self, reason: str) -> None:
        """Lease nothing more; what is on its way is still trained."""
        if self.stopping is None:
            self.stopping = reason
            self.ledger.add_event("stopping", reason)
        await self._wake()

    async def stop_reason(self) -> str | None:
        return self.stopping

    async def settle(self) -> None:
        """The trainers are done: what their last checkpoint does not hold is queued, for a run that resumes."""
        self.ledger.restore(self.ledger.checkpoint_step())

    async def account(self) -> dict:
        """The ledger's account of every training sample, the rejected ones' reasons, what reports were ignored, and the step
        of the newest checkpoint."""
        return {"samples": self.ledger.account(), "traffic": self.ledger.account("traffic"),
                "reasons": self.ledger.reasons(), "ignored": self.ledger.ignored(),
                "checkpoint": self.ledger.checkpoint_step()}

    async def observe(self) -> Snapshot:
        """The live state, which is written to the run directory too."""
        running = "running" if self.observer.tokens_streamed else "starting"
        self.observer.state, self.observer.reason = ("draining" if self.stopping else running), self.stopping
        return self._observe()

    async def finish(self, state: str, reason: str | None) -> None:
        """Write the last snapshot and close ledger and metrics."""
        write_snapshot(self.run_dir, ended(self._observe(), state, reason))
        self.ledger.add_event(state, reason or "all samples are trained")
        self.observer.close()
        self.ledger.close()

    # Within

    def _observe(self):
        account = self.ledger.account()
        del account["all"]
        served = self.ledger.account("traffic") if self.config.traffic.fraction else None
        return self.observer.tick(account, self.ledger.reasons(), served)

    def _untried(self) -> list[int]:
        return [row["version"] for row in self.ledger.versions() if row["state"] == "exported"]

    def _export(self, version: int) -> Export:
        data = self.ledger.history(1, "exported", version)[0]["data"]
        return Export(**data | {"probes": [ParityProbe(**probe) for probe in data["probes"]]})

    def _may_lease(self) -> bool:
        return self.stopping is None and any(self.ledger.account(purpose)["queued"] for purpose in PURPOSES)

    def _nothing_will_come(self) -> bool:
        """Whether no sample can be queued again: all are durable or rejected, or leasing has stopped."""
        train, held_out = (self.ledger.account(purpose) for purpose in PURPOSES)
        return self.stopping is not None or (
            train["durable"] + train["rejected"] == train["all"] and not held_out["queued"] + held_out["leased"])

    def _outstanding(self, below: int | None, rank: int | None = None) -> int:
        leased = [row for row in self.ledger.rows("leased") if rank is None or row.rank == rank]
        queued = [] if self.stopping else self.ledger.rows("queued", below or 1)
        return sum(row.purpose == "train" and (below is None or row.ordinal < below) for row in leased + queued)

    async def _wake(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def _news(self, condition) -> None:
        """Wait until `condition` holds, at most LONG_POLL_S; the caller holds the condition's lock."""
        try:
            await asyncio.wait_for(self.news.wait_for(condition), LONG_POLL_S)
        except TimeoutError:
            pass


def run_started(run_dir: Path) -> float:
    """When the run began, in seconds since the epoch: a resumed run counts from its first start."""
    ledger = run_dir / "ledger.sqlite"
    return ledger.stat().st_ctime if ledger.exists() else time.time()
