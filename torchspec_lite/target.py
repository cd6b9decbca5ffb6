"""What the library knows of a frozen target: its shape, its fingerprint and its frozen head."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from torchspec_lite.errors import UserError

FINGERPRINT_CHUNK = 1 << 16
HEAD = "lm_head.weight"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
         "max_position_embeddings")
SUPPORTED = "only decoder-only text models with RoPE, RMSNorm and a plain head are supported"


@dataclass(frozen=True)
class TargetInfo:
    """A target as its folder describes it.

    `fingerprint` changes when the config or the weights change: `name@` and 16 hex digits of a SHA-256 over the
    config, the tensors' names, shapes and places, and a sample of each weight file's bytes. `weight_bytes` is the weight
    files' size, which is about what an engine holds.
    """

    path: str
    name: str
    fingerprint: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: dict
    max_position_embeddings: int
    tied_head: bool = False
    weight_bytes: int = 0

    def default_layer_ids(self) -> tuple[int, int, int]:
        """Auxiliary states of EAGLE 3: early, middle, late (id i = residual stream entering layer i).

        In fewer than 7 layers those would not be three different ones in order; there they are 1, N//2, N-1.
        Raises UserError for fewer than 4 layers.
        """
        if self.num_layers < 4:
            raise UserError(f"target {self.path}: {self.num_layers} layers are too few to choose three states by "
                            "default; give capture.layer_ids")
        if self.num_layers < 7:
            return 1, self.num_layers // 2, self.num_layers - 1
        return 2, self.num_layers // 2, self.num_layers - 3


@dataclass(frozen=True)
class FrozenHead:
    """The target's tensors that a drafter's training reads: embedding [V, H], final norm [H], lm_head [V, H]."""

    embed_tokens: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    lm_head: torch.Tensor

    def to(self, device: torch.device) -> "FrozenHead":
        """The same tensors on a device; a head that is the embedding stays one tensor."""
        embed = self.embed_tokens.to(device)
        head = embed if self.lm_head is self.embed_tokens else self.lm_head.to(device)
        return FrozenHead(embed, self.norm_weight.to(device), self.norm_eps, head)


def describe(path: str | Path) -> TargetInfo:
    """Read a Hugging Face folder. Raises UserError when it is missing or not a supported decoder."""
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise UserError(f"target {folder}: no readable config.json; give a Hugging Face model folder") from error
    except ValueError as error:
        raise UserError(f"target {folder}/config.json: not valid JSON: {error}") from error
    config = _decoder_config(config, folder)
    _check_supported(config, folder)
    heads = config["num_attention_heads"]
    rope = _rope(config, folder)
    return TargetInfo(
        path=str(folder.resolve()),
        name=_name(folder),
        fingerprint=_fingerprint(folder, config),
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope["rope_theta"]),
        rope_parameters=rope,
        max_position_embeddings=config["max_position_embeddings"],
        tied_head=bool(config.get("tie_word_embeddings", False)),
        weight_bytes=sum(path.stat().st_size for path in weight_files(folder)),
    )


def load_head(info: TargetInfo, dtype: torch.dtype) -> FrozenHead:
    """Read only the embedding, the final norm and the head, not the whole model.

    Raises UserError when the weights have no such tensors.
    """
    files = weight_files(Path(info.path))
    embed = _tensor(files, info, "model.embed_tokens.weight", dtype)
    norm = _tensor(files, info, "model.norm.weight", torch.float32)
    # A file may hold a head that a tied model does not read.
    tied = info.tied_head or not any(_is(name, HEAD) for names in files.values() for name in names)
    head = embed if tied else _tensor(files, info, HEAD, dtype)
    return FrozenHead(embed, norm, info.rms_norm_eps, head)


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """The folder's safetensors files and the tensor names in each. Raises UserError when there are none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"target {folder}: no *.safetensors files; save the model in safetensors format")
    files = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as reader:
                files[path] = list(reader.keys())
        except SafetensorError as error:
            raise UserError(f"target {path}: not a whole safetensors file ({error}); fetch it again") from error
    return files


def _tensor(files, info, suffix, dtype):
    for path, names in files.items():
        for name in names:
            if _is(name, suffix):
                with safe_open(path, "pt") as reader:
                    return reader.get_tensor(name).to(dtype)
    raise UserError(f"target {info.path}: no tensor {suffix}; is this a decoder-only model of a supported family?")


def _is(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith("." + suffix)


def _decoder_config(config, folder: Path) -> dict:
    """The part of a config.json that describes the text decoder."""
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        # Whether the head is tied may be said outside only.
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = outer | config["text_config"]
    if not isinstance(config, dict):
        raise UserError(f"target {folder}/config.json: expected an object; give a Hugging Face model folder")
    return config


def _check_supported(config: dict, folder: Path) -> None:
    """Raises UserError for a model whose logits are not `lm_head(RMSNorm(stream))`, or whose sizes are missing."""
    for key in SIZES:
        if key not in config:
            raise UserError(f"target {folder}/config.json: no key {key!r}; {SUPPORTED}")
        if not isinstance(config[key], int) or config[key] < 1:
            raise UserError(f"target {folder}/config.json: {key} is {config[key]!r}, expected a number from 1")
    model_type = str(config.get("model_type"))
    if model_type.startswith("gemma"):
        raise UserError(f"target {folder}: model type {model_type} scales its embedding and its norms; {SUPPORTED}")
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if config.get(key) not in (None, 1, 1.0):
            raise UserError(f"target {folder}/config.json: {key} changes the logits; {SUPPORTED}")


def _rope(config: dict, folder: Path) -> dict:
    """RoPE as transformers 5 writes it; older configs say `rope_theta` and `rope_scaling` apart."""
    rope = config.get("rope_parameters")
    if rope is None:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("rope_type", scaling.pop("type", "default"))
        rope = {"rope_type": kind, "rope_theta": config.get("rope_theta", 10000.0), **scaling}
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_theta"), int | float):
        raise UserError(f"target {folder}/config.json: rope_parameters has no rope_theta for all layers; {SUPPORTED}")
    return rope


def _name(folder: Path) -> str:
    """The folder's name; of a snapshot in the hub's cache, whose folder is a commit, the model's."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.split("--")[-1]
    return folder.name


def _fingerprint(folder: Path, config: dict) -> str:
    digest = hashlib.sha256()
    stable = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    digest.update(json.dumps(stable, sort_keys=True).encode())
    for path in weight_files(folder):
        size = path.stat().st_size
        with path.open("rb") as file:
            # The header names every tensor; 32 evenly spread chunks notice changed values without reading it all.
            for place in range(33):
                file.seek(min(size, place * size // 33))
                digest.update(file.read(FINGERPRINT_CHUNK))
    return f"{_name(folder)}@{digest.hexdigest()[:16]}"
