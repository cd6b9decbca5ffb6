"""The coordinator: who may work on what. It alone writes the ledger; ids and numbers pass through it, never tensors."""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from cluster.exported import export_of, needed_versions, untried
from cluster.observer import Observer
from torchspec_lite.config import Config
from torchspec_lite.lease import Lease, LeaseCall, LostLeases
from torchspec_lite.ledger import Ledger
from torchspec_lite.ledger_suspects import MOST_DEATHS
from torchspec_lite.logs import one_line
from torchspec_lite.snapshot import Pipeline, Replica, Snapshot, ended, write_snapshot
from workers.reports import Export, PaceReport, TargetReport, TrainerReport

log = logging.getLogger(__name__)
LONG_POLL_S = 20.0
"""Longest time a call waits for news before it answers that there is none; callers ask again."""
REJECTS_BEFORE_STOP = 50
PURPOSES = ("train", "held_out")


class Coordinator:
    """Ledger, leases, versions and the run's live state. All methods run on one event loop, so none needs a lock.

    `run_dir/ledger.sqlite` is the truth, and the run's samples are in it before: a coordinator that is started again
    goes on from it. `attempt` names the driver's attempt of the run: one of another name takes nothing over but what
    happened, neither that the earlier one was stopped nor its addresses.
    """

    def __init__(self, config: Config, run_dir: str, started: float, attempt: str = ""):
        self.config, self.run_dir = config, Path(run_dir)
        self.ledger = Ledger(self.run_dir / "ledger.sqlite", reuse=config.trainer.reuse)
        self.observer = Observer(config, self.run_dir, started)
        self.ledger.begin(attempt)
        self.stopping = self.ledger.stopping()
        self.observer.links.update(self.ledger.links())
        self.exports_over = False
        self.losses: Counter[str] = Counter()  # of each target worker
        self.in_hand: dict[str, set[tuple[str, int]]] = {}  # what each target worker's engine may be at
        self.delivering: set[str] = set()  # target workers of which a sample was settled since they started
        self.news = asyncio.Condition()
        for row in self.ledger.versions():
            self.observer.version, self.observer.predicted = row["version"], row["predicted"]
        self.observer.serving_version, _ = self.ledger.served()

    # Target workers

    async def lease(self, worker: str, count: int, call: LeaseCall = LeaseCall()) -> list[Lease] | None:
        """Up to `count` samples to capture; an empty list when there is none now, None when there will be none. The same
        `call` again gets the same leases."""
        idle = not call.held
        async with self.news:
            lost, self.in_hand[worker] = self.losses[worker], set(call.held)
            given = self.ledger.leased_before(worker, call)
            if given is None:
                if call.number == 1:
                    self.ledger.requeue_worker(worker)  # what a call of its predecessor took that came too late
                if not self._may_lease(idle):
                    if self._nothing_will_come():
                        return None
                    await self._news(lambda: self._may_lease(idle))
                if self.losses[worker] != lost:
                    return []  # who asked is gone, and would take with it what was queued again just now
                given = self.ledger.leased_before(worker, call)  # the call may have come twice, and waited twice
            if given is None:
                if not self._may_lease(idle):
                    return None if self._nothing_will_come() else []
                given = self._lease(worker, count, call)
            self.in_hand[worker].update((lease.id, lease.attempt) for lease in given)
            return given

    async def failed(self, id: str, attempt: int, reason: str) -> None:
        """A target could not deliver a sample: it is queued again."""
        self.ledger.requeue_ids([(id, attempt)])
        self.ledger.add_event("requeued", f"sample {id}, attempt {attempt}: {reason}")
        await self._wake()

    async def rejected(self, id: str, attempt: int, reason: str, detail: str = "") -> None:
        """A sample cannot be used. Too large a share of rejected samples stops the run."""
        if self.ledger.rejected(id, attempt, reason, detail):
            self.delivering.add(self.ledger.get(id).worker)
        await self._stop_for_rejects()
        await self._wake()

    async def worker_lost(self, worker: str) -> LostLeases:
        """A target worker died: what it had leased is queued again, but for samples that workers die of."""
        self.losses[worker] += 1
        deadly = self.ledger.blame(worker, self.in_hand.pop(worker, ()))
        for id, attempt in deadly:
            self.ledger.rejected(id, attempt, "lost_with_worker", f"{MOST_DEATHS} target workers died with it in hand")
        lost = LostLeases(self.ledger.requeue_worker(worker), tuple(id for id, _ in deadly), worker in self.delivering)
        self.delivering.discard(worker)
        self.observer.targets.pop(worker, None)
        self.alarm(f"target worker {worker} was lost; {lost.queued} samples are queued again" + "".join(
            f"; sample {id} is rejected: {MOST_DEATHS} target workers died with it in hand" for id in lost.rejected))
        await self._stop_for_rejects()
        await self._wake()
        return lost

    async def target_report(self, report: TargetReport) -> None:
        self.observer.target(report)

    # Trainers

    async def streamed(self, deliveries: list[tuple[str, int, int]]) -> dict[str, int]:
        """A trainer holds these (id, attempt, tokens). Returns those it may train with the passes they have had."""
        taken = self.ledger.streamed(deliveries)
        self.delivering.update(self.ledger.get(id).worker for id in taken)
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
        async with self.news:
            await self._news(lambda: self._outstanding(below, rank) == 0)
            return self._outstanding(below, rank)

    async def coming(self, below: int | None) -> int:
        """The same for all ranks, of now."""
        return self._outstanding(below)

    async def exported(self, export: Export) -> None:
        """A new drafter version is on the disk, verified."""
        predicted = "" if export.predicted_walked is None else f", predicted acceptance length {export.predicted_walked:.2f}"
        self.ledger.add_version(export.version, export.step, export.samples, export.parent, export.predicted_walked,
                                f"version {export.version} of step {export.step}{predicted}", asdict(export))
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
                await self._news(lambda: untried(self.ledger) or self.exports_over)
            waiting = untried(self.ledger)
        if not waiting:
            return None
        *passed_over, newest = waiting
        for version in passed_over:
            self.ledger.set_version_state(version, "gated", "a newer version came before its turn")
        return export_of(self.ledger, newest)

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
        return export_of(self.ledger, serving), export_of(self.ledger, before)

    async def find_export(self, version: int | None) -> Export | None:
        """A version of this run as it was exported, whatever became of it."""
        return export_of(self.ledger, version)

    async def newest_version(self, known: int | None) -> int | None:
        """Number of the newest version; waits a while for another than the `known` one."""
        async with self.news:
            await self._news(lambda: self.observer.version != known)
            return self.observer.version

    async def needed_versions(self) -> list[int]:
        """Versions whose folders must stay (cluster.exported)."""
        return needed_versions(self.ledger)

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
        self.ledger.link(name, url)
        self.observer.links[name] = url

    def alarm(self, text: str) -> None:
        self.ledger.add_event("alarm", text)
        self.observer.alarm(text)

    async def raise_alarm(self, text: str) -> None:
        self.alarm(text)

    async def override(self, action: str, version: int | None) -> None:
        """A person's word on the rollout: pause, resume, promote VERSION or rollback."""
        self.ledger.add_event("override", action if version is None else f"{action} {version}", version)
        await self._wake()

    async def next_override(self) -> tuple[str, int | None] | None:
        """The oldest word that was not heard yet, once; None when none is said for a while."""
        async with self.news:
            await self._news(self.ledger.unheard)
            word = self.ledger.unheard()
        if word is None:
            return None
        self.ledger.hear(word["number"])
        return word["text"].partition(" ")[0], word["version"]

    async def versions(self) -> list[dict]:
        return self.ledger.versions()

    async def stop(self, reason: str) -> None:
        """Lease nothing more; what is on its way is still trained."""
        if self.stopping is None:
            self.ledger.add_event("stopping", reason)
            self.ledger.stop(reason)
            self.stopping = reason
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
        """Write the last snapshot and close ledger and metrics. What a full disk does not take is left out, and logged:
        the run's own end must not be hidden by it."""
        for what, write in (
                ("status.json", lambda: write_snapshot(self.run_dir, ended(self._last(), state, reason))),
                ("the end in the ledger", lambda: self.ledger.add_event(state, reason or "all samples are trained")),
                ("the newest part of the metrics", self.observer.close), ("the ledger", self.ledger.close)):
            try:
                write()
            except Exception as error:
                log.error("the run is over (%s), but %s was not written: %s", state, what, one_line(error))

    # Within

    def _lease(self, worker: str, count: int, call: LeaseCall) -> list[Lease]:
        if self.ledger.queued_for(not call.held, "held_out"):
            # First, since predictions need them, and to rank 0, which predicts.
            return self.ledger.lease(worker, count, 0, "held_out", call)
        backlog = self.ledger.backlog()
        # A rank that does not keep up gets less: its samples would hold the engines' memory while others starve.
        rank = min(range(self.config.trainer.ranks), key=lambda rank: backlog.get(rank, 0))
        return self.ledger.lease(worker, count, rank, call=call)

    async def _stop_for_rejects(self) -> None:
        account = self.ledger.account()
        settled = account["all"] - account["queued"] - account["leased"]
        if settled >= REJECTS_BEFORE_STOP and account["rejected"] > self.config.data.max_reject_share * settled:
            reasons = ", ".join(f"{reason} {number}" for reason, number in self.ledger.reasons().items())
            await self.stop(f"{account['rejected']} of {settled} samples were rejected ({reasons}); more than "
                            f"data.max_reject_share allows")

    def _last(self) -> Snapshot:
        """The live state, though metrics cannot be written."""
        try:
            return self._observe()
        except OSError:
            account = self.ledger.account()
            del account["all"]
            return self.observer.snapshot(Pipeline(), account)

    def _observe(self):
        account = self.ledger.account()
        del account["all"]
        served = self.ledger.account("traffic") if self.config.traffic.fraction else None
        return self.observer.tick(account, self.ledger.reasons(), served)

    def _may_lease(self, idle: bool) -> bool:
        return self.stopping is None and self.ledger.queued_for(idle)

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


