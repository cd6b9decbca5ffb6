"""One trainer rank: samples in from the stream, optimizer steps, drafter versions out."""

import time
from pathlib import Path

import torch

from torchspec_lite import checkpoint
from torchspec_lite.acceptance import Prediction, predict
from torchspec_lite.chat import load_tokenizer
from torchspec_lite.config import Config
from torchspec_lite.drafter import Drafter, init_drafter
from torchspec_lite.export import export, load_drafter, versions
from torchspec_lite.learner import Learner, StepResult
from torchspec_lite.parity import make_probe
from torchspec_lite.reuse import Entry, ReuseBuffer
from torchspec_lite.sample import DTYPES, Expectation, Sample, supervised
from torchspec_lite.stream import Receiver, StreamTimeout
from torchspec_lite.snapshot import Buffer
from torchspec_lite.target import TargetInfo, load_head
from torchspec_lite.teacher import TeacherStatistics, teacher_statistics
from torchspec_lite.vocab import choose_draft_vocab, coverage
from workers.group import Group
from workers.phases import Phases
from workers.reports import Export, TrainerReport
from workers.served import Look, ServedTraffic
from workers.trace import Trace
from workers.traffic_intake import TrafficIntake

KEEP_CHECKPOINTS = 3
FILL_WAIT_S = 2.0
"""Longest wait for a sample before the coordinator is asked whether more will come."""
SERVED_WAIT_S = 0.2
"""Longest wait for served traffic before general samples are looked for again."""
FEW_BATCHES = 4
"""Steps' worth of served samples to draw from at the least: users will not wait until there are more."""
FEW_S = 10.0
"""With served traffic, a step of fewer samples than wished for is taken after this long, so that ranks meet."""
PROBES = 4


class Trainer:
    """A plain class; `cluster.roles` makes it a Ray actor. `listen`, then `train`, which returns when all is trained.

    `coordinator` has `call` and `tell` (workers.link.Link).
    """

    def __init__(self, config: Config, rank: int, info: TargetInfo, coordinator, device: str = "cpu"):
        self.config, self.rank, self.info, self.coordinator = config, rank, info, coordinator
        self.options = config.trainer
        self.device = torch.device(device)
        self.run_dir = config.run_dir
        self.serving_dtype = DTYPES[config.target.dtype]
        self.layer_ids = tuple(config.capture.layer_ids or info.default_layer_ids())
        # Its product with the last state makes the target's distribution; the target itself computes it in this dtype.
        self.head = load_head(info, self.serving_dtype)
        self.device_head = self.head.to(self.device)
        self.buffer = ReuseBuffer(self.options.reuse, self.options.reuse_buffer_mib << 20, self.options.seed + rank,
                                  self.options.ordered)
        self.held_out: dict[str, tuple[Sample, TeacherStatistics]] = {}
        self.phases = Phases(traced=config.profile)
        self.receiver: Receiver | None = None
        self.served: ServedTraffic | None = None
        self.resting = False
        self.learner: Learner | None = None
        self.group: Group | None = None
        self.version = 0
        self.samples_done = 0
        self.exported_step = -1
        self.stopping = self.time_is_up = False
        self.started: float | None = None
        self.trained_s = 0.0
        self.samples_expected = 0

    # Start

    def listen(self, host: str, keys, unencrypted: bool) -> str:
        """Open the receiver; returns its endpoint for the target workers."""
        stream = self.config.stream
        self.receiver = Receiver(host, stream.budget_mib << 20, stream.max_samples, self._expect(), keys,
                                 stream.heartbeat_s, stream.shared_memory, unencrypted=unencrypted)
        return self.receiver.endpoint

    def listen_to_traffic(self, host: str, keys, unencrypted: bool) -> str:
        """Open a receiver of its own for served requests; returns its endpoint for the replicas."""
        intake = TrafficIntake(self.config, self.rank, self._expect(), self.coordinator, self._teach)
        self.served = ServedTraffic(intake, self.buffer, self.run_dir, self.info, self.head, self.coordinator,
                                    self._predict_on)
        return intake.listen(host, keys, unencrypted)

    def _expect(self) -> Expectation:
        return Expectation(self.info.fingerprint, self.layer_ids, self.serving_dtype, self.info.hidden_size,
                           self.config.data.max_length)

    def train(self, group: Group) -> dict:
        """Train until no sample will come and each has had its passes, or the run's limit is reached.

        Returns {step, version, tokens, phases, trace}; `trace` is the file's path, None without one. A resumed run goes
        on from its newest whole checkpoint.
        """
        self.group = group
        torch.manual_seed(self.options.seed)
        resumed = checkpoint.newest(self.run_dir / "checkpoints")
        if resumed is not None:
            self._restore(resumed)
        else:
            self._restored(0)
            self._begin()
        trace = Trace(self.run_dir / "profile") if self.config.profile and self.rank == 0 else None
        try:
            while self._step():
                if trace is not None:
                    trace.step()
        finally:
            if trace is not None:
                trace.close()
        if self.learner.step > self.exported_step:
            self._publish()
        self.coordinator.settle()
        return {"step": self.learner.step, "version": self.version, "tokens": self.learner.tokens,
                "phases": self.phases.seconds,
                "trace": None if trace is None or trace.path is None else str(trace.path)}

    def stop(self) -> None:
        """Finish the step in hand, publish and return from `train`, whatever still waits."""
        self.stopping = True

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        if self.served is not None:
            self.served.intake.close()

    def _restored(self, step: int) -> None:
        if self.rank == 0:
            self.coordinator.call("restored", step)
        self.group.sum(torch.zeros(1))  # none reports a sample before: it would be queued again all the same

    def _begin(self) -> None:
        """A fresh drafter, or the one to start from; its vocabulary is chosen from the first samples' tokens."""
        if self.config.drafter.init_from is not None:
            drafter = load_drafter(Path(self.config.drafter.init_from), self.info, self.head)
        else:
            generator = torch.Generator().manual_seed(self.options.seed)
            drafter = init_drafter(self.info, self.head, self.config.drafter, self._choose_vocabulary(), generator,
                                   self.layer_ids)
        drafter = drafter.to(self.device)
        self.group.same_weights(drafter)
        self.learner = Learner(drafter, self.device_head, self.options, self.group)
        self._publish()

    def _restore(self, path: Path) -> None:
        with self.phases.phase("restore"):
            state = checkpoint.read(path)
            drafter = Learner.empty_drafter(state.config, state.vocabulary())
            self.learner = Learner(drafter.to(self.device), self.device_head, self.options, self.group)
            self.learner.load(path)
        extra = state.extra
        self.samples_done, self.trained_s = extra["samples"], extra["trained_s"]
        self.exported_step = self.learner.step
        self._restored(self.learner.step)
        there = max(versions(self.run_dir / "drafters"), default=-1) if self.rank == 0 else 0
        there = int(self.group.sum(torch.tensor([there]))[0])
        self.version = max(there, extra["version"])  # there are more where the newest checkpoints were broken
        if there < extra["version"]:  # the trainers ended between the checkpoint and its version
            drafter = self.learner.exportable()
            if drafter is not None and self.coordinator.call("find_export", self.version) is None:
                self._export(drafter, self.version, None)

    def _choose_vocabulary(self) -> torch.Tensor:
        """Count what the target wrote in the run's first samples, over all ranks, in no order that matters."""
        first = min(self.config.drafter.vocab_samples, self.config.data.max_prompts or self.config.drafter.vocab_samples)
        with self.phases.phase("wait"):
            while self.buffer.has_room():
                self._fill(FILL_WAIT_S)
                if self.coordinator.call("outstanding", first, self.rank) == 0 and not self._take_one(0.0):
                    break
        counts = torch.zeros(2, self.info.vocab_size, dtype=torch.int64)          # prompt's, answer's
        for entry in self.buffer.entries.values():
            if entry.sample.ordinal < first:
                for kind in (0, 1):
                    tokens = entry.sample.token_ids[entry.sample.mask == kind].long()
                    counts[kind] += torch.bincount(tokens, minlength=self.info.vocab_size)
        counts = self.group.sum(counts)
        tokenizer = load_tokenizer(self.info.path, self.config.target.trust_remote_code)
        chosen = choose_draft_vocab(counts[1], counts[0], self.config.drafter.draft_vocab_size,
                                    [id for id in tokenizer.all_special_ids if id < self.info.vocab_size])
        if self.rank == 0:
            self.coordinator.tell("event", "vocabulary", f"{len(chosen)} draft tokens from {int(counts[1].sum())} written "
                                  f"ones, of which they hold {coverage(counts[1], chosen):.1%}")
        return chosen

    # One step

    def _step(self) -> bool:
        """One optimizer step over all ranks; False when there is nothing left anywhere."""
        with self.phases.phase("wait"):
            entries = self._next_entries()
            # Ranks without samples take part with none, so nobody waits for them; the last one out ends it for all.
            # Rank 0's clock is everybody's: learning rates must not differ. So is its rest.
            mine = self._progress() if self.rank == 0 else 0.0
            resting = self.rank == 0 and self.served is not None and self.served.pace.resting
            drawn, progress, open_ended, rest = self.group.sum(torch.tensor(
                [len(entries), mine, not entries and self._may_get_more(), resting], dtype=torch.float64)).tolist()
            self.resting = rest > 0
            if not drawn:
                return open_ended > 0
        result = self.learner.train([(supervised(entry.sample, self.options.supervise), entry.statistics)
                                     for entry in entries], progress, self.phases.phase)
        counted = [entry for entry in entries if entry.passes < self.options.reuse]  # what is rehearsed is durable already
        done = self.served.count_pass(entries) if self.served else self.buffer.count_pass(entries)
        self.samples_done += int(self.group.sum(torch.tensor([len(done)]))[0])
        self.coordinator.tell("trained", [(entry.sample.id, entry.sample.attempt) for entry in counted], self.learner.step)
        self.coordinator.tell("trainer_report", self._report(result))
        if self.learner.step % self.options.export_every == 0:
            self._publish(if_worth_it=self.served is not None)
        return not (self.options.max_steps and self.learner.step >= self.options.max_steps)

    def _next_entries(self) -> list[Entry]:
        """Samples of the next step: waits until there are enough tokens, or no more will come."""
        if self.stopping:
            return []
        if self.served is not None:
            return self._mixed_entries()
        enough = self.options.batch_tokens * (2 * self.options.reuse - 1)
        self._fill(0.0)
        while self.buffer.tokens < enough and self.buffer.has_room() and not self.stopping:
            if not self._fill(FILL_WAIT_S) and self.coordinator.call("outstanding", None, self.rank) == 0 and not self._fill(0.0):
                break
        drawn = self.buffer.draw(self.options.batch_tokens)
        while self._earlier_may_come(drawn) and not self.stopping:
            self._fill(FILL_WAIT_S)
            drawn = self.buffer.draw(self.options.batch_tokens)
        return drawn

    def _mixed_entries(self) -> list[Entry]:
        """The same where served traffic comes too, or what there is after a long wait; none while training rests. Each rank
        decides for itself: one that has none takes part in the others' step with none."""
        if self.resting and not self.time_is_up:
            self.served.intake.fill(FILL_WAIT_S, resting=True)
            if self.rank == 0:
                self.served.wakes()
            return []
        wanted, until = self.options.batch_tokens * min(2 * self.options.reuse - 1, FEW_BATCHES), time.monotonic() + FEW_S
        while not self.stopping:
            came = (self.buffer.has_room() and self._fill(0.0)) | self.served.intake.fill(0.0)
            if self.buffer.tokens + self.served.tokens >= wanted or time.monotonic() >= until:
                break
            if not came:
                self.served.intake.fill(SERVED_WAIT_S)
        enough = self.served.has_a_batch(self.options.batch_tokens)
        return self.served.mixture.draw(self.options.batch_tokens) if enough or not self._open_ended() else []

    def _may_get_more(self) -> bool:
        """Whether to go on with nothing: served requests may come, or what is leased for another rank may fail there and come
        here."""
        return self._open_ended() or not self.stopping and self.coordinator.call("coming", None) > 0

    def _open_ended(self) -> bool:
        """Whether served requests may still come."""
        return (self.served is not None and not self.stopping and not self.time_is_up
                and self.coordinator.call("stop_reason") is None)

    def _earlier_may_come(self, drawn: list[Entry]) -> bool:
        """Whether, in an ordered run, a sample that belongs into this step is still on its way: after a crash they come
        out of order. Several ranks share the order out as they go, so there is none to keep."""
        if not drawn or not self.options.ordered or self.options.ranks > 1:
            return False
        used = {entry.sample.id for entry in drawn}
        left = [entry.sample.ordinal for id, entry in self.buffer.entries.items() if id not in used]
        bound = min(left, default=max(entry.sample.ordinal for entry in drawn))
        return self.coordinator.call("coming", bound) > 0

    def _fill(self, wait_s: float) -> bool:
        """Move samples from the stream into the buffer while there is room; True if any came."""
        came = self._take_one(wait_s)
        while came and self.buffer.has_room() and self._take_one(0.0):
            pass
        return came

    def _take_one(self, wait_s: float) -> bool:
        self._tell_refusals()
        try:
            sample = self.receiver.get(wait_s)
        except StreamTimeout:
            return False
        taken = self.coordinator.call("streamed", [(sample.id, sample.attempt, sample.tokens)])
        if sample.id in taken:
            self._keep(sample.clone(), taken[sample.id])
        self.receiver.release(sample)
        return True

    def _keep(self, sample: Sample, passes: int) -> None:
        statistics = self._teach(sample)
        if sample.purpose == "held_out":
            self.held_out[sample.id] = (sample, statistics)
        else:
            self.buffer.add(Entry(sample, statistics, passes))

    def _teach(self, sample: Sample) -> TeacherStatistics:
        with self.phases.phase("teacher"):
            mask = supervised(sample, self.options.supervise).mask
            known = teacher_statistics(sample.last.to(self.device), mask.to(self.device), self.device_head)
            return TeacherStatistics(known.lse.cpu(), known.argmax.cpu())

    def _tell_refusals(self) -> None:
        for event in self.receiver.events():
            if event.kind == "rejected":
                self.coordinator.tell("refused", event.id, event.attempt, event.reason)
            elif event.kind in ("lost", "banned"):
                self.coordinator.tell("event", "stream", f"{event.sender}: {event.kind}, {event.reason}")

    # What the run gets to see

    def _progress(self) -> float:
        """Place in the run, 0 to 1, by whichever limit is nearest: steps, minutes or samples."""
        options = self.options
        if self.started is None:
            self.started = time.monotonic() - self.trained_s
            account = self.coordinator.call("account")["samples"]
            self.samples_expected = account["all"] - account["rejected"]
        self.trained_s = time.monotonic() - self.started
        minutes = self.trained_s / 60 / options.max_minutes if options.max_minutes else 0.0
        if minutes >= 1 and not self.time_is_up:
            self.time_is_up = True
            self.coordinator.tell("stop", f"trainer.max_minutes ({options.max_minutes:g}) are over")
        steps = self.learner.step / options.max_steps if options.max_steps else 0.0
        # Nobody knows how many requests users will send.
        samples = 0.0 if self.served else self.samples_done / max(1, self.samples_expected)
        return min(1.0, max(minutes, steps, samples))

    def _report(self, result: StepResult) -> TrainerReport:
        stats, stream = self.receiver.stats(), self.config.stream
        return TrainerReport(
            rank=self.rank, step=self.learner.step, skipped=self.learner.skipped, tokens=self.learner.tokens,
            loss=result.loss, loss_per_step=result.loss_per_step, learning_rate=result.learning_rate,
            grad_norm=result.grad_norm, predicted_train=result.acceptance_length, phases=dict(self.phases.seconds),
            receiver=Buffer(bytes=stats.held_bytes, budget_bytes=stats.budget_bytes, samples=stats.held_samples,
                            budget_samples=stream.max_samples),
            reuse=Buffer(bytes=self.buffer.nbytes, budget_bytes=self.buffer.max_bytes, samples=len(self.buffer)))

    def _publish(self, if_worth_it: bool = False) -> None:
        """A checkpoint, then a drafter version made of the same weights. Samples become durable between the two.

        `if_worth_it`: no version when it is not predicted to be better on present traffic than the one that serves.
        """
        with self.phases.phase("export"):
            drafter = self.learner.exportable()
            look = self.served.look(drafter) if if_worth_it and drafter is not None else None  # rank 0
            unworthy, rest = self.group.sum(torch.tensor([
                float(look is not None and look.decision != "export"), float(look is not None and look.decision == "rest")])).tolist()
            if rest:  # what was learned since the last version was worth nothing
                self.learner.restart(look and look.serving_drafter)
            version = self.version + bool(self.learner.step and not unworthy)
            # Every sample this step used must be in the ledger as trained before a checkpoint claims it.
            self.coordinator.settle()
            self.group.sum(torch.zeros(1))
            extra = {"version": version, "samples": self.samples_done, "trained_s": self.trained_s}
            self.learner.save(self.run_dir / "checkpoints", extra, KEEP_CHECKPOINTS)
            if drafter is not None:
                self.coordinator.call("checkpointed", self.learner.step)
                if not unworthy:
                    self._export(look.drafter if look else drafter, version, look)
            self.group.sum(torch.zeros(1))
            self.version, self.exported_step = version, self.learner.step

    def _export(self, drafter: Drafter, version: int, look: Look | None) -> None:
        drafts = self.config.serve.num_speculative_tokens
        prediction = self._predict_on(drafter, list(self.held_out.values())) if look is None else look.candidate
        if prediction is not None:
            self.coordinator.tell("drift", self.learner.step, {
                name: list(getattr(prediction, name)) for name in ("feature_norm", "sink_mass", "own_mass")})
        walked = prediction.walked if prediction is not None else None
        parent = version - 1 if version else None
        path = export(drafter, self.run_dir / "drafters", version, self.serving_dtype, self.info, self.learner.step,
                      self.samples_done, parent, walked)
        served = load_drafter(path, self.info, self.head)
        probes = [make_probe(served, self.head, sample, drafts, self.serving_dtype)
                  for sample, _ in list(self.held_out.values())[:PROBES]]
        self.coordinator.call("exported", Export(
            version, self.learner.step, self.samples_done, parent, str(path),
            prediction.acceptance_length if prediction is not None else None, walked,
            list(prediction.walk.per_position) if prediction is not None else [], probes,
            *((look.serving.walked, look.serving.walk.as_list(), look.serving_version) if look else ())))

    def _predict_on(self, drafter: Drafter, pairs: list[tuple[Sample, TeacherStatistics]]) -> Prediction | None:
        if not pairs:
            return None
        samples, statistics = zip(*pairs)
        prediction = predict(drafter, self.head, samples, self.config.serve.num_speculative_tokens, self.serving_dtype,
                             statistics)
        return prediction if prediction.rounds else None
