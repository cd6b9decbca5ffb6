"""Training-time test: the loss of K unrolled steps over packed documents, with its gradient (EAGLE-3, arXiv 2503.01840).

The plain definition of the forward is `drafter.unrolled_steps`; here the same numbers are computed for supervised rows
only, and the backward pass is written out, so that a weight's gradient is one product over the rows of all steps, and
logits and score matrices are never kept. bf16 products accumulate in fp32; norms, softmax and loss are fp32.
"""

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from torchspec_lite import attention, attention_flex, layer
from torchspec_lite.attention import OWN
from torchspec_lite.batch import Batch, Plan, plan_rows
from torchspec_lite.compiling import outer, piece_into
from torchspec_lite.drafter import Drafter, rope_frequencies
from torchspec_lite.head_loss import head_loss
from torchspec_lite.target import FrozenHead


class UnrollResult(NamedTuple):
    """What one micro-batch gave. Every tensor but `loss` is a plain sum, to be added over micro-batches and ranks.

    `accepted[k]` counts the rounds in which the drafter's first choices of steps 0..k were all the target's, so the
    greedy acceptance length predicted from training itself is 1 + accepted.sum() / rounds.
    """

    loss: torch.Tensor        # [] fp32: sum over k of decay**k * loss_sums[k] / normaliser[k]; has the gradient
    supervised: torch.Tensor  # [K] int64, supervised places
    loss_sums: torch.Tensor   # [K] fp32, without weights and normaliser
    agreements: torch.Tensor  # [K] int64, supervised places where the drafter's first choice is the target's
    accepted: torch.Tensor    # [K] int64
    rounds: torch.Tensor      # [] int64, rows supervised at step 0


def unroll_loss(drafter: Drafter, head: FrozenHead, batch: Batch, steps: int, decay: float = 0.8,
                loss: str = "cross_entropy", normaliser: torch.Tensor | None = None,
                dtype: torch.dtype = torch.bfloat16, compile: bool = True, recompute: bool = False) -> UnrollResult:
    """Loss of `steps` unrolled steps; `result.loss.backward()` gives fp32 gradients on all of the drafter's parameters.

    `normaliser` [K]: supervised places of the whole optimizer step over all micro-batches and ranks (see
    `supervised_counts`); None: this batch's own. Under DDP, which averages gradients over ranks, pass the global counts
    divided by the number of ranks. A batch without supervised places gives loss 0 and zero gradients. `dtype` is that
    of matrix products. `recompute` keeps less for the backward pass. Without grad mode only the numbers are computed.
    """
    plan = plan_rows(batch.mask, batch.document_starts, steps, device=batch.token_ids.device)
    counts = plan.counts.double() if normaliser is None else normaliser.double().cpu()
    weights = decay ** torch.arange(steps, dtype=torch.float64)
    scales = torch.where(counts > 0, weights / counts.clamp_min(1e-30), 0.0).float()
    run = _Run(drafter, head, batch, plan, scales.to(batch.aux.device), loss, dtype, compile, recompute,
               torch.is_grad_enabled())
    names = list(drafter.config.parameter_shapes())
    value, sums, agreements = _Unroll.apply(run, *(drafter.get_parameter(name) for name in names))
    first = plan.supervised[0].to(agreements.device)
    accepted = (agreements & first).long().cumprod(0).sum(1)
    return UnrollResult(value, plan.counts, sums, agreements.sum(1), accepted, first.sum())


class UnrolledDrafter(nn.Module):
    """`unroll_loss` as a module's forward: what DDP and FSDP2 wrap, since they act around a module's call."""

    def __init__(self, drafter: Drafter, head: FrozenHead, steps: int, decay: float, loss: str, dtype: torch.dtype,
                 compile: bool, recompute: bool):
        super().__init__()
        self.drafter, self.head, self.steps, self.decay, self.loss = drafter, head, steps, decay, loss
        self.dtype, self.compile_pieces, self.recompute = dtype, compile, recompute

    def forward(self, batch: Batch, normaliser: torch.Tensor | None = None) -> UnrollResult:
        return unroll_loss(self.drafter, self.head, batch, self.steps, self.decay, self.loss, normaliser, self.dtype,
                           self.compile_pieces, self.recompute)


@dataclass(frozen=True)
class _Run:
    """Everything of one call that is not a parameter."""

    drafter: Drafter
    head: FrozenHead
    batch: Batch
    plan: Plan
    scales: torch.Tensor  # [K] fp32, decay**k / normaliser[k]
    loss: str
    dtype: torch.dtype
    compile: bool
    recompute: bool
    gradient: bool


class _Unroll(torch.autograd.Function):
    """Forward of all steps and the head with its gradients; backward of the steps."""

    @staticmethod
    def forward(ctx, run, *parameters):
        names = run.drafter.config.parameter_shapes()
        chain = _Chain(run, dict(zip(names, parameters, strict=True)))
        chain.forward()
        result = head_loss(chain.outputs, chain.lm_head, run.drafter.draft_ids, run.head, run.batch, run.plan,
                           chain.offsets, run.scales, run.loss, run.compile, run.gradient)
        ctx.chain, ctx.result = (chain, result) if run.gradient else (None, None)
        ctx.mark_non_differentiable(result.loss_sums, result.agreements)
        return (run.scales * result.loss_sums).sum(), result.loss_sums, result.agreements

    @staticmethod
    def backward(ctx, gradient, *_):
        chain, result = ctx.chain, ctx.result
        ctx.chain = ctx.result = None
        if chain is None:
            raise RuntimeError("unroll_loss: the same loss cannot be run backward twice")
        weights = chain.backward(result.output_gradient * gradient)
        # On a CPU the loss itself is what is differentiated as a rule, and a look costs less than a pass over the weights.
        plain = not gradient.is_cuda and gradient == 1
        weights["lm_head"] = result.weight_gradient if plain else result.weight_gradient.mul_(gradient)
        return None, *(weights[name] for name in chain.run.drafter.config.parameter_shapes())


_frequencies = WeakKeyDictionary()


class _Chain:
    """The layer unrolled over K steps: its weights in the products' dtype and what the backward pass needs.

    The weights of norms on frozen inputs (`fc_norm`, `input_layernorm`) are multiplied into the matrix that follows.
    """

    def __init__(self, run: _Run, parameters: dict[str, torch.Tensor]):
        config, dtype = run.drafter.config, run.dtype
        self.run, self.parameters, self.eps = run, parameters, config.rms_norm_eps
        self.attention = attention_flex if run.batch.aux.is_cuda else attention
        self.hidden, self.kv_heads, self.width = config.hidden_size, config.num_key_value_heads, config.head_dim
        self.group = config.num_attention_heads // self.kv_heads
        fc, qkv = parameters["fc"], parameters["qkv"]
        self.fc = (fc * parameters["fc_norm"].flatten() if config.fc_norm else fc).to(dtype)
        self.embed_qkv = (qkv[:, :self.hidden] * parameters["input_layernorm"]).to(dtype)
        self.hidden_qkv = qkv[:, self.hidden:].to(dtype)
        for name in ("o_proj", "gate_up", "down_proj", "lm_head"):
            setattr(self, name, parameters[name].to(dtype))
        self.offsets, rows = [], 0
        for part in run.plan.steps:
            self.offsets.append(rows)
            rows += len(part.index)
        self.rows = rows
        self.products = _Products([self.slice(k) for k in range(len(run.plan.steps))], len(run.plan.keys) - len(run.plan.live),
                                  run.recompute or not run.gradient, run.compile)

    def call(self, function, *inputs, out=None):
        return piece_into(out, function, self.run.compile)(*inputs)

    def slice(self, k: int) -> slice:
        return slice(self.offsets[k], self.offsets[k] + len(self.run.plan.steps[k].index))

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drafter = self.run.drafter
        if drafter not in _frequencies:
            _frequencies[drafter] = rope_frequencies(drafter.config)
        frequencies, factor = _frequencies[drafter]
        angles = positions.float()[:, None] * frequencies.to(positions.device)
        return angles.cos() * factor, angles.sin() * factor                 # [R, hd / 2]

    def forward(self) -> None:
        """Fill `outputs` [ΣR, H], the normed outputs of all steps one after the other, and keep what backward needs."""
        run, plan, batch = self.run, self.run.plan, self.run.batch
        like = dict(dtype=run.dtype, device=batch.aux.device)
        self.outputs = torch.empty(self.rows, self.hidden, **like)
        self.kept = []
        if not plan.steps:
            return
        aux = batch.aux[plan.keys].to(run.dtype)                            # [Tk, L, Ht]
        if run.drafter.config.fc_norm:
            aux = self.call(layer.unit_norm, aux, self.eps)
        self.aux = aux.flatten(1)
        feature = F.linear(self.aux, self.fc)                               # [Tk, H]
        embed = run.head.embed_tokens[batch.token_ids[plan.tokens]].to(run.dtype)
        self.embed = self.call(layer.unit_norm, embed, self.eps)            # [Tt, H]
        embedded = F.linear(self.embed, self.embed_qkv)                     # [Tt, C]
        live, later = len(plan.live), len(plan.steps) - 1
        self.own_keys = torch.zeros(OWN + later, self.kv_heads, live, self.width, **like)
        self.own_values = torch.zeros_like(self.own_keys)
        for k, part in enumerate(plan.steps):
            first = k == 0
            if part.from_previous is not None:
                feature = feature[part.from_previous]
            tokens = plan.key_tokens if first else part.tokens
            cos, sin = self.rope(plan.key_positions if first else part.positions)
            normed = self.call(layer.norm, feature, self.parameters["hidden_norm"], self.eps,
                               out=self.products.right("qkv", k, feature))
            qkv = F.linear(normed, self.hidden_qkv)                         # [R, C]
            queries, keys, values = self.call(layer.split_rotate, qkv, embedded, tokens, cos, sin, self.kv_heads)
            kept = _Kept(feature, normed, queries, cos, sin)
            if first:
                self.keys, self.values = keys, values                       # [nkv, Tk, hd]
                feature, kept.queries = feature[plan.live_keys], queries[:, plan.live_keys]
            else:
                self._store_own(k, keys, values)
            kept.attended, kept.lse = self.attention.attend(
                kept.queries, self.keys, self.values, *self._own(k), part, run.compile)
            kept.flat = self._flat(k, kept.attended)
            branch = F.linear(kept.flat, self.o_proj)
            kept.stream, kept.inner = self.call(layer.add_norm, feature, branch, self.parameters["post_attention_layernorm"],
                                                self.eps, out=self.products.right("gate_up", k, feature))
            wide = self.products.left("gate_up", k, self.gate_up.t())       # its gradient will take its place
            kept.gate_up = torch.mm(kept.inner, self.gate_up.t(), out=wide)
            kept.gated = self.call(layer.gated, kept.gate_up, out=self.products.right("down_proj", k, self.down_proj))
            branch = F.linear(kept.gated, self.down_proj)
            kept.y, output = self.call(layer.add_norm, kept.stream, branch, self.parameters["norm"], self.eps)
            self.outputs[self.slice(k)] = output
            feature = output if run.drafter.config.norm_output else kept.y
            if run.recompute:
                kept.normed = kept.inner = kept.gate_up = kept.gated = None
            if run.gradient:
                self.kept.append(kept)

    def _flat(self, k, attended):
        """Attention's output, rows first: [R, nh * hd]."""
        rows = attended.transpose(0, 1)                                     # [R, nkv, G, hd]
        place = self.products.right("o_proj", k, self.o_proj)
        return rows.flatten(1) if place is None else place.view(rows.shape).copy_(rows).flatten(1)

    def _store_own(self, k, keys, values):
        index = self.run.plan.steps[k].index
        self.own_keys[OWN + k - 1].index_copy_(1, index, keys)
        self.own_values[OWN + k - 1].index_copy_(1, index, values)

    def _own(self, k):
        """The own keys and values [OWN + k, nkv, R, hd] that step k's rows see."""
        index, places = self.run.plan.steps[k].index, OWN + k
        if len(index) == self.own_keys.shape[2]:
            return self.own_keys[:places], self.own_values[:places]
        return self.own_keys[:places].index_select(2, index), self.own_values[:places].index_select(2, index)

    @staticmethod
    def _add_own(sums, index, gradient):
        """As `_own` reads: as many rows as there are live ones are these in their order."""
        if len(index) == sums.shape[2]:
            sums += gradient
        else:
            sums.index_add_(2, index, gradient)

    def backward(self, output_gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients of all parameters but `lm_head`, fp32, from that of `outputs`."""
        run, plan, parameters = self.run, self.run.plan, self.parameters
        if not plan.steps:
            return {name: torch.zeros_like(value) for name, value in parameters.items() if name != "lm_head"}
        gradients = {name: torch.zeros_like(parameters[name])
                     for name in ("hidden_norm", "post_attention_layernorm", "norm")}
        products = self.products
        key_gradient = torch.zeros(self.keys.shape, device=self.keys.device)
        value_gradient = torch.zeros_like(key_gradient)
        own_key_gradient = torch.zeros(self.own_keys.shape, device=self.keys.device)
        own_value_gradient = torch.zeros_like(own_key_gradient)
        embedded_gradient = torch.zeros(len(plan.tokens), len(self.hidden_qkv), device=self.keys.device)
        following = None                                                    # gradient of the next step's feature
        for k in reversed(range(len(plan.steps))):
            part, kept = plan.steps[k], self.kept.pop()
            slope = output_gradient[self.slice(k)]
            around = torch.zeros_like(slope)
            if following is not None:
                kept_rows = plan.steps[k + 1].from_previous
                target = slope if run.drafter.config.norm_output else around
                if kept_rows is None:
                    target += following
                else:
                    target.index_add_(0, kept_rows, following)
            if run.recompute:
                kept.normed = self.call(layer.norm, kept.feature, parameters["hidden_norm"], self.eps)
                kept.inner = self.call(layer.norm, kept.stream, parameters["post_attention_layernorm"], self.eps)
                kept.gate_up = F.linear(kept.inner, self.gate_up)
                kept.gated = self.call(layer.gated, kept.gate_up)
            slope = self._norm_backward(gradients, "norm", slope, kept.y, around, products.left("down_proj", k, kept.y))
            products.add("down_proj", slope, kept.gated)
            wide = self.call(layer.gated_backward, slope @ self.down_proj, kept.gate_up,
                             out=None if run.recompute else kept.gate_up)
            products.add("gate_up", wide, kept.inner)
            slope = self._norm_backward(gradients, "post_attention_layernorm", wide @ self.gate_up, kept.stream, slope,
                                        products.left("o_proj", k, kept.stream))
            products.add("o_proj", slope, kept.flat)
            by_heads = (slope @ self.o_proj).view(-1, self.kv_heads, self.group, self.width).transpose(0, 1).contiguous()
            own_keys, own_values = self._own(k)
            queries, own_k, own_v = self.attention.attend_backward(
                by_heads, kept.attended, kept.lse, kept.queries, self.keys, self.values, own_keys, own_values,
                part, key_gradient, value_gradient, run.compile)
            self._add_own(own_key_gradient[:OWN + k], part.index, own_k)
            self._add_own(own_value_gradient[:OWN + k], part.index, own_v)
            if k == 0:
                whole = torch.zeros(self.kv_heads, len(plan.keys), self.group, self.width, dtype=run.dtype,
                                    device=queries.device)
                queries = whole.index_add_(1, plan.live_keys, queries)
                keys, values, tokens = key_gradient, value_gradient, plan.key_tokens
                around = torch.zeros_like(kept.feature).index_add_(0, plan.live_keys, slope)
            else:
                keys, values = (
                    grad[OWN + k - 1].index_select(1, part.index) for grad in (own_key_gradient, own_value_gradient))
                # A copy reads the gradient of the row that it is a copy of, which would count again.
                keys[:, part.real:] = values[:, part.real:] = 0
                tokens, around = part.tokens, slope
            qkv = self.call(layer.split_rotate_backward, queries, keys, values, kept.cos, kept.sin,
                            out=products.left("qkv", k, self.hidden_qkv.t()))
            products.add("qkv", qkv, kept.normed)
            embedded_gradient.index_add_(0, tokens, qkv.float())
            following = self._norm_backward(gradients, "hidden_norm", qkv @ self.hidden_qkv, kept.feature, around)
        gradients |= products.finish()
        product = outer(following, self.aux, run.compile)                   # [H, L * Ht]
        if run.drafter.config.fc_norm:
            gradients["fc"], gradients["fc_norm"] = self._frozen_norm(product, parameters["fc"], parameters["fc_norm"])
        else:
            gradients["fc"] = product
        product = outer(embedded_gradient.to(run.dtype), self.embed, run.compile)  # [C, H]
        product, gradients["input_layernorm"] = self._frozen_norm(
            product, parameters["qkv"][:, :self.hidden], parameters["input_layernorm"])
        gradients["qkv"] = torch.cat([product, gradients["qkv"]], 1)
        return gradients

    def _frozen_norm(self, product, matrix, weight):
        """Gradients of a matrix and of the norm before it, from the matrix's gradient if the norm had no weight."""
        return product * weight.flatten(), (product * matrix).sum(0).view_as(weight)

    def _norm_backward(self, gradients, name, slope, x, around, out=None):
        weight, result = self.call(layer.norm_backward, slope, x, self.parameters[name], self.eps, around, out=out)
        gradients[name] += weight
        return result


@dataclass
class _Kept:
    """What one step keeps for the backward pass."""

    feature: torch.Tensor                  # [R, H] (of step 0: [Tk, H])
    normed: torch.Tensor | None            # [R, H] hidden_norm(feature)
    queries: torch.Tensor                  # [nkv, R, G, hd]
    cos: torch.Tensor
    sin: torch.Tensor
    attended: torch.Tensor | None = None   # [nkv, R, G, hd]
    lse: torch.Tensor | None = None        # [nkv, R, G]
    flat: torch.Tensor | None = None       # [R, nh * hd] attended, rows first
    stream: torch.Tensor | None = None     # [R, H] after attention
    inner: torch.Tensor | None = None      # [R, H] its norm
    gate_up: torch.Tensor | None = None    # [R, 2 I]
    gated: torch.Tensor | None = None      # [R, I]
    y: torch.Tensor | None = None          # [R, H] after the MLP


class _Products:
    """Weight gradients left.T @ right summed over steps: one product over all steps' rows, which are written side by side
    in the first place, or step by step, which keeps less. `left` and `right`: the place of step k's rows, None step by step."""

    def __init__(self, slices: list[slice], not_live: int, step_by_step: bool, compile: bool):
        """`slices`: each step's rows. `not_live`: what becomes keys and values has, at step 0, so many rows more."""
        self.slices, self.not_live, self.step_by_step, self.compile = slices, not_live, step_by_step, compile
        self.lefts, self.rights, self.sums = {}, {}, {}

    def left(self, name: str, k: int, like: torch.Tensor) -> torch.Tensor | None:
        return self._place(self.lefts, name, k, like)

    def right(self, name: str, k: int, like: torch.Tensor) -> torch.Tensor | None:
        return self._place(self.rights, name, k, like)

    def _place(self, side, name, k, like):
        """`like`: a tensor of the same dtype, device and width."""
        if self.step_by_step:
            return None
        more, rows = self.not_live if name == "qkv" else 0, self.slices[k]
        if name not in side:
            side[name] = like.new_empty(self.slices[-1].stop + more, like.shape[1])
        return side[name][rows.start + (more if k else 0):rows.stop + more]

    def add(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Step k's factors, which are in their places unless it goes step by step."""
        if self.step_by_step:
            product = outer(left, right, self.compile)
            self.sums[name] = self.sums[name].add_(product) if name in self.sums else product

    def finish(self) -> dict[str, torch.Tensor]:
        for name in list(self.lefts):
            self.sums[name] = outer(self.lefts.pop(name), self.rights.pop(name), self.compile)
        return self.sums
