"""Attention of one unrolled step: causal over the step-0 keys of a document, plus the row's own keys of later steps.

Layouts: queries and outputs [nkv, R, G, hd] with G query heads for each key head, keys and values [nkv, rows, hd].
Scores exist for one block of rows at a time, backward recomputes them from the log-sum-exp, so memory is linear in
the document's length. All softmax arithmetic is fp32.
"""

import torch

from torchspec_lite.compiling import piece


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor,
           own_values: torch.Tensor, limits: torch.Tensor, blocks: list[tuple[int, int, int, int]],
           compile: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output [nkv, R, G, hd] and log-sum-exp of the scores [nkv, R, G] fp32.

    queries [nkv, R, G, hd]; keys, values [nkv, Tk, hd] of step 0; own_keys, own_values [k, nkv, R, hd] of steps 1..k;
    limits [R] the last step-0 key that a row sees; blocks (a, b, c, d): rows [a, b) see keys [c, d) up to their limit.
    """
    heads, rows, group, width = queries.shape
    out, lse = torch.empty_like(queries), queries.new_empty(heads, rows, group, dtype=torch.float32)
    for a, b, c, d in blocks:
        q = queries[:, a:b].reshape(heads, -1, width)                      # [nkv, r * G, hd]
        scores = torch.bmm(q, keys[:, c:d].transpose(1, 2)).view(heads, b - a, group, d - c)
        weights, own, lse[:, a:b] = piece(merged_softmax, compile)(
            scores, queries[:, a:b], own_keys[:, :, a:b], limits[a:b] - c)
        shared = torch.bmm(weights.flatten(1, 2), values[:, c:d]).view(heads, b - a, group, width)
        out[:, a:b] = piece(add_own_values, compile)(shared, own, own_values[:, :, a:b])
    return out, lse


def attend_backward(gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor,
                    keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor,
                    limits: torch.Tensor, blocks: list[tuple[int, int, int, int]], key_gradient: torch.Tensor,
                    value_gradient: torch.Tensor, compile: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, own_keys and own_values, in their shapes; those of step-0 keys and values are added to
    `key_gradient` and `value_gradient` [nkv, Tk, hd] fp32. Other arguments as given to and got from `attend`."""
    heads, _, group, width = queries.shape
    query_gradient, delta, own_key_gradient, own_value_gradient = piece(own_backward, compile)(
        gradient, out, lse, queries, own_keys, own_values)
    for a, b, c, d in blocks:
        q, g = queries[:, a:b].reshape(heads, -1, width), gradient[:, a:b].reshape(heads, -1, width)
        shape = heads, b - a, group, d - c
        scores = torch.bmm(q, keys[:, c:d].transpose(1, 2)).view(shape)
        slopes = torch.bmm(g, values[:, c:d].transpose(1, 2)).view(shape)
        weights, slopes = piece(softmax_backward, compile)(
            scores, slopes, lse[:, a:b], delta[:, a:b], limits[a:b] - c, width)
        weights, slopes = weights.flatten(1, 2), slopes.flatten(1, 2)       # [nkv, r * G, d - c]
        query_gradient[:, a:b] += torch.bmm(slopes, keys[:, c:d]).view(heads, b - a, group, width)
        key_gradient[:, c:d] += torch.bmm(slopes.transpose(1, 2), q)
        value_gradient[:, c:d] += torch.bmm(weights.transpose(1, 2), g)
    return query_gradient.to(queries.dtype), own_key_gradient, own_value_gradient


def merged_softmax(scores, queries, own_keys, limits):
    """Softmax over scores [nkv, r, G, S] up to each row's limit [r] and over the own keys' scores, as one.

    queries [nkv, r, G, hd], own_keys [k, nkv, r, hd]. Returns weights like scores, own weights [k, nkv, r, G] fp32 and
    the log-sum-exp [nkv, r, G] fp32.
    """
    scale = queries.shape[-1] ** -0.5
    allowed = torch.arange(scores.shape[-1], device=scores.device) <= limits[:, None, None]  # [r, 1, S]
    wide = torch.where(allowed, scores.float() * scale, -torch.inf)
    own = (queries.float() * own_keys.float()[:, :, :, None]).sum(-1) * scale  # [k, nkv, r, G]
    top = wide.amax(-1)
    if own.shape[0]:
        top = torch.maximum(top, own.amax(0))
    exponents, own = (wide - top[..., None]).exp(), (own - top).exp()
    total = exponents.sum(-1) + own.sum(0)
    return (exponents / total[..., None]).to(scores.dtype), own / total, top + total.log()


def add_own_values(shared, own, own_values):
    """shared [nkv, r, G, hd] plus own weights [k, nkv, r, G] times own values [k, nkv, r, hd]."""
    return (shared.float() + (own[..., None] * own_values.float()[:, :, :, None]).sum(0)).to(shared.dtype)


def own_backward(gradient, out, lse, queries, own_keys, own_values):
    """The own keys' part of the queries' gradient (fp32), delta = gradient · out [nkv, R, G] fp32, and the gradients of
    own keys and own values."""
    scale = queries.shape[-1] ** -0.5
    g, q = gradient.float(), queries.float()
    delta = (g * out.float()).sum(-1)
    keys, values = own_keys.float()[:, :, :, None], own_values.float()[:, :, :, None]  # [k, nkv, R, 1, hd]
    weights = ((q * keys).sum(-1) * scale - lse).exp()                      # [k, nkv, R, G]
    slopes = weights * ((g * values).sum(-1) - delta) * scale
    return ((slopes[..., None] * keys).sum(0), delta, (slopes[..., None] * q).sum(-2), (weights[..., None] * g).sum(-2))


def softmax_backward(scores, slopes, lse, delta, limits, width):
    """Weights and gradients of unscaled scores, both like scores [nkv, r, G, S]; slopes = gradient · values."""
    scale = width ** -0.5
    allowed = torch.arange(scores.shape[-1], device=scores.device) <= limits[:, None, None]
    weights = torch.where(allowed, (scores.float() * scale - lse[..., None]).exp(), 0.0)
    return weights.to(scores.dtype), (weights * (slopes.float() - delta[..., None]) * scale).to(scores.dtype)
