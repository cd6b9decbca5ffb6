"""What workers tell the coordinator: plain data, ids and numbers only."""

from dataclasses import dataclass, field

from torchspec_lite.parity import ParityProbe
from torchspec_lite.snapshot import Buffer

PHASES = ("wait", "teacher", "forward", "backward", "optimizer", "export", "restore")
"""What a trainer rank's time is counted as: waiting for samples or other ranks, the target's distribution, the drafter's
forward pass with packing, its backward pass with the sum over ranks, the update, checkpoints with drafter versions, and
the checkpoint that a resumed run begins with."""


@dataclass
class TrainerReport:
    """What one trainer rank says after an optimizer step (rank 0 alone knows loss and predictions).

    `phases`: seconds since the run's start by name of PHASES. Sizes in bytes.
    `tokens` counts every pass of every rank; `loss_per_step` has one value for each TTT step.
    """

    rank: int
    step: int = 0
    skipped: int = 0
    tokens: int = 0
    loss: float | None = None
    loss_per_step: list[float] = field(default_factory=list)
    learning_rate: float | None = None
    grad_norm: float | None = None
    predicted_train: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    receiver: Buffer = Buffer()
    reuse: Buffer = Buffer()


@dataclass
class TargetReport:
    """What one target worker says about once a second: totals since its start, and its sender's buffer.

    `waited_s` is the time its sender was held back for want of credit.
    """

    worker: str
    tokens: int = 0
    waited_s: float = 0.0
    sender: Buffer = Buffer()


@dataclass(frozen=True)
class Export:
    """A drafter version that the trainers wrote. Predictions are None without held-out samples.

    `probes` are short held-out texts with what the exported weights draft along them. With served traffic the predictions
    are on the window of present traffic; `serving_walked` and `serving_counts` (`Counts.as_list`) are those of the version that
    served then, `serving_version`, on the same window."""

    version: int
    step: int
    samples: int
    parent: int | None
    directory: str
    predicted_rows: float | None
    predicted_walked: float | None
    per_position: list[float]
    probes: list[ParityProbe]
    serving_walked: float | None = None
    serving_counts: list[int] | None = None
    serving_version: int | None = None


@dataclass(frozen=True)
class PaceReport:
    """What rank 0 sees on its window of served requests: how many, and the predicted acceptance lengths (candidate: the
    trainer's weights, None when only the serving version was looked at)."""

    window: int
    serving: float
    candidate: float | None
    resting: bool
