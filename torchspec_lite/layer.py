"""The elementwise pieces of the drafter's layer and their gradients; reductions and RoPE in fp32.

Each is a plain function of tensors, so that it can be compiled alone; none records gradients.
"""

import torch


def unit_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square along the last dimension (RMSNorm without a weight)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm. x [R, H], weight [H] fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_norm(x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, eps: float):
    """The residual stream x + branch [R, H], and its RMSNorm."""
    total = x.float() + branch.float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight
    return total.to(x.dtype), normed.to(x.dtype)


def norm_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, around: torch.Tensor):
    """Gradient of the weight [H] fp32; gradient of x [R, H] through its RMSNorm plus `around`, what reaches x past it."""
    wide, slope = x.float(), gradient.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * inverse
    weighted = slope * weight
    inner = inverse * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
    return (slope * unit).sum(0), (inner + around.float()).to(x.dtype)


def split_rotate(qkv: torch.Tensor, embedded: torch.Tensor, places: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                 kv_heads: int):
    """Queries [nkv, R, G, hd], keys and values [nkv, R, hd] of qkv [R, C] plus embedded[places] [R, C].

    cos, sin [R, hd / 2] fp32; RoPE rotates halves (neox style).
    """
    half = cos.shape[-1]
    total = (qkv.float() + embedded[places].float()).view(len(qkv), -1, 2 * half)  # [R, heads, hd]
    turned = total[:, :-kv_heads]
    first, second = turned[..., :half], turned[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(qkv.dtype)
    queries = turned[:, :-kv_heads].reshape(len(qkv), kv_heads, -1, 2 * half).transpose(0, 1).contiguous()
    return (queries, turned[:, -kv_heads:].transpose(0, 1).contiguous(),
            total[:, -kv_heads:].to(qkv.dtype).transpose(0, 1).contiguous())


def split_rotate_backward(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor,
                          sin: torch.Tensor) -> torch.Tensor:
    """Gradient of qkv [R, C] in the queries' dtype, from those of what `split_rotate` returned (keys, values fp32)."""
    half, rows = cos.shape[-1], queries.shape[1]
    turned = torch.cat([queries.float().transpose(0, 1).flatten(1, 2), keys.float().transpose(0, 1)], 1)
    first, second = turned[..., :half], turned[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    straight = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
    return torch.cat([straight, values.float().transpose(0, 1)], 1).reshape(rows, -1).to(queries.dtype)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. gate_up [R, 2 I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gated_backward(gradient: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Gradient of gate_up [R, 2 I] from that of `gated` [R, I]."""
    gate, up = gate_up.float().chunk(2, -1)
    slope = gradient.float()
    open = torch.sigmoid(gate)
    by_gate = slope * up * open * (1 + gate * (1 - open))
    return torch.cat([by_gate, slope * gate * open], -1).to(gate_up.dtype)
