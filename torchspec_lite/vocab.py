"""The draft vocabulary: which of the target's tokens a drafter may propose, and the maps between the two numberings."""

from collections.abc import Iterable

import torch

from torchspec_lite.errors import UserError


def choose_draft_vocab(written: torch.Tensor, prompt: torch.Tensor, size: int | None,
                       always: Iterable[int] = ()) -> torch.Tensor:
    """Target ids of the draft vocabulary, ascending, [D] int64.

    `written` [V] and `prompt` [V] int64 count tokens in the target's answers and in prompts. `always` (end of
    sequence, end of turn and other special tokens) are in whatever their counts; then the most written, ties by
    the prompts' count, then by the lower id (in BPE vocabularies the more common token), so the same counts give the
    same vocabulary anywhere. `size` None or V and more: every id. Raises UserError when `always` alone exceeds `size`
    or names an id outside the vocabulary.
    """
    vocab = len(written)
    if len(prompt) != vocab:
        raise ValueError(f"counts of {vocab} written and {len(prompt)} prompt tokens: one target has one vocabulary")
    if size is None or size >= vocab:
        return torch.arange(vocab)
    special = sorted(set(always))
    if special and not 0 <= special[0] <= special[-1] < vocab:
        raise UserError(f"special tokens {special[0]}…{special[-1]} lie outside the target's vocabulary of {vocab}; "
                        "does the tokenizer belong to the target?")
    if len(special) > size:
        raise UserError(f"drafter.draft_vocab_size {size} cannot hold the {len(special)} special tokens that are "
                        "always in; raise it")
    is_special = torch.zeros(vocab, dtype=torch.int64)
    is_special[special] = 1
    # Stable sorts from the least to the most important key; ids start in order.
    order = torch.arange(vocab)
    for key in (prompt, written, is_special):
        order = order[torch.sort(key[order], descending=True, stable=True).indices]
    return order[:size].sort().values


def coverage(written: torch.Tensor, draft_ids: torch.Tensor) -> float:
    """Share of written tokens (counts [V]) that the draft vocabulary can propose; 0.0 when nothing was written."""
    total = int(written.sum())
    return int(written[draft_ids].sum()) / total if total else 0.0


def offsets(draft_ids: torch.Tensor) -> torch.Tensor:
    """d2t [D] int64 as vLLM reads it: target id = i + d2t[i]."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def membership(draft_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """t2d [V] bool: whether a target id is in the draft vocabulary."""
    inside = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    inside[draft_ids] = True
    return inside


def target_ids(d2t: torch.Tensor, vocab_size: int, t2d: torch.Tensor | None, place: str) -> torch.Tensor:
    """draft_ids [D] from a file's d2t, checked. `place` names the file in errors.

    Raises UserError when the map leaves the vocabulary, sends two draft ids to one token, disagrees with `t2d`
    or was written as absolute ids, which other tools' files sometimes hold.
    """
    if d2t.dtype != torch.int64 or d2t.dim() != 1:
        raise UserError(f"{place}: d2t is {d2t.dtype} {list(d2t.shape)}; int64 offsets [draft_vocab_size] are needed")
    ids = d2t + torch.arange(len(d2t))
    fits = bool(((ids >= 0) & (ids < vocab_size)).all()) and len(ids.unique()) == len(ids)
    agrees = t2d is None or (fits and torch.equal(membership(ids, vocab_size), t2d.bool()))
    if fits and agrees:
        return ids
    inside = bool(((d2t >= 0) & (d2t < vocab_size)).all())
    absolute = inside and len(d2t.unique()) == len(d2t) and (
        t2d is None or torch.equal(membership(d2t, vocab_size), t2d.bool()))
    if absolute:
        raise UserError(f"{place}: d2t holds absolute target ids; offsets (target = i + d2t[i]) are needed")
    raise UserError(f"{place}: d2t does not map {len(d2t)} draft ids to different ones of {vocab_size} target ids"
                    + ("" if t2d is None else " as t2d says"))
