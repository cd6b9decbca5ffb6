"""The attention of attention.py by FlexAttention, for GPUs: no score matrix exists, whatever a document's length.

The step-0 keys go through one FlexAttention call, the row's own keys are merged in by its log-sum-exp. Backward runs the
merged forward again under autograd.
"""

from functools import cache

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

from torchspec_lite.attention import OWN
from torchspec_lite.batch import Rows


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor,
           own_values: torch.Tensor, rows: Rows, compile: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention.attend."""
    heads, count, group, width = queries.shape
    call = _compiled() if compile else flex_attention
    shared, aux = call(queries.transpose(1, 2).reshape(1, heads * group, count, width), keys[None], values[None],
                       block_mask=_mask(rows, keys.shape[1]), enable_gqa=True, return_aux=AuxRequest(lse=True))
    shared = shared.view(heads, group, count, width).transpose(1, 2).float()  # [nkv, R, G, hd]
    lse = aux.lse.view(heads, group, count).transpose(1, 2).float()         # [nkv, R, G]
    own = (queries.float() * own_keys[OWN:, :, :, None].float()).sum(-1) * width**-0.5  # [k, nkv, R, G]
    total = torch.cat([lse[None], own]).logsumexp(0)
    out = (lse - total).exp()[..., None] * shared
    out = out + ((own - total).exp()[..., None] * own_values[OWN:, :, :, None].float()).sum(0)
    return out.to(queries.dtype), total


def attend_backward(gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor,
                    keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor,
                    rows: Rows, key_gradient: torch.Tensor, value_gradient: torch.Tensor,
                    compile: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As attention.attend_backward."""
    inputs = [part.detach().requires_grad_() for part in (queries, keys, values, own_keys, own_values)]
    with torch.enable_grad():
        again, _ = attend(*inputs, rows, compile)
    by_query, by_key, by_value, by_own_key, by_own_value = torch.autograd.grad(again, inputs, gradient)
    key_gradient += by_key
    value_gradient += by_value
    return by_query, by_own_key.float(), by_own_value.float()


@cache
def _compiled():
    return torch.compile(flex_attention, dynamic=True)


_masks = WeakTensorKeyDictionary()


def _mask(rows: Rows, keys: int) -> BlockMask:
    """Which keys each row sees, worked out once for a step's rows."""
    if rows.limits not in _masks:
        firsts, limits = rows.firsts, rows.limits

        def seen(batch, head, row, key):
            return (key >= firsts[row]) & (key <= limits[row])

        # The closure holds copies, or the dictionary would keep its own keys alive.
        firsts, limits = firsts.clone(), limits.clone()
        _masks[rows.limits] = create_block_mask(seen, None, None, len(limits), keys, device=limits.device)
    return _masks[rows.limits]
