"""Train/serve parity: do trainer and server draft the same tokens after the same text?"""

from dataclasses import dataclass

import torch

from torchspec_lite.drafter import Drafter, draft
from torchspec_lite.sample import Sample
from torchspec_lite.target import FrozenHead


@dataclass(frozen=True)
class ParityProbe:
    """A held-out text and what the trainer's drafter drafts along it, from the states the target streamed.

    `token_ids` is prompt and answer; `drafted[i]` are the ids drafted once the first `prompt_tokens` + 1 + i tokens are
    known.
    """

    prompt_tokens: int
    token_ids: list[int]
    drafted: list[list[int]]

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[:self.prompt_tokens]

    @property
    def answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


@torch.no_grad()
def make_probe(drafter: Drafter, head: FrozenHead, sample: Sample, steps: int, dtype: torch.dtype) -> ParityProbe:
    """Draft freely along a sample with one answer at its end. `drafter` is of the weights that will be served; it is
    put into `dtype`, the serving engine's."""
    prompt_tokens = int(sample.mask.bool().long().argmax())
    drafted = draft(drafter.to(dtype), head.embed_tokens.to(dtype), sample.token_ids.long(), sample.aux.to(dtype), steps)
    # Row t has read token t + 1, so it drafts when t + 2 tokens are known.
    return ParityProbe(prompt_tokens, sample.token_ids.tolist(), drafted[prompt_tokens - 1:].tolist())


def compare_drafts(probe: ParityProbe, served_tokens: list[int], rounds: list[tuple[int, list[int]]]) -> tuple[int, int]:
    """How many of the server's drafted tokens equal the trainer's, and how many were compared.

    `served_tokens` and `rounds` are as `Replica.probe` returns them: pairs of tokens known and ids drafted. After the
    two texts part (in bf16 the target itself may choose differently at a near-tie) nothing is compared, and of a round
    only the tokens up to and including the first difference count: later ones continue another text.
    """
    common = 0
    for ours, theirs in zip(probe.token_ids, served_tokens):
        if ours != theirs:
            break
        common += 1
    equal = compared = 0
    for known, drafted in rounds:
        place = known - probe.prompt_tokens - 1
        if known > common or not 0 <= place < len(probe.drafted):
            continue
        for ours, theirs in zip(probe.drafted[place], drafted):
            compared += 1
            equal += ours == theirs
            if ours != theirs:
                break
    return equal, compared
