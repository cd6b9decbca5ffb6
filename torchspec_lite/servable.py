"""A drafter's servable form: tensor names and config keys as vLLM, and other tools, read them.

Sources: vLLM's llama_eagle3.py and its two model runners (names and keys measured on 0.32), speculators' eagle3 format.
"""

import re
from dataclasses import dataclass

import torch

from torchspec_lite.drafter import Drafter, DrafterConfig
from torchspec_lite.errors import UserError
from torchspec_lite.target import FrozenHead, TargetInfo
from torchspec_lite.vocab import offsets, target_ids

LAYER_CONVENTION = "entering_layer"
PLAIN = {  # our attribute -> vLLM's tensor
    "fc": "fc.weight",
    "input_layernorm": "midlayer.input_layernorm.weight",
    "hidden_norm": "midlayer.hidden_norm.weight",
    "o_proj": "midlayer.self_attn.o_proj.weight",
    "post_attention_layernorm": "midlayer.post_attention_layernorm.weight",
    "down_proj": "midlayer.mlp.down_proj.weight",
    "norm": "norm.weight",
    "lm_head": "lm_head.weight",
}
NOT_OURS = {  # keys that change the arithmetic into something this drafter is not: the only value that fits
    "norm_before_residual": False, "norm_before_fc": False, "attention_bias": False, "mlp_bias": False,
    "hidden_act": "silu", "num_hidden_layers": 1, "logit_scale": 1.0, "parallel_drafting": False,
    "quantization_config": None, "sliding_window": None,
}


def to_tensors(drafter: Drafter, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors by vLLM's names, on the CPU, weights in `dtype`. `d2t` (int64 offsets) only with a reduced vocabulary;
    never `embed_tokens`, so that vLLM reads the target's."""
    c = drafter.config
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    tensors = {name: drafter.get_parameter(ours) for ours, name in PLAIN.items()}
    for part, rows in zip("qkv", drafter.qkv.split([queries, keys, keys]), strict=True):
        tensors[f"midlayer.self_attn.{part}_proj.weight"] = rows
    for part, rows in zip(("gate", "up"), drafter.gate_up.chunk(2), strict=True):
        tensors[f"midlayer.mlp.{part}_proj.weight"] = rows
    if drafter.fc_norm is not None:
        for i, rows in enumerate(drafter.fc_norm):
            tensors[f"fc_norm.{i}.weight"] = rows
    tensors = {name: value.detach().to("cpu", dtype, copy=True).contiguous() for name, value in tensors.items()}
    if not drafter.full_vocabulary:
        tensors["d2t"] = offsets(drafter.draft_ids).cpu()
    return tensors


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a servable drafter of this config."""
    with torch.device("meta"):
        drafter = Drafter(config, torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    shapes = {name: tuple(drafter.get_parameter(ours).shape) for ours, name in PLAIN.items()}
    c = config
    for part, heads in (("q", c.num_attention_heads), ("k", c.num_key_value_heads), ("v", c.num_key_value_heads)):
        shapes[f"midlayer.self_attn.{part}_proj.weight"] = (heads * c.head_dim, 2 * c.hidden_size)
    for part in ("gate", "up"):
        shapes[f"midlayer.mlp.{part}_proj.weight"] = (c.intermediate_size, c.hidden_size)
    if c.fc_norm:
        for i in range(len(c.layer_ids)):
            shapes[f"fc_norm.{i}.weight"] = (c.target_hidden_size,)
    if c.draft_vocab_size != c.vocab_size:
        shapes["d2t"] = (c.draft_vocab_size,)
    return shapes


def from_tensors(config: DrafterConfig, tensors: dict[str, torch.Tensor], place: str,
                 head: FrozenHead | None = None) -> Drafter:
    """A drafter from tensors by vLLM's names (`midlayer.` or `layers.0.`); weights become fp32.

    A missing `lm_head` is the target's, as vLLM takes it: `head` is needed then. `embed_tokens` must be the target's
    (it is compared when `head` is given). Raises UserError naming every tensor that is missing, unknown, of another
    shape or not finite.
    """
    tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in tensors.items()}
    t2d = tensors.pop("t2d", None)
    _check_embedding(tensors.pop("embed_tokens.weight", None), head, place)
    if "lm_head.weight" not in tensors and head is not None:
        rows = torch.arange(config.vocab_size)
        if "d2t" in tensors:
            rows = target_ids(tensors["d2t"], config.vocab_size, t2d, place)
        tensors["lm_head.weight"] = head.lm_head[rows]
    _check_tensors(config, tensors, place)
    if "d2t" in tensors:
        ids = target_ids(tensors["d2t"], config.vocab_size, t2d, place)
    else:
        ids = torch.arange(config.vocab_size)
    values = {ours: tensors[name] for ours, name in PLAIN.items()}
    values["qkv"] = torch.cat([tensors[f"midlayer.self_attn.{part}_proj.weight"] for part in "qkv"])
    values["gate_up"] = torch.cat([tensors[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    if config.fc_norm:
        values["fc_norm"] = torch.stack([tensors[f"fc_norm.{i}.weight"] for i in range(len(config.layer_ids))])
    drafter = Drafter(config, ids)
    with torch.no_grad():
        for name, value in values.items():
            drafter.get_parameter(name).copy_(value)
    return drafter


def _check_tensors(config, tensors, place):
    shapes, faults = tensor_shapes(config), []
    for name in sorted(shapes.keys() - tensors.keys()):
        faults.append(f"{name} is missing")
    for name in sorted(tensors.keys() - shapes.keys()):
        faults.append(f"{name} has no place in a drafter of this config")
    for name in sorted(shapes.keys() & tensors.keys()):
        value = tensors[name]
        if tuple(value.shape) != shapes[name]:
            faults.append(f"{name} is {list(value.shape)}, the config asks for {list(shapes[name])}")
        elif value.is_floating_point() and not bool(value.isfinite().all()):
            faults.append(f"{name} holds numbers that are not finite")
    if faults:
        more = f" and {len(faults) - 8} faults more" if len(faults) > 8 else ""
        raise UserError(f"drafter {place}: " + "; ".join(faults[:8]) + more)


def _check_embedding(embedding, head, place):
    if embedding is None or head is None:
        return
    target = head.embed_tokens
    if embedding.shape != target.shape or not torch.allclose(embedding.float(), target.float(), rtol=0.02, atol=1e-4):
        raise UserError(f"drafter {place}: its embed_tokens is not the target's; only drafters that read the target's "
                        "own embedding are supported")


def servable_config(config: DrafterConfig, dtype: torch.dtype) -> dict:
    """config.json for vLLM: every key that either of its two model runners reads, written out."""
    ids = list(config.layer_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope_parameters,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "num_aux_hidden_states": len(ids),
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": ids, "layer_ids": ids, "use_aux_hidden_state": True,
            "norm_before_fc": False, "layer_id_convention": LAYER_CONVENTION},
    }


def speculators_config(config: DrafterConfig, dtype: torch.dtype, target: str, num_speculative_tokens: int) -> dict:
    """config.json in speculators' eagle3 format. `target`: the name or path that its readers load the target from."""
    layer = servable_config(config, dtype)
    ours = ("architectures", "draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output",
            "norm_before_residual", "norm_before_fc", "eagle_aux_hidden_state_layer_ids", "torch_dtype")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        # Written though false: a reader without the key takes true.
        "norm_before_residual": False,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        "transformer_layer_config": {key: value for key, value in layer.items() if key not in ours},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": num_speculative_tokens, "accept_tolerance": 0.0,
                "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "dtype": layer["dtype"],
        "tie_word_embeddings": False,
    }


@dataclass(frozen=True)
class _Reader:
    """Keys of a config.json, looked up with an error that names the file."""

    values: dict
    place: str

    def need(self, key):
        if self.values.get(key) is None:
            raise UserError(f"drafter {self.place}/config.json: no key {key}")
        return self.values[key]


def read_config(values: dict, place: str, info: TargetInfo | None) -> DrafterConfig:
    """The config of a drafter folder: ours, vLLM style or speculators format.

    `info` supplies the layer ids where the file leaves them to the target's default, and is checked for
    hidden size and vocabulary. Raises UserError naming the key that is missing or asks for another kind of drafter.
    """
    if "speculators_model_type" in values:
        values = _flatten_speculators(values, place)
    read = _Reader(values, place)
    eagle = values.get("eagle_config") or {}
    for key, fits in NOT_OURS.items():
        found = values.get(key, eagle.get(key, fits))
        if found is not None and found != fits:
            raise UserError(f"drafter {place}/config.json: {key} is {found!r}; this drafter is trained and served with "
                            f"{fits!r} only")
    heads, hidden = read.need("num_attention_heads"), read.need("hidden_size")
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=read.need("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        rms_norm_eps=read.need("rms_norm_eps"),
        rope_parameters=_rope(values, read),
        max_position_embeddings=read.need("max_position_embeddings"),
        vocab_size=read.need("vocab_size"),
        draft_vocab_size=values.get("draft_vocab_size") or values["vocab_size"],
        target_hidden_size=values.get("target_hidden_size") or hidden,
        layer_ids=_layer_ids(values, eagle, place, info),
        fc_norm=bool(values.get("fc_norm", False)),
        norm_output=bool(values.get("norm_output", False)),
    )
    if config.target_hidden_size != hidden:
        raise UserError(f"drafter {place}/config.json: target_hidden_size {config.target_hidden_size} is not "
                        f"hidden_size {hidden}; only drafters as wide as their target are supported")
    if info is not None:
        for key, found, wanted in (("hidden_size", hidden, info.hidden_size),
                                   ("vocab_size", config.vocab_size, info.vocab_size)):
            if found != wanted:
                raise UserError(f"drafter {place}/config.json: {key} is {found}, target {info.name} has {wanted}")
    return config


def _layer_ids(values, eagle, place, info):
    places = {"eagle_aux_hidden_state_layer_ids": values.get("eagle_aux_hidden_state_layer_ids"),
              "eagle_config.eagle_aux_hidden_state_layer_ids": eagle.get("eagle_aux_hidden_state_layer_ids"),
              "eagle_config.layer_ids": eagle.get("layer_ids")}
    found = {name: tuple(sorted(set(ids))) for name, ids in places.items() if ids}  # vLLM's order is ascending too
    if len(set(found.values())) > 1:
        raise UserError(f"drafter {place}/config.json: layer ids disagree: {found}")
    if found:
        return next(iter(found.values()))
    if info is None:
        raise UserError(f"drafter {place}/config.json: no eagle_aux_hidden_state_layer_ids; name the target, whose "
                        "default layers are meant then")
    return info.default_layer_ids()


def _rope(values, read):
    if values.get("rope_parameters"):
        rope = dict(values["rope_parameters"])
        return rope if "rope_theta" in rope else rope | {"rope_theta": float(read.need("rope_theta"))}
    scaling = dict(values.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    return {"rope_type": kind, "rope_theta": float(read.need("rope_theta")), **scaling}


def _flatten_speculators(values, place):
    if values["speculators_model_type"] != "eagle3":
        raise UserError(f"drafter {place}/config.json: speculators_model_type is "
                        f"{values['speculators_model_type']!r}; only eagle3 is supported")
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"drafter {place}/config.json: no transformer_layer_config")
    if layer.get("model_type", "llama") != "llama":
        raise UserError(f"drafter {place}/config.json: a layer of model_type {layer['model_type']!r}; only llama is "
                        "supported")
    own = ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output", "norm_before_fc",
           "eagle_aux_hidden_state_layer_ids")
    flat = layer | {key: values[key] for key in own if values.get(key) is not None}
    # vLLM reads a missing key as true in this format only.
    flat["norm_before_residual"] = values.get("norm_before_residual", True)
    return flat
