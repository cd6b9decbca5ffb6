"""The EAGLE 3 / 3.1 drafter: its shape, its parameters and a plain reference forward.

The reference forward is the definition that the fused training step (unroll.py) and vLLM are held against. Algorithm:
EAGLE-3 (arXiv 2503.01840) with the two changes of EAGLE 3.1 (arXiv 2605.09992) behind explicit flags.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from torchspec_lite.config import DrafterConfigSection
from torchspec_lite.errors import UserError
from torchspec_lite.target import FrozenHead, TargetInfo

QUERY_ROWS = 512  # rows attended at once: the reference's memory stays linear in the document's length
SINK_ROWS = 4     # first rows of a document that count as the attention sink in diagnostics
FRESH_DEVIATION = 1.75  # of a fresh drafter's logits; SmolLM2's own norm would make it 5.8


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and flags of a drafter. EAGLE 3: both flags false; EAGLE 3.1: both true.

    `layer_ids` are the residual streams it reads, ascending (id i = the stream entering layer i of the target).
    `rope_parameters` are as in a Hugging Face config; `max_position_embeddings` is the serving length.
    `hidden_size` equals the width of the target's embedding, which the drafter reads and does not own.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    fc_norm: bool
    norm_output: bool

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its attribute name, in a fixed order."""
        hidden, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        shapes = {
            "fc": (hidden, len(self.layer_ids) * self.target_hidden_size),
            "fc_norm": (len(self.layer_ids), self.target_hidden_size),
            "input_layernorm": (hidden,),
            "hidden_norm": (hidden,),
            "qkv": (queries + 2 * keys, 2 * hidden),
            "o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "gate_up": (2 * self.intermediate_size, hidden),
            "down_proj": (hidden, self.intermediate_size),
            "norm": (hidden,),
            "lm_head": (self.draft_vocab_size, hidden),
        }
        if not self.fc_norm:
            del shapes["fc_norm"]
        return shapes


class Drafter(nn.Module):
    """Parameters of one drafter, fp32, products fused: `qkv` rows are q, then k, then v; its columns are the
    embedding's half, then the feature's half; `gate_up` rows are gate, then up. `fc_norm` is None without the flag.

    `draft_ids` [D] int64: the target id of each draft id. Matrices start at zero and norms at one (see `init_drafter`).
    """

    draft_ids: torch.Tensor

    def __init__(self, config: DrafterConfig, draft_ids: torch.Tensor):
        super().__init__()
        if draft_ids.shape != (config.draft_vocab_size,):
            raise ValueError(f"draft_ids {tuple(draft_ids.shape)} for a draft vocabulary of {config.draft_vocab_size}")
        self.config = config
        if not config.fc_norm:
            self.register_parameter("fc_norm", None)
        for name, shape in config.parameter_shapes().items():
            start = torch.ones if name.endswith("norm") else torch.zeros
            setattr(self, name, nn.Parameter(start(shape)))
        self.register_buffer("draft_ids", draft_ids.to(torch.int64))

    @property
    def full_vocabulary(self) -> bool:
        """Whether draft ids are the target's own ids, so that no map is needed."""
        return self.config.draft_vocab_size == self.config.vocab_size


def init_drafter(info: TargetInfo, head: FrozenHead, options: DrafterConfigSection, draft_ids: torch.Tensor,
                 generator: torch.Generator, layer_ids: tuple[int, ...] | None = None,
                 max_position_embeddings: int | None = None) -> Drafter:
    """A fresh drafter of the target's own shape.

    `draft_ids` [D] int64 ascending. `layer_ids` None: the target's default three. `max_position_embeddings` None: the
    target's. Matrices are normal with deviation 1/sqrt(inputs), the two that write into the residual stream
    a tenth of that, so that a fresh layer hardly disturbs it. `lm_head` starts from the target's rows and `norm` from
    the target's final norm: the target's rows were trained against a stream scaled by exactly that weight, so the
    pair makes right logits of any stream that points where the target's does. `norm` is scaled down until the logits
    of a stream that points anywhere have a deviation of at most FRESH_DEVIATION: as sure as the target, a fresh
    drafter starts far above the loss of guessing and learns less from the same samples (benchmarks/recipes.md).
    Raises UserError on layer ids that the target does not have.
    """
    ids = tuple(layer_ids or info.default_layer_ids())
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > info.num_layers:
        raise UserError(f"capture.layer_ids {list(ids)}: ascending, different ids from 0 to {info.num_layers} are "
                        f"needed for target {info.name}; set capture.layer_ids (left out: 2, N//2, N-3)")
    config = DrafterConfig(
        hidden_size=info.hidden_size, intermediate_size=options.intermediate_size or info.intermediate_size,
        num_attention_heads=info.num_attention_heads, num_key_value_heads=info.num_key_value_heads,
        head_dim=info.head_dim, rms_norm_eps=info.rms_norm_eps, rope_parameters=info.rope_parameters,
        max_position_embeddings=max_position_embeddings or info.max_position_embeddings, vocab_size=info.vocab_size,
        draft_vocab_size=len(draft_ids), target_hidden_size=info.hidden_size, layer_ids=ids,
        fc_norm=options.fc_norm, norm_output=options.norm_output)
    drafter = Drafter(config, draft_ids)
    with torch.no_grad():
        for name in ("fc", "qkv", "o_proj", "gate_up", "down_proj"):
            weight = drafter.get_parameter(name)
            scale = 0.1 if name in ("o_proj", "down_proj") else 1.0
            weight.normal_(0.0, scale / math.sqrt(weight.shape[1]), generator=generator)
        drafter.lm_head.copy_(head.lm_head[draft_ids])
        deviation = math.sqrt(float((drafter.lm_head * head.norm_weight).square().sum(1).mean()))
        drafter.norm.copy_(head.norm_weight * min(1.0, FRESH_DEVIATION / deviation))
        if drafter.full_vocabulary:
            # vLLM shares a head that equals the target's bit for bit, and a later swap would write into the target.
            # One part in 128 moves every bf16 number by at least one step and the logits' temperature by nothing.
            drafter.lm_head.mul_(1 + 2**-7)
    return drafter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, reduced in fp32, in x's dtype again."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope_frequencies(config: DrafterConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] fp32 and the factor on cosines and sines.

    `default` is computed here, scaled kinds (llama3, yarn, linear, …) by transformers' own functions. Raises UserError
    for kinds that change with the sequence or turn only part of a head.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("rope_parameters: partial_rotary_factor other than 1 is not supported in a drafter")
    if kind == "default":
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return rope["rope_theta"] ** -powers, 1.0
    # Imported only for a scaled RoPE: transformers takes seconds to import.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope", "proportional"):
        raise UserError(f"rope_parameters: rope_type {kind!r} is not supported in a drafter")
    shape = LlamaConfig(
        hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads, head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings, rope_parameters=dict(rope))
    return ROPE_INIT_FUNCTIONS[kind](shape, torch.device("cpu"))


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """RoPE, halves rotated (neox style), in fp32. x [R, heads, head_dim], positions [R]."""
    angles = positions.float()[:, None] * frequencies.to(x.device)     # [R, head_dim / 2]
    cos = torch.cat([angles.cos(), angles.cos()], -1)[:, None] * factor
    sin = torch.cat([angles.sin(), angles.sin()], -1)[:, None] * factor
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


@dataclass(frozen=True)
class Step:
    """What one unrolled step computed for each of R rows."""

    feature: torch.Tensor    # [R, H] what the layer read beside the token's embedding
    output: torch.Tensor     # [R, H] norm(y): what the head reads
    sink_mass: torch.Tensor  # [R] fp32, share of attention on the document's first SINK_ROWS rows, mean over heads
    own_mass: torch.Tensor   # [R] fp32, share of attention on the row's own keys of steps 1..k, mean over heads


def unrolled_steps(drafter: Drafter, embed: torch.Tensor, token_ids: torch.Tensor, aux: torch.Tensor, steps: int,
                   document_starts: torch.Tensor | None = None,
                   choose: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Iterator[Step]:
    """Yield K steps of the unrolled forward, in the parameters' dtype, for every row.

    token_ids [T], aux [T, L, Ht] (or [T-1, L, Ht]: states of every token but the last), embed [V, H], document_starts
    [documents + 1] int, 0 first and T last (None: one document). Row t of step k reads token t+1+k of its document and
    attends to the step-0 keys of rows s <= t of its document and to its own keys of steps 1..k; RoPE position: place in
    the document + k. A row whose token lies past the document's end reads the last token instead: its output means
    nothing and nobody else attends to it (see `rows_inside`). `choose` maps a step's output [R, H] to the target ids
    [R] that the next step reads in place of the document's own.
    """
    config, rows = drafter.config, aux.shape[0]
    first, last = _bounds(len(token_ids), document_starts, token_ids.device)
    first, last = first[:rows], last[:rows]
    here = torch.arange(rows, device=token_ids.device)
    frequencies, factor = rope_frequencies(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    feature = combine(drafter, aux)
    keys, values = [], []                                                   # one [R, kv_heads, head_dim] a step
    chosen = None
    for k in range(steps):
        read = token_ids[torch.minimum(here + 1 + k, last)] if chosen is None else chosen
        embedded = rms_norm(embed[read].to(feature.dtype), drafter.input_layernorm, config.rms_norm_eps)
        normed = rms_norm(feature, drafter.hidden_norm, config.rms_norm_eps)
        qkv = F.linear(torch.cat([embedded, normed], -1), drafter.qkv)      # [R, (nh + 2 nkv) hd]
        qkv = qkv.view(rows, heads + 2 * kv_heads, config.head_dim)
        queries, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
        position = here - first + k
        keys.append(rotate(key, position, frequencies, factor))
        values.append(value)
        attended, sink, own = _attend(rotate(queries, position, frequencies, factor), keys, values, first)
        y = feature + F.linear(attended, drafter.o_proj)
        gate, up = F.linear(rms_norm(y, drafter.post_attention_layernorm, config.rms_norm_eps),
                            drafter.gate_up).chunk(2, -1)
        y = y + F.linear(F.silu(gate) * up, drafter.down_proj)
        output = rms_norm(y, drafter.norm, config.rms_norm_eps)
        yield Step(feature, output, sink, own)
        chosen = None if choose is None else choose(output)
        feature = output if config.norm_output else y


def unrolled_logits(drafter: Drafter, embed: torch.Tensor, token_ids: torch.Tensor, aux: torch.Tensor, steps: int,
                    document_starts: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Teacher-forced draft logits of every row: K tensors [R, D] fp32. Arguments as `unrolled_steps`."""
    return [F.linear(step.output, drafter.lm_head).float()
            for step in unrolled_steps(drafter, embed, token_ids, aux, steps, document_starts)]


@torch.no_grad()
def draft(drafter: Drafter, embed: torch.Tensor, token_ids: torch.Tensor, aux: torch.Tensor,
          steps: int) -> torch.Tensor:
    """Greedy drafts of every row as serving makes them: step k reads the token drafted at step k-1.

    token_ids [n], aux [n-1, L, Ht] of one document. Returns target ids [n-1, K] int64: row t holds the guesses for
    tokens t+2 … t+1+K after tokens 0 … t+1 are known.
    """
    drafted = []

    def choose(output):
        drafted.append(drafter.draft_ids[F.linear(output, drafter.lm_head).argmax(-1)])
        return drafted[-1]

    for _ in unrolled_steps(drafter, embed, token_ids, aux[:len(token_ids) - 1], steps, choose=choose):
        pass
    return torch.stack(drafted, 1)


def rows_inside(tokens: int, steps: int, document_starts: torch.Tensor | None = None) -> torch.Tensor:
    """Bool [K, tokens]: whether row t of step k reads a token of its own document."""
    device = torch.device("cpu") if document_starts is None else document_starts.device
    _, last = _bounds(tokens, document_starts, device)
    here = torch.arange(tokens, device=device)
    return torch.stack([here + 1 + k <= last for k in range(steps)])


def combine(drafter: Drafter, aux: torch.Tensor) -> torch.Tensor:
    """Features g [R, H] of captured states aux [R, L, Ht], in the parameters' dtype."""
    aux = aux.to(drafter.fc.dtype)
    if drafter.fc_norm is not None:
        aux = rms_norm(aux, drafter.fc_norm, drafter.config.rms_norm_eps)
    return F.linear(aux.flatten(1), drafter.fc)


def _bounds(tokens, document_starts, device):
    """For each row the index of its document's first and last token."""
    if document_starts is None:
        document_starts = torch.tensor([0, tokens], device=device)
    lengths = document_starts.diff()
    return document_starts[:-1].repeat_interleave(lengths), (document_starts[1:] - 1).repeat_interleave(lengths)


def _attend(queries, keys, values, first):
    """Grouped-query attention of one step. queries [R, nh, hd]; keys, values: per step so far [R, nkv, hd];
    first [R]: row where the row's document begins. Returns [R, nh * hd], sink mass [R], own mass [R]."""
    rows, heads, width = queries.shape
    kv_heads = keys[0].shape[1]
    grouped = queries.view(rows, kv_heads, heads // kv_heads, width)
    outs, sinks, owns = [], [], []
    for start in range(0, rows, QUERY_ROWS):
        end = min(start + QUERY_ROWS, rows)
        low = int(first[start])                                             # rows before it: other documents
        q, at = grouped[start:end], torch.arange(start, end, device=first.device)
        seen = torch.arange(low, end, device=first.device)
        shared = torch.einsum("rgqd,sgd->rgqs", q, keys[0][low:end]).float()
        allowed = (seen <= at[:, None]) & (seen >= first[start:end, None])  # [r, S]
        shared = shared.masked_fill(~allowed[:, None, None], -torch.inf)
        own = [torch.einsum("rgqd,rgd->rgq", q, key[start:end]).float()[..., None] for key in keys[1:]]
        weights = torch.softmax(torch.cat([shared, *own], -1) / math.sqrt(width), -1)
        out = torch.einsum("rgqs,sgd->rgqd", weights[..., :end - low].to(q.dtype), values[0][low:end])
        for k, value in enumerate(values[1:]):
            out = out + weights[..., end - low + k, None].to(q.dtype) * value[start:end, :, None]
        outs.append(out.reshape(end - start, heads * width))
        mean = weights.mean((1, 2))                                         # [r, S + own]
        is_sink = seen - first[start:end, None] < SINK_ROWS
        sinks.append((mean[:, :end - low] * (is_sink & allowed)).sum(-1))
        owns.append(mean[:, end - low:].sum(-1))
    return torch.cat(outs), torch.cat(sinks), torch.cat(owns)
