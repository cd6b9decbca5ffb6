"""The same loss in straightforward PyTorch, as drafter trainers write it: what the fast training step is measured against.

One padded batch, every row through every step, separate products for q, k, v, gate and up, a score matrix for each step,
logits of all rows and steps kept for autograd, and the target's full vocabulary computed for all rows at each step.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from torchspec_lite.drafter import Drafter, rms_norm, rope_frequencies, rotate
from torchspec_lite.target import FrozenHead


class PlainDrafter(nn.Module):
    """An EAGLE 3.1 drafter with one matrix for each projection, in the dtype given."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype):
        super().__init__()
        config = drafter.config
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config, self.draft_ids = config, drafter.draft_ids
        matrices = dict(zip(("q", "k", "v"), drafter.qkv.split([heads * width, kv_heads * width, kv_heads * width]),
                            strict=True))
        matrices |= dict(zip(("gate", "up"), drafter.gate_up.chunk(2), strict=True))
        matrices |= {name: drafter.get_parameter(name) for name in config.parameter_shapes()
                     if name not in ("qkv", "gate_up")}
        self.weights = nn.ParameterDict({name: nn.Parameter(value.detach().to(dtype).clone())
                                         for name, value in matrices.items()})

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients under the fused drafter's names, fp32."""
        found = {name: weight.grad.float() for name, weight in self.weights.items()}
        found["qkv"] = torch.cat([found.pop(name) for name in ("q", "k", "v")])
        found["gate_up"] = torch.cat([found.pop(name) for name in ("gate", "up")])
        return found


def plain_loss(model: PlainDrafter, head: FrozenHead, token_ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor,
               last: torch.Tensor, steps: int, decay: float) -> torch.Tensor:
    """Cross-entropy loss of K steps. token_ids, mask [B, T] (padding: mask 0), aux [B, T, L, Ht], last [B, T, Ht]; row t
    of aux and last holds the states after token t, and the rows of a document's last token and of padding are unused."""
    config, weights = model.config, model.weights
    eps, (size, rows) = config.rms_norm_eps, token_ids.shape
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    dtype = weights["q"].dtype
    with torch.no_grad():
        target = F.linear(rms_norm(last.to(dtype), head.norm_weight, head.norm_eps), head.lm_head.to(dtype))
        p = torch.softmax(target.float(), -1)[..., model.draft_ids]         # [B, T, D]
    states = aux.to(dtype)
    if config.fc_norm:
        states = rms_norm(states, weights["fc_norm"], eps)
    feature = F.linear(states.flatten(2), weights["fc"])                    # [B, T, H]
    frequencies, factor = rope_frequencies(config)
    causal = torch.full((rows, rows), -torch.inf, dtype=dtype).triu(1)
    keys, values, total = [], [], 0.0
    for k in range(steps):
        tokens = F.pad(token_ids[:, 1 + k:], (0, 1 + k))                    # row t reads token t+1+k
        embedded = rms_norm(head.embed_tokens[tokens].to(dtype), weights["input_layernorm"], eps)
        both = torch.cat([embedded, rms_norm(feature, weights["hidden_norm"], eps)], -1)
        position = torch.arange(rows).repeat(size) + k

        def heads_first(name, count, turned):
            x = F.linear(both, weights[name]).view(size * rows, count, width)
            x = rotate(x, position, frequencies, factor) if turned else x
            x = x.view(size, rows, count, width).transpose(1, 2)            # [B, heads, T, hd]
            return x if count == heads else x.repeat_interleave(heads // kv_heads, 1)

        queries = heads_first("q", heads, True)
        keys.append(heads_first("k", kv_heads, True))
        values.append(heads_first("v", kv_heads, False))
        scores = queries @ keys[0].transpose(2, 3) / math.sqrt(width) + causal  # [B, heads, T, T]
        for key in keys[1:]:
            scores = torch.cat([scores, (queries * key).sum(-1, keepdim=True) / math.sqrt(width)], -1)
        shares = torch.softmax(scores, -1, dtype=torch.float32).to(dtype)
        attended = shares[..., :rows] @ values[0]
        for number, value in enumerate(values[1:]):
            attended = attended + shares[..., rows + number, None] * value
        y = feature + F.linear(attended.transpose(1, 2).flatten(2), weights["o_proj"])
        inner = rms_norm(y, weights["post_attention_layernorm"], eps)
        y = y + F.linear(F.silu(F.linear(inner, weights["gate"])) * F.linear(inner, weights["up"]), weights["down_proj"])
        output = rms_norm(y, weights["norm"], eps)
        logits = F.linear(output, weights["lm_head"]).float()               # [B, T, D]
        answer = F.pad(mask.bool(), (0, k + 3))
        places = answer[:, 1:1 + rows] & answer[:, 1 + k:1 + k + rows] & answer[:, 2 + k:2 + k + rows]
        wanted = F.pad(p[:, 1 + k:], (0, 0, 0, 1 + k))                      # of token t+2+k
        losses = -(wanted * torch.log_softmax(logits, -1)).sum(-1)
        total = total + decay**k * (losses * places).sum() / places.sum().clamp_min(1)
        feature = output if config.norm_output else y
    return total


class PlainTrainer:
    """fp32 weights and AdamW beside the model's own, as peers train in bf16; the same weights when the model is fp32."""

    def __init__(self, model: PlainDrafter):
        self.model = model
        self.masters = [nn.Parameter(weight.detach().float()) for weight in model.weights.values()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4)

    def step(self, *inputs) -> float:
        loss = plain_loss(self.model, *inputs)
        loss.backward()
        for master, weight in zip(self.masters, self.model.weights.values(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.model.weights.values(), strict=True):
                weight.copy_(master)
        return float(loss.detach())
