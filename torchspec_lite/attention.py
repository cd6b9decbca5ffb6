"""Attention of one unrolled step: causal over the step-0 keys of a document, plus the row's own keys of later steps.

Layouts: queries and outputs [nkv, R, G, hd] with G query heads for each key head, keys and values [nkv, rows, hd].
Scores exist for one block of rows at a time, backward recomputes them from the log-sum-exp, so memory is linear in
the document's length. All softmax arithmetic is fp32.
"""

import torch

from torchspec_lite.batch import Rows
from torchspec_lite.compiling import piece

OWN = 2  # unused places before the own keys, so that a compiled piece never meets the sizes 0 and 1, which it would single out


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor,
           own_values: torch.Tensor, rows: Rows, compile: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output [nkv, R, G, hd] and log-sum-exp of the scores [nkv, R, G] fp32.

    queries [nkv, R, G, hd]; keys, values [nkv, Tk, hd] of step 0; own_keys, own_values [OWN + k, nkv, R, hd]: those of
    steps 1..k behind OWN unused ones.
    """
    heads, count, group, width = queries.shape
    out, lse = torch.empty_like(queries), queries.new_empty(heads, count, group, dtype=torch.float32)
    for a, b, c, d in rows.blocks:
        q = queries[:, a:b].reshape(heads, -1, width)                      # [nkv, r * G, hd]
        scores = torch.bmm(q, keys[:, c:d].transpose(1, 2)).view(heads, b - a, group, d - c)
        weights, own, lse[:, a:b] = piece(merged_softmax, compile)(
            scores, queries[:, a:b], own_keys[:, :, a:b], rows.firsts[a:b] - c, rows.limits[a:b] - c, OWN)
        shared = torch.bmm(weights.flatten(1, 2), values[:, c:d]).view(heads, b - a, group, width)
        out[:, a:b] = piece(add_own_values, compile)(shared, own, own_values[:, :, a:b], OWN)
    return out, lse


def attend_backward(gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor,
                    keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor,
                    rows: Rows, key_gradient: torch.Tensor, value_gradient: torch.Tensor,
                    compile: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, own_keys and own_values, in their shapes; those of step-0 keys and values are added to
    `key_gradient` and `value_gradient` [nkv, Tk, hd] fp32. Other arguments as given to and got from `attend`."""
    heads, _, group, width = queries.shape
    query_gradient, delta, own_key_gradient, own_value_gradient = piece(own_backward, compile)(
        gradient, out, lse, queries, own_keys, own_values, OWN)
    for a, b, c, d in rows.blocks:
        q, g = queries[:, a:b].reshape(heads, -1, width), gradient[:, a:b].reshape(heads, -1, width)
        shape = heads, b - a, group, d - c
        scores = torch.bmm(q, keys[:, c:d].transpose(1, 2)).view(shape)
        slopes = torch.bmm(g, values[:, c:d].transpose(1, 2)).view(shape)
        weights, slopes = piece(softmax_backward, compile)(
            scores, slopes, lse[:, a:b], delta[:, a:b], rows.firsts[a:b] - c, rows.limits[a:b] - c, width)
        weights, slopes = weights.flatten(1, 2), slopes.flatten(1, 2)       # [nkv, r * G, d - c]
        query_gradient[:, a:b] += torch.bmm(slopes, keys[:, c:d]).view(heads, b - a, group, width)
        key_gradient[:, c:d] += torch.bmm(slopes.transpose(1, 2), q)
        value_gradient[:, c:d] += torch.bmm(weights.transpose(1, 2), g)
    return query_gradient.to(queries.dtype), own_key_gradient, own_value_gradient


def _seen(scores, firsts, limits):
    """Bool [r, 1, S]: the keys of its own document that a row sees."""
    columns = torch.arange(scores.shape[-1], device=scores.device)
    return (columns >= firsts[:, None, None]) & (columns <= limits[:, None, None])


def _used(own, unused):
    """Bool [unused + k, 1, 1, 1]: the own keys that exist."""
    return torch.arange(own.shape[0], device=own.device)[:, None, None, None] >= unused


def merged_softmax(scores, queries, own_keys, firsts, limits, unused):
    """Softmax over scores [nkv, r, G, S] within each row's keys [firsts, limits] and over the own keys' scores, as one.

    queries [nkv, r, G, hd], own_keys [OWN + k, nkv, r, hd]. Returns weights like scores, own weights [OWN + k, nkv, r, G]
    fp32 and the log-sum-exp [nkv, r, G] fp32.
    """
    scale = queries.shape[-1] ** -0.5
    wide = torch.where(_seen(scores, firsts, limits), scores.float() * scale, -torch.inf)
    own = (queries.float() * own_keys.float()[:, :, :, None]).sum(-1) * scale
    own = torch.where(_used(own, unused), own, -torch.inf)
    top = torch.maximum(wide.amax(-1), own.amax(0))
    exponents, own = (wide - top[..., None]).exp(), (own - top).exp()
    total = exponents.sum(-1) + own.sum(0)
    return (exponents / total[..., None]).to(scores.dtype), own / total, top + total.log()


def add_own_values(shared, own, own_values, unused):
    """shared [nkv, r, G, hd] plus own weights [OWN + k, nkv, r, G] times own values [OWN + k, nkv, r, hd]."""
    return (shared.float() + (own[..., None] * own_values.float()[:, :, :, None]).sum(0)).to(shared.dtype)


def own_backward(gradient, out, lse, queries, own_keys, own_values, unused):
    """The own keys' part of the queries' gradient (fp32), delta = gradient · out [nkv, R, G] fp32, and the gradients of
    own keys and own values."""
    scale = queries.shape[-1] ** -0.5
    g, q = gradient.float(), queries.float()
    delta = (g * out.float()).sum(-1)
    keys, values = own_keys.float()[:, :, :, None], own_values.float()[:, :, :, None]  # [OWN + k, nkv, R, 1, hd]
    own = (q * keys).sum(-1) * scale
    weights = torch.where(_used(own, unused), (own - lse).exp(), 0.0)               # [OWN + k, nkv, R, G]
    slopes = weights * ((g * values).sum(-1) - delta) * scale
    return ((slopes[..., None] * keys).sum(0), delta, (slopes[..., None] * q).sum(-2), (weights[..., None] * g).sum(-2))


def softmax_backward(scores, slopes, lse, delta, firsts, limits, width):
    """Weights and gradients of unscaled scores, both like scores [nkv, r, G, S]; slopes = gradient · values."""
    scale = width ** -0.5
    weights = torch.where(_seen(scores, firsts, limits), (scores.float() * scale - lse[..., None]).exp(), 0.0)
    return weights.to(scores.dtype), (weights * (slopes.float() - delta[..., None]) * scale).to(scores.dtype)
