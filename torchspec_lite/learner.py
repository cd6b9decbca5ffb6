"""The learner: drafter, optimizer and schedule, one global optimizer step at a time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from torchspec_lite import checkpoint
from torchspec_lite.batch import empty_batch, pack, supervised_counts
from torchspec_lite.config import TrainerConfig
from torchspec_lite.drafter import Drafter, DrafterConfig
from torchspec_lite.optim import Ema, learning_rate, make_optimizers, update
from torchspec_lite.sample import DTYPES, Sample
from torchspec_lite.sharding import shard, whole
from torchspec_lite.target import FrozenHead
from torchspec_lite.teacher import TeacherStatistics
from torchspec_lite.unroll import UnrolledDrafter


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


def untimed(phase: str) -> AbstractContextManager:
    """For a caller of `Learner.train` who does not ask where the time goes."""
    return nullcontext()


class Learner:
    """One rank's share of the drafter's training. `group` sums over ranks (see workers.group.Group).

    Every rank must call every method as often as the others. With `shard: ddp` each holds the whole drafter, and the
    weights stay equal on all of them bit for bit, because every rank adds the same summed gradient; with `fsdp` each
    holds its part of weights, averages and the optimizer's state.
    """

    def __init__(self, drafter: Drafter, head: FrozenHead, options: TrainerConfig, group):
        self.drafter, self.head, self.options, self.group = drafter, head, options, group
        self.sharded = options.shard == "fsdp" and group.ranks > 1
        self.unrolled = UnrolledDrafter(drafter, head, options.ttt_steps, options.step_decay, options.loss,
                                        DTYPES[options.dtype], options.compile, options.recompute)
        if self.sharded:
            shard(self.unrolled, group.ranks)
        self.parameters = list(drafter.parameters())
        self.device = self.parameters[0].device
        self.optimizers = make_optimizers(drafter, options)
        self.ema = Ema(drafter, options.ema) if options.ema else None
        self.step = self.skipped = self.tokens = 0

    @staticmethod
    def empty_drafter(config: DrafterConfig, vocabulary: torch.Tensor) -> Drafter:
        """A drafter that `load` fills."""
        return Drafter(config, vocabulary)

    def train(self, samples: Sequence[tuple[Sample, TeacherStatistics]], progress: float,
              phase: Callable[[str], AbstractContextManager] = untimed) -> StepResult:
        """One optimizer step on this rank's samples (maybe none). `progress` from 0 to 1 places the step in the run.
        `phase` is entered around the `forward`, `backward` and `optimizer` parts.

        The loss is divided by the supervised places of all ranks and micro-batches, per TTT step. A gradient that is
        not finite skips the step on every rank, and is counted.
        """
        options, steps = self.options, self.options.ttt_steps
        with phase("forward"):
            counts = supervised_counts([sample.mask for sample, _ in samples], steps)
            tokens = torch.tensor([sum(sample.tokens for sample, _ in samples)], dtype=torch.float64)
            shared = self.group.sum(torch.cat([counts, tokens]))
            micro_batches = self._micro_batches(samples)
        normaliser = shared[:steps]
        sums, accepted, rounds = torch.zeros(steps, dtype=torch.float64), 0, 0
        for micro in micro_batches:
            with phase("forward"):
                result = self.unrolled(self._pack(micro), normaliser)
            with phase("backward"):
                result.loss.backward()
                sums += result.loss_sums.double().cpu()
                accepted, rounds = accepted + int(result.accepted.sum()), rounds + int(result.rounds)
        with phase("backward"):
            if not self.sharded:
                self.group.sum_gradients(self.parameters)
            sums = self.group.sum(torch.cat([sums, torch.tensor([accepted, rounds], dtype=torch.float64)]))
        self.step += 1
        self.tokens += int(shared[steps])
        rate = learning_rate(options, self.step, progress)
        with phase("optimizer"):
            done = update(self.optimizers, rate, options.clip_norm)
            if done.applied and self.ema is not None:
                self.ema.update(self.drafter)
        self.skipped += not done.applied
        means = (sums[:steps] / normaliser.clamp_min(1)).tolist()
        weights = [options.step_decay ** k for k in range(steps)]
        return StepResult(
            loss=sum(w * mean for w, mean in zip(weights, means)), loss_per_step=means,
            acceptance_length=1 + float(sums[steps] / sums[steps + 1]) if sums[steps + 1] else None,
            grad_norm=done.gradient_norm, learning_rate=rate, skipped=not done.applied)

    def _micro_batches(self, samples):
        """Samples cut into micro-batches. Ranks that share one sharded drafter get equally many, maybe empty ones."""
        most = self.options.micro_batch_tokens or self.options.batch_tokens
        parts, tokens = [], 0
        for pair in samples:
            if not parts or tokens + pair[0].tokens > most:
                parts.append([])
                tokens = 0
            parts[-1].append(pair)
            tokens += pair[0].tokens
        if self.sharded:
            parts += [[]] * (self.group.most(len(parts)) - len(parts))
        return parts

    def _pack(self, micro):
        if not micro:
            return empty_batch(self.drafter.config, self.device)
        return pack([sample for sample, _ in micro], [statistics for _, statistics in micro], self.device)

    @torch.no_grad()
    def exportable(self) -> Drafter | None:
        """The drafter to export, on the CPU: of the averaged weights where the run keeps an average. Rank 0 gets it, the
        others None."""
        config = self.drafter.config
        weights = dict(self.drafter.named_parameters()) if self.ema is None else self.ema.tensors
        drafter = Drafter(config, self.drafter.draft_ids.cpu()) if self.group.rank == 0 else None
        for name in config.parameter_shapes():
            weight = whole(weights[name])
            if drafter is not None:
                drafter.get_parameter(name).copy_(weight)
        return drafter

    @torch.no_grad()
    def restart(self, drafter: Drafter | None) -> None:
        """Go on from a drafter of the same shape and vocabulary, which rank 0 gives and the others get; what optimizer and
        average remember is forgotten, the count of steps is not. A drafter that ranks share in parts (fsdp) stays as it is."""
        if self.sharded:
            return
        if drafter is not None:
            for name, weight in self.drafter.named_parameters():
                weight.copy_(drafter.get_parameter(name))
        self.group.same_weights(self.drafter)
        self.optimizers = make_optimizers(self.drafter, self.options)
        self.ema = Ema(self.drafter, self.options.ema) if self.options.ema else None

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
