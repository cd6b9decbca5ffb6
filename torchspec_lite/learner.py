"""The learner: drafter, optimizer and schedule, one global optimizer step at a time."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchspec_lite import checkpoint
from torchspec_lite.batch import pack, supervised_counts
from torchspec_lite.config import TrainerConfig
from torchspec_lite.drafter import Drafter, DrafterConfig
from torchspec_lite.optim import Ema, learning_rate, make_optimizers, update
from torchspec_lite.sample import Sample
from torchspec_lite.target import FrozenHead
from torchspec_lite.teacher import TeacherStatistics
from torchspec_lite.unroll import unroll_loss

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class StepResult:
    """One optimizer step over all ranks. Losses are means over supervised places, per TTT step, in nats.

    `acceptance_length` is predicted greedily from the batch itself; None without a live row.
    """

    loss: float
    loss_per_step: list[float]
    acceptance_length: float | None
    grad_norm: float
    learning_rate: float
    skipped: bool


class Learner:
    """One rank's share of the drafter's training. `group` sums over ranks (see workers.group.Group).

    Every rank must call `train` as often as the others; the weights stay equal on all of them bit for bit, because
    every rank adds the same summed gradient.
    """

    def __init__(self, drafter: Drafter, head: FrozenHead, options: TrainerConfig, group):
        self.drafter, self.head, self.options, self.group = drafter, head, options, group
        self.parameters = list(drafter.parameters())
        self.optimizers = make_optimizers(drafter, options)
        self.ema = Ema(drafter, options.ema) if options.ema else None
        self.step = self.skipped = self.tokens = 0

    @staticmethod
    def empty_drafter(config: DrafterConfig, vocabulary: torch.Tensor) -> Drafter:
        """A drafter that `load` fills."""
        return Drafter(config, vocabulary)

    def train(self, samples: Sequence[tuple[Sample, TeacherStatistics]], progress: float) -> StepResult:
        """One optimizer step on this rank's samples (maybe none). `progress` from 0 to 1 places the step in the run.

        The loss is divided by the supervised places of all ranks and micro-batches, per TTT step. A gradient that is
        not finite skips the step on every rank, and is counted.
        """
        options, steps = self.options, self.options.ttt_steps
        counts = supervised_counts([sample.mask for sample, _ in samples], steps)
        shared = self.group.sum(torch.cat([counts, torch.tensor([sum(s.tokens for s, _ in samples)], dtype=torch.float64)]))
        normaliser, tokens = shared[:steps], int(shared[steps])
        sums, accepted, rounds = torch.zeros(steps, dtype=torch.float64), 0, 0
        for micro in self._micro_batches(samples):
            batch = pack([sample for sample, _ in micro], [statistics for _, statistics in micro], self.parameters[0].device)
            result = unroll_loss(self.drafter, self.head, batch, steps, options.step_decay, options.loss, normaliser,
                                 DTYPES[options.dtype], options.compile, options.recompute)
            result.loss.backward()
            sums += result.loss_sums.double().cpu()
            accepted, rounds = accepted + int(result.accepted.sum()), rounds + int(result.rounds)
        self.group.sum_gradients(self.parameters)
        sums = self.group.sum(torch.cat([sums, torch.tensor([accepted, rounds], dtype=torch.float64)]))
        self.step += 1
        self.tokens += tokens
        rate = learning_rate(options, self.step, progress)
        done = update(self.optimizers, rate, options.clip_norm)
        self.skipped += not done.applied
        if done.applied and self.ema is not None:
            self.ema.update(self.drafter)
        means = (sums[:steps] / normaliser.clamp_min(1)).tolist()
        weights = [options.step_decay ** k for k in range(steps)]
        return StepResult(
            loss=sum(w * mean for w, mean in zip(weights, means)), loss_per_step=means,
            acceptance_length=1 + float(sums[steps] / sums[steps + 1]) if sums[steps + 1] else None,
            grad_norm=done.gradient_norm, learning_rate=rate, skipped=not done.applied)

    def _micro_batches(self, samples):
        most = self.options.micro_batch_tokens or self.options.batch_tokens
        micro, tokens = [], 0
        for pair in samples:
            if micro and tokens + pair[0].tokens > most:
                yield micro
                micro, tokens = [], 0
            micro.append(pair)
            tokens += pair[0].tokens
        if micro:
            yield micro

    def exportable(self) -> Drafter:
        """The drafter to export, on the CPU: of the averaged weights where the run keeps an average."""
        drafter = copy.deepcopy(self.drafter).cpu()
        if self.ema is not None:
            self.ema.copy_to(drafter)
        return drafter

    def save(self, directory: Path, extra: dict, keep: int) -> Path:
        """Write a checkpoint of this step; `extra` comes back in its state. Raises UserError when the disk is full."""
        schedule = {"skipped": self.skipped, "tokens": self.tokens}
        return checkpoint.save(directory, self.step, self.drafter.config, self.drafter, self.optimizers, schedule, extra,
                               self._averages(), keep)

    def load(self, path: Path) -> checkpoint.State:
        """Go on from a checkpoint: weights, optimizer, averages, random numbers, step."""
        state = checkpoint.load(path, self.drafter.config, self.drafter, self.optimizers, self._averages())
        self.step = state.step
        self.skipped, self.tokens = state.schedule["skipped"], state.schedule["tokens"]
        return state

    def _averages(self) -> dict[str, torch.Tensor]:
        return {} if self.ema is None else self.ema.tensors
