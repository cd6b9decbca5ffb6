"""A run's first drafter: the one of a folder, or a fresh one whose vocabulary the run's first samples decide."""

from collections.abc import Iterable
from pathlib import Path

import torch

from torchspec_lite.chat import load_tokenizer
from torchspec_lite.config import Config
from torchspec_lite.drafter import Drafter, init_drafter
from torchspec_lite.export import load_drafter
from torchspec_lite.sample import Sample
from torchspec_lite.target import FrozenHead, TargetInfo
from torchspec_lite.vocab import choose_draft_vocab, coverage
from workers.group import Group


def given_drafter(config: Config, info: TargetInfo, head: FrozenHead) -> Drafter:
    """`drafter.init_from`'s. Raises UserError when it does not fit the target."""
    return load_drafter(Path(config.drafter.init_from), info, head)


def fresh_drafter(config: Config, info: TargetInfo, head: FrozenHead, layer_ids: tuple[int, ...],
                  vocabulary: torch.Tensor) -> Drafter:
    """The same on every rank. vocabulary [D] int64, from `choose_vocabulary`."""
    generator = torch.Generator().manual_seed(config.trainer.seed)
    return init_drafter(info, head, config.drafter, vocabulary, generator, layer_ids)


def deciding_samples(config: Config) -> int:
    """How many samples, the first in the run's order, decide the draft vocabulary."""
    wanted = config.drafter.vocab_samples
    return min(wanted, config.data.max_prompts or wanted)


def choose_vocabulary(config: Config, info: TargetInfo, samples: Iterable[Sample], group: Group, coordinator) -> torch.Tensor:
    """Target ids [D] int64 of the draft vocabulary, from the tokens of all ranks' `samples` that decide it, in no order that
    matters. Every rank calls it and gets the same."""
    counts, first = torch.zeros(2, info.vocab_size, dtype=torch.int64), deciding_samples(config)  # prompt's, answer's
    for sample in samples:
        if sample.ordinal < first:
            for kind in (0, 1):
                counts[kind] += torch.bincount(sample.token_ids[sample.mask == kind].long(), minlength=info.vocab_size)
    counts = group.sum(counts)
    tokenizer = load_tokenizer(info.path, config.target.trust_remote_code)
    chosen = choose_draft_vocab(counts[1], counts[0], config.drafter.draft_vocab_size,
                                [id for id in tokenizer.all_special_ids if id < info.vocab_size])
    if group.rank == 0:
        coordinator.tell("event", "vocabulary", f"{len(chosen)} draft tokens from {int(counts[1].sum())} written ones, of "
                         f"which they hold {coverage(counts[1], chosen):.1%}")
    return chosen
