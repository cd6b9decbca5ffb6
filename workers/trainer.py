"""One trainer rank: samples in from the stream, optimizer steps, drafter versions out."""

import math
import time
from contextlib import closing, nullcontext
from pathlib import Path

import torch

from torchspec_lite import checkpoint
from torchspec_lite.acceptance import Prediction, predict
from torchspec_lite.config import Config
from torchspec_lite.drafter import Drafter
from torchspec_lite.learner import Learner, StepResult
from torchspec_lite.reuse import Entry, ReuseBuffer
from torchspec_lite.sample import DTYPES, Expectation, Sample, supervised
from torchspec_lite.snapshot import Buffer
from torchspec_lite.starting_point import check_goes_on, layer_ids
from torchspec_lite.stream import Receiver, StreamTimeout
from torchspec_lite.target import TargetInfo, load_head
from torchspec_lite.teacher import TeacherStatistics, teacher_statistics
from workers.first_drafter import choose_vocabulary, deciding_samples, fresh_drafter, given_drafter
from workers.group import Group
from workers.phases import Phases
from workers.publisher import Publisher
from workers.reports import TrainerReport
from workers.served import ServedTraffic
from workers.trace import Trace
from workers.traffic_intake import TrafficIntake

FILL_WAIT_S = 2.0
"""Longest wait for a sample before the coordinator is asked whether more will come."""
SERVED_WAIT_S = 0.2
"""Longest wait for served traffic before general samples are looked for again."""
FEW_BATCHES = 4
"""Steps' worth of served samples to draw from at the least: users will not wait until there are more."""
FEW_S = 10.0
"""Longest wait of a rank for samples before it meets the others, whose sums have a limit. With served traffic a step is then
made of what there is, else of nothing."""


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
        self.layer_ids = layer_ids(config, info)
        # Its product with the last state makes the target's distribution; the target itself computes it in this dtype.
        self.head = load_head(info, self.serving_dtype)
        self.device_head = self.head.to(self.device)
        self.buffer = ReuseBuffer(self.options.reuse, self.options.reuse_buffer_mib << 20, self.options.seed + rank,
                                  self.options.ordered)
        self.held_out: dict[str, tuple[Sample, TeacherStatistics]] = {}
        self.publisher = Publisher(config, info, self.head, self.device_head, coordinator, self.held_out, self._predict_on)
        self.phases = Phases(traced=config.profile)
        self.receiver: Receiver | None = None
        self.served: ServedTraffic | None = None
        self.resting = False
        self.learner: Learner | None = None
        self.group: Group | None = None
        self.trace: Trace | None = None
        self.samples_done = 0
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
                           self.config.data.max_length, self.info.vocab_size)

    def train(self, group: Group) -> dict:
        """Train until no sample will come and each has had its passes, or the run's limit is reached.

        Returns {step, version, tokens, phases, trace}; `trace` is the file's path, None without one. A resumed run goes
        on from its newest whole checkpoint. One that is stopped before it has a drafter leaves none: `version` is None.
        """
        self.group = group
        torch.manual_seed(self.options.seed)
        resumed = checkpoint.newest(self.run_dir / "checkpoints")
        if resumed is not None:
            self._restore(resumed)
        else:
            self._restored(0)
        if resumed is not None or self._begin():
            self._train_steps()
        self.coordinator.settle()
        begun = self.learner is not None
        return {"step": self.learner.step if begun else 0, "version": self.publisher.version if begun else None,
                "tokens": self.learner.tokens if begun else 0, "phases": self.phases.seconds,
                "trace": None if self.trace is None or self.trace.path is None else str(self.trace.path)}

    def _train_steps(self) -> None:
        """Steps to the end, and a last version."""
        if self.config.profile and self.rank == 0:
            self.trace = Trace(self.run_dir / "profile")
        with nullcontext() if self.trace is None else closing(self.trace):
            while self._step():
                pass
        if self.learner.step > self.publisher.step:
            self._publish()

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

    def _begin(self) -> bool:
        """Publish version 0, of a fresh drafter or the one to start from; False when the run is stopped before the samples
        that decide a fresh one's vocabulary have come: its vocabulary is for good."""
        if self.config.drafter.init_from is not None:
            drafter = given_drafter(self.config, self.info, self.head)
        elif self._first_samples_came():
            vocabulary = choose_vocabulary(self.config, self.info, (entry.sample for entry in self.buffer.entries.values()),
                                           self.group, self.coordinator)
            drafter = fresh_drafter(self.config, self.info, self.head, self.layer_ids, vocabulary)
        else:
            return False
        drafter = drafter.to(self.device)
        self.group.same_weights(drafter)
        self.learner = Learner(drafter, self.device_head, self.options, self.group)
        self._publish()
        return True

    def _restore(self, path: Path) -> None:
        with self.phases.phase("restore"):
            state = checkpoint.read(path)
            check_goes_on(path, state, self.config, self.info)
            drafter = Learner.empty_drafter(state.config, state.vocabulary())
            self.learner = Learner(drafter.to(self.device), self.device_head, self.options, self.group)
            self.learner.load(path)
        extra = state.extra
        self.samples_done, self.trained_s = extra["samples"], extra["trained_s"]
        self._restored(self.learner.step)
        self.publisher.resume(self.learner, extra["version"], self.samples_done)

    def _first_samples_came(self) -> bool:
        """Wait until all ranks hold those of the deciding samples that come; False when the run is stopped before."""
        with self.phases.phase("wait"):
            waiting = 1
            while waiting:
                here = self._await_first(deciding_samples(self.config))
                stopped = self.stopping or self.coordinator.call("stop_reason") is not None
                waiting, stopped = self.group.sum(torch.tensor([not here, stopped], dtype=torch.int64)).tolist()
                if stopped:
                    return False
        return True

    def _await_first(self, first: int) -> bool:
        """Whether no sample of a lower ordinal will come to this rank any more, or there is no room for one."""
        until = self._deadline()
        while self.buffer.has_room() and not self.stopping:
            self._fill(FILL_WAIT_S)
            if self.coordinator.call("outstanding", first, self.rank) == 0 and not self._take_one(0.0):
                break
            if time.monotonic() >= until:
                return False
        return True

    def _deadline(self) -> float:
        """When a rank that waits for samples meets the others; never where it is alone."""
        return time.monotonic() + FEW_S if self.options.ranks > 1 else math.inf

    # One step

    def _step(self) -> bool:
        """One optimizer step over all ranks; False when there is nothing left anywhere."""
        with self.phases.phase("wait"):
            entries = self._next_entries()
            too_few, entries = entries is None, entries or []
            # Ranks without samples take part with none, so nobody waits for them; the last one out ends it for all.
            # Rank 0's clock is everybody's: learning rates must not differ. So is its rest.
            mine = self._progress() if self.rank == 0 else 0.0
            resting = self.rank == 0 and self.served is not None and self.served.pace.resting
            drawn, progress, open_ended, rest, waiting = self.group.sum(torch.tensor(
                [len(entries), mine, too_few or not entries and self._may_get_more(), resting, too_few],
                dtype=torch.float64)).tolist()
            self.resting = rest > 0
            if waiting or not drawn:
                return open_ended > 0
        result = self.learner.train([(supervised(entry.sample, self.options.supervise), entry.statistics)
                                     for entry in entries], progress, self.phases.phase)
        counted = [entry for entry in entries if entry.passes < self.options.reuse]  # what is rehearsed is durable already
        done = self.served.count_pass(entries) if self.served else self.buffer.count_pass(entries)
        self.samples_done += int(self.group.sum(torch.tensor([len(done)]))[0])
        self.coordinator.tell("trained", [(entry.sample.id, entry.sample.attempt) for entry in counted], self.learner.step)
        self.coordinator.tell("trainer_report", self._report(result))
        if self.learner.step % self.options.export_every == 0:
            self._publish(if_worth_it=True)
        if self.trace is not None:
            self.trace.step()
        return not (self.options.max_steps and self.learner.step >= self.options.max_steps)

    def _next_entries(self) -> list[Entry] | None:
        """Samples of the next step: waits until there are enough tokens, or no more will come. None on a rank of several that
        has waited for long: no rank takes the step then, whose batch may still come, but none waits in a sum for ever."""
        if self.stopping:
            return []
        if self.served is not None:
            return self._mixed_entries()
        until = self._deadline()
        if self.options.ranks == 1 or self.buffer.has_room():  # one that waits for others comes here again and again
            self._fill(0.0)
        while self._is_short():
            if not self._fill(FILL_WAIT_S) and self.coordinator.call("outstanding", None, self.rank) == 0 and not self._fill(0.0):
                break
            if time.monotonic() >= until and self._is_short():
                return None
        drawn = self.buffer.draw(self.options.batch_tokens)
        while self._earlier_may_come(drawn) and not self.stopping:
            self._fill(FILL_WAIT_S)
            drawn = self.buffer.draw(self.options.batch_tokens)
        return drawn

    def _is_short(self) -> bool:
        """Whether the next step should wait for more tokens."""
        enough = self.options.batch_tokens * (2 * self.options.reuse - 1)
        return self.buffer.tokens < enough and self.buffer.has_room() and not self.stopping

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
            known = teacher_statistics(sample.last.to(self.device), mask.to(self.device), self.device_head, self.options.compile)
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
        with self.phases.phase("export"):
            self.publisher.publish(self.learner, self.samples_done, self.trained_s, self.served if if_worth_it else None)

    def _predict_on(self, drafter: Drafter, pairs: list[tuple[Sample, TeacherStatistics]]) -> Prediction | None:
        if not pairs:
            return None
        samples, statistics = zip(*pairs)
        # Not on the CPU that the drafter comes from: all ranks wait, and a GPU makes seconds of minutes.
        prediction = predict(drafter, self.device_head, samples, self.config.serve.num_speculative_tokens, self.serving_dtype,
                             statistics, compile=self.options.compile)
        return prediction if prediction.rounds else None
