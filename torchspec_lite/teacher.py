"""What the trainer needs of the frozen target's next-token distribution."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from torchspec_lite.compiling import piece
from torchspec_lite.scratch import scratch
from torchspec_lite.target import FrozenHead

CHUNK_BYTES = 1 << 26  # full-vocabulary logits held at once


@dataclass(frozen=True)
class TeacherStatistics:
    """Of one document's rows, over the target's full vocabulary; zero at rows that no step can supervise."""

    lse: torch.Tensor     # [n - 1] fp32, log-sum-exp of the logits
    argmax: torch.Tensor  # [n - 1] int64, the token the target would say next


@torch.no_grad()
def teacher_statistics(last: torch.Tensor, mask: torch.Tensor, head: FrozenHead,
                       compile: bool = True) -> TeacherStatistics:
    """Read the target's full vocabulary once for a document, at the places where it predicts an answer's token.

    last [n-1, Ht] (before the final norm), mask [n]. Logits are in the head's dtype, one chunk of rows at a time; the
    log-sum-exp is fp32. Keep the result with the sample: it depends on nothing that training changes.
    """
    answer = mask.bool().to(last.device)
    rows = (answer[:-1] & answer[1:]).nonzero().squeeze(1)                  # [J]
    lse = torch.zeros(len(last), device=last.device)
    argmax = torch.zeros(len(last), dtype=torch.int64, device=last.device)
    most = max(16, CHUNK_BYTES // (head.lm_head.shape[0] * head.lm_head.element_size()))
    chunks = -(-len(rows) // most)                                          # alike: a short one reads the head for few rows
    for part in rows.tensor_split(chunks) if chunks else ():
        states = normed(last[part], head, head.lm_head.dtype)
        logits = scratch(len(part), len(head.lm_head), states)              # [C, V]
        torch.mm(states, head.lm_head.t(), out=logits)
        lse[part], argmax[part] = piece(summary, compile)(logits)
    return TeacherStatistics(lse, argmax)


def summary(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp [C] fp32 and first largest place [C] int64 of logits [C, V], in few passes over them."""
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    return (wide - top).exp().sum(-1).log() + top.squeeze(-1), first_largest(wide, top)


def first_largest(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """The place [C] int64 of the first maximum, like argmax; top [C, 1] is the maximum. Vectorises where argmax does not.
    A row with a NaN gives its last place."""
    columns = torch.arange(x.shape[-1], device=x.device, dtype=torch.float32)
    return torch.where(x == top, columns, float(1 << 24)).amin(-1).long().clamp_max(x.shape[-1] - 1)


def normed(last: torch.Tensor, head: FrozenHead, dtype: torch.dtype) -> torch.Tensor:
    """The target's final RMSNorm, reduced in fp32. last [J, Ht]."""
    return F.rms_norm(last.float(), (last.shape[-1],), head.norm_weight.to(last.device), head.norm_eps).to(dtype)


_restricted = WeakTensorKeyDictionary()


def restricted_head(head: FrozenHead, draft_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The target's head rows of the draft vocabulary [D, Ht], gathered once for as long as `draft_ids` lives."""
    known = _restricted.get(draft_ids)
    if known is None or known[0] is not head.lm_head or known[1].dtype != dtype:
        known = head.lm_head, head.lm_head[draft_ids].to(device=draft_ids.device, dtype=dtype)
        _restricted[draft_ids] = known
    return known[1]
