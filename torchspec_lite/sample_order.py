"""Which conversations a run learns from and measures on, in its fixed order, and how they come into its ledger."""

from dataclasses import dataclass
from pathlib import Path

from torchspec_lite.config import Config
from torchspec_lite.conversations import Dataset, check_disjoint, resolve_files
from torchspec_lite.errors import UserError
from torchspec_lite.ledger import Ledger


@dataclass(frozen=True)
class SampleOrder:
    """Sample ids; a training sample's place is its index, the held-out ones come behind."""

    train: list[str]
    held_out: list[str]

    def queue(self, path: Path, reuse: int) -> None:
        """Put them into the ledger at `path`, made if there is none; what a resumed run has queued before stays as it is.

        Raises UserError when the ledger is not this run's, another program's, or written by a process that still runs.
        """
        ledger = Ledger(path, reuse=reuse)
        try:
            ledger.add_samples(((id, place) for place, id in enumerate(self.train)), "train")
            ledger.add_samples(((id, len(self.train) + place) for place, id in enumerate(self.held_out)), "held_out")
        finally:
            ledger.close()


def read_order(config: Config, cache: Path) -> SampleOrder:
    """Read the config's conversation files. Raises UserError for one that is missing, or naming a line that is wrong, and
    when there is nothing that a served version could be compared on."""
    data = config.data
    engines = len(config.serve.external) or config.serve.replicas
    if engines == 1 and config.serve.replicas and not data.held_out and not config.traffic.fraction:
        raise UserError("data.held_out is empty, so versions cannot be compared and none after the first would be promoted: "
                        "give a few dozen conversations, or train with serve.replicas=0")
    train = Dataset(resolve_files(data.train, "train", cache))
    held_out = Dataset(resolve_files(data.held_out, "held_out", cache))
    check_disjoint(train, held_out)
    return SampleOrder(train.order(config.seed, data.epochs, data.max_prompts),
                       held_out.order(config.seed, 1, data.held_out_prompts))
