"""What the run looks like from outside: reports of all roles become metrics, the live snapshot and alarms."""

import math
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

from torchspec_lite.config import SECRETS, Config
from torchspec_lite.metrics import Metrics
from torchspec_lite.snapshot import Alarm, Buffer, Pipeline, Replica, Snapshot, SnapshotWriter, Traffic
from workers.reports import PaceReport, TargetReport, TrainerReport

RATE_WINDOW_S = 20.0
ALARMS_SHOWN = 20


class Rate:
    """Growth a second of a total, over the last RATE_WINDOW_S."""

    def __init__(self):
        self.points: deque[tuple[float, float]] = deque()

    def add(self, total: float, now: float) -> None:
        self.points.append((now, total))
        while now - self.points[0][0] > RATE_WINDOW_S and len(self.points) > 2:
            self.points.popleft()

    def value(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (start, first), (end, last) = self.points[0], self.points[-1]
        return max(0.0, (last - first) / (end - start)) if end > start else 0.0


class Observer:
    """Keeps the newest report of every role and writes metrics and `status.json` from them."""

    def __init__(self, config: Config, run_dir: Path, started: float):
        self.config, self.started = config, started
        hidden = {section: {key} for section, key in SECRETS}
        self.metrics = Metrics(run_dir, config.metrics, config.model_dump(mode="json", exclude=hidden))
        self.writer = SnapshotWriter(run_dir)
        self.state, self.reason = "starting", None
        self.trainers: dict[int, TrainerReport] = {}
        self.targets: dict[str, TargetReport] = {}
        self.replicas: tuple[Replica, ...] = ()
        self.alarms: deque[Alarm] = deque(maxlen=ALARMS_SHOWN)
        self.links: dict[str, str] = {}
        self.tokens_streamed = 0
        self.predicted = self.served_before = self.served = None
        self.version = self.serving_version = None
        self.rates = {name: Rate() for name in (
            "streamed", "trained", "target_wait", "trainer_wait", "rounds", "accepted")}
        self.alarms_total = 0
        self.outcomes: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.replica_rates: dict[str, Rate] = {}
        self.traffic = Traffic()

    def trainer(self, report: TrainerReport) -> None:
        """Take a trainer's report in; rank 0's becomes metrics of its step."""
        self.trainers[report.rank] = report
        if report.rank != 0 or report.loss is None:
            return
        values = {"loss": report.loss, "learning_rate": report.learning_rate, "grad_norm": report.grad_norm,
                  "optimizer_steps_total": report.step, "skipped_steps_total": report.skipped,
                  "tokens_trained_total": report.tokens}
        self.metrics.record({name: value for name, value in values.items() if value is not None}, step=report.step)
        for k, loss in enumerate(report.loss_per_step):
            self.metrics.record({"loss_per_step": loss}, step=report.step, labels={"k": k})
        for phase, seconds in report.phases.items():
            self.metrics.record({"phase_seconds_total": seconds}, step=report.step, labels={"phase": phase})
        if report.predicted_train is not None:
            self.metrics.record({"predicted_acceptance_length": report.predicted_train}, step=report.step,
                                labels={"split": "train"})

    def target(self, report: TargetReport) -> None:
        self.targets[report.worker] = report

    def streamed(self, tokens: int) -> None:
        self.tokens_streamed += tokens

    def exported(self, version: int, step: int, predicted_rows: float | None, predicted_walked: float | None,
                 per_position: list[float]) -> None:
        """A drafter version was written, with what the trainer predicts for it on the held-out samples."""
        self.version = version
        self.metrics.record({"drafter_version": version}, step=step)
        if predicted_walked is not None:
            self.predicted = predicted_walked
            for split, value in (("held_out", predicted_rows), ("held_out_walked", predicted_walked)):
                self.metrics.record({"predicted_acceptance_length": value}, step=step, labels={"split": split})
            for position, rate in enumerate(per_position):
                self.metrics.record({"predicted_acceptance_rate": rate}, step=step, labels={"position": position})

    def drift(self, step: int, name: str, per_step: list[float]) -> None:
        for k, value in enumerate(per_step):
            if math.isfinite(value):
                self.metrics.record({name: value}, step=step, labels={"k": k})

    def served_by_version(self, version: int, acceptance_length: float, per_position: list[float],
                          serving: bool) -> None:
        """Acceptance length that requests got from a version; `serving`: it is the one the pool serves now."""
        self.metrics.record({"served_acceptance_length_by_version": acceptance_length}, labels={"version": version})
        if not serving:
            return
        self.served = acceptance_length
        if self.served_before is None:
            self.served_before = acceptance_length
        self.metrics.record({"served_acceptance_length": acceptance_length})
        for position, rate in enumerate(per_position):
            self.metrics.record({"served_acceptance_rate": rate}, labels={"position": position})
        if self.predicted is not None and version == self.version:
            self.metrics.record({"train_serve_gap": self.predicted - acceptance_length})

    def swap(self, replica: str, version: int, seconds: float) -> None:
        self.metrics.record({"swap_seconds": seconds, "serving_drafter_version": version}, labels={"replica": replica})

    def pool(self, replicas: tuple[Replica, ...], rounds: int, accepted: int, tokens: int) -> None:
        """The replicas now; draft `rounds`, `accepted` drafts and `tokens` are totals of those that live."""
        now, names = time.monotonic(), {replica.name for replica in replicas}
        for gone in {replica.name for replica in self.replicas} - names:
            self.metrics.forget("replica", gone)
        self.replica_rates = {name: self.replica_rates.get(name) or Rate() for name in names}
        for replica in replicas:
            self.replica_rates[replica.name].add(replica.tokens, now)
        self.replicas = tuple(replace(replica, tokens_per_s=self.replica_rates[replica.name].value()) for replica in replicas)
        self.rates["rounds"].add(rounds, now)
        self.rates["accepted"].add(accepted, now)
        if self.rates["rounds"].value():
            self.metrics.record({"live_acceptance_length": 1 + self.rates["accepted"].value() / self.rates["rounds"].value()})
        self.metrics.record({"served_requests_total": sum(replica.requests for replica in replicas),
                             "served_tokens_total": tokens, "draft_rounds_total": rounds})
        for replica in replicas:
            self.metrics.record({"running_requests": replica.running}, labels={"replica": replica.name})
            if replica.acceptance_length is not None:
                self.metrics.record({"served_acceptance_length_by_replica": replica.acceptance_length},
                                    labels={"replica": replica.name})

    def traffic_captured(self, found: list[dict]) -> None:
        """What the replicas captured of their requests."""
        left_out = Counter()
        for replica in found:
            left_out.update(replica.get("left_out", {}))
        totals = {name: sum(replica.get(name, 0) for replica in found)
                  for name in ("requests", "excluded", "sampled", "second_answers", "sent", "sent_tokens")}
        self.traffic = replace(self.traffic, **totals, left_out=dict(left_out))
        self.metrics.record({"traffic_requests_total": totals["requests"], "traffic_excluded_total": totals["excluded"],
                             "traffic_sampled_total": totals["sampled"], "traffic_second_answers_total": totals["second_answers"],
                             "traffic_sent_tokens_total": totals["sent_tokens"]})
        for reason, number in left_out.items():
            self.metrics.record({"traffic_left_out_total": number}, labels={"reason": reason})

    def traffic_window(self, report: PaceReport) -> None:
        """What rank 0 predicts on present traffic."""
        self.traffic = replace(self.traffic, window=report.window, window_serving=report.serving,
                               window_candidate=report.candidate, resting=report.resting)
        self.metrics.record({"predicted_acceptance_length": report.serving}, labels={"split": "traffic_serving"})
        if report.candidate is not None:
            self.metrics.record({"predicted_acceptance_length": report.candidate}, labels={"split": "traffic_candidate"})

    def judged(self, outcome: str) -> None:
        """A version's rollout ended: promoted, rolled_back or refused."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.metrics.record({"rollouts_total": self.outcomes[outcome]}, labels={"outcome": outcome})

    def refused(self, reason: str) -> None:
        """A receiver refused a message, for this kind of reason."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        self.metrics.record({"refused_total": self.refusals[reason]}, labels={"reason": reason})

    def alarm(self, text: str) -> None:
        self.alarms.append(Alarm(time=time.time(), text=text))
        self.alarms_total += 1
        self.metrics.record({"alarms_total": self.alarms_total})

    def tick(self, counts: dict[str, int], rejects: dict[str, int], served: dict[str, int] | None = None) -> Snapshot:
        """Once a second: rates, flow metrics and the snapshot on disk. `served`: the ledger's account of traffic."""
        if served is not None:
            self.traffic = replace(self.traffic, samples=served)
        now = time.monotonic()
        targets, trainers = list(self.targets.values()), list(self.trainers.values())
        trained = trainers[0].tokens if trainers else 0
        self.rates["streamed"].add(self.tokens_streamed, now)
        self.rates["trained"].add(trained, now)
        self.rates["target_wait"].add(sum(report.waited_s for report in targets), now)
        self.rates["trainer_wait"].add(sum(report.phases.get("wait", 0.0) for report in trainers), now)
        pipeline = Pipeline(
            target_workers=len(targets), trainer_ranks=len(trainers),
            streamed_tokens_per_s=self.rates["streamed"].value(), trained_tokens_per_s=self.rates["trained"].value(),
            target_wait=min(1.0, self.rates["target_wait"].value() / max(1, len(targets))),
            trainer_wait=min(1.0, self.rates["trainer_wait"].value() / max(1, len(trainers))),
            sender=_together(report.sender for report in targets),
            receiver=_together(report.receiver for report in trainers),
            reuse=_together(report.reuse for report in trainers))
        self._record_flow(pipeline, counts, rejects)
        snapshot = self.snapshot(pipeline, counts)
        self.writer.offer(snapshot)
        return snapshot

    def snapshot(self, pipeline: Pipeline, counts: dict[str, int]) -> Snapshot:
        first = self.trainers.get(0, TrainerReport(rank=0))
        return Snapshot(
            run=self.config.name, state=self.state, reason=self.reason, started=self.started, updated=time.time(),
            elapsed_s=time.time() - self.started,
            prompts_done=sum(counts[state] for state in ("trained", "durable", "rejected")),
            prompts_total=sum(counts.values()), samples=dict(counts), step=first.step,
            max_steps=self.config.trainer.max_steps, skipped_steps=first.skipped, tokens_streamed=self.tokens_streamed,
            tokens_trained=first.tokens, loss=first.loss, learning_rate=first.learning_rate, predicted=self.predicted,
            served_before=self.served_before, served=self.served, version=self.version,
            serving_version=self.serving_version, pipeline=pipeline, replicas=self.replicas,
            traffic=self.traffic if self.config.traffic.fraction else None, alarms=tuple(self.alarms), links=dict(self.links))

    def _record_flow(self, pipeline: Pipeline, counts: dict[str, int], rejects: dict[str, int]) -> None:
        record = self.metrics.record
        record({"tokens_streamed_total": self.tokens_streamed,
                "tokens_streamed_per_second": pipeline.streamed_tokens_per_s,
                "tokens_trained_per_second": pipeline.trained_tokens_per_s,
                "prompts_total": sum(counts[state] for state in ("trained", "durable", "rejected")),
                "credit_bytes": pipeline.receiver.budget_bytes - pipeline.receiver.bytes,
                "credit_samples": pipeline.receiver.budget_samples - pipeline.receiver.samples})
        for state, number in counts.items():
            record({"samples": number}, labels={"state": state})
        for reason, number in rejects.items():
            record({"rejected_total": number}, labels={"reason": reason})
        for role, share in (("target", pipeline.target_wait), ("trainer", pipeline.trainer_wait)):
            record({"wait_share": share}, labels={"role": role})
        for name in ("sender", "receiver", "reuse"):
            buffer = getattr(pipeline, name)
            record({"buffer_bytes": buffer.bytes, "buffer_samples": buffer.samples}, labels={"buffer": name})

    def close(self) -> None:
        self.metrics.close()


def _together(buffers) -> Buffer:
    buffers = list(buffers)
    return Buffer(bytes=sum(b.bytes for b in buffers), budget_bytes=sum(b.budget_bytes for b in buffers),
                  samples=sum(b.samples for b in buffers), budget_samples=sum(b.budget_samples for b in buffers))
