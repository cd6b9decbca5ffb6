"""What the library knows of a frozen target: its shape, its fingerprint and its frozen head."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from torchspec_lite.errors import UserError

FINGERPRINT_CHUNK = 1 << 16


@dataclass(frozen=True)
class TargetInfo:
    """A target as its folder describes it.

    `fingerprint` changes when the config or the weights change: `name@` and 16 hex digits of a SHA-256 over the
    config, the tensors' names, shapes and places, and a sample of each weight file's bytes.
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

    def default_layer_ids(self) -> tuple[int, int, int]:
        """Auxiliary states of EAGLE 3: early, middle, late (id i = residual stream entering layer i)."""
        return 2, self.num_layers // 2, self.num_layers - 3


@dataclass(frozen=True)
class FrozenHead:
    """The target's tensors that a drafter's training reads: embedding [V, H], final norm [H], lm_head [V, H]."""

    embed_tokens: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    lm_head: torch.Tensor


def describe(path: str | Path) -> TargetInfo:
    """Read a Hugging Face folder. Raises UserError when it is missing or not a supported decoder."""
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise UserError(f"target {folder}: no readable config.json; give a Hugging Face model folder") from error
    except ValueError as error:
        raise UserError(f"target {folder}/config.json: not valid JSON: {error}") from error
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or {
            "rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
        return TargetInfo(
            path=str(folder.resolve()),
            name=folder.resolve().name,
            fingerprint=_fingerprint(folder, config),
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope["rope_theta"]),
            rope_parameters=rope,
            max_position_embeddings=config["max_position_embeddings"],
        )
    except KeyError as error:
        raise UserError(f"target {folder}/config.json: no key {error}; only decoder-only text models with RoPE and "
                        "RMSNorm are supported") from error


def load_head(info: TargetInfo, dtype: torch.dtype) -> FrozenHead:
    """Read only the embedding, the final norm and the head, not the whole model.

    Raises UserError when the weights have no such tensors.
    """
    files = weight_files(Path(info.path))
    embed = _tensor(files, info, "model.embed_tokens.weight", dtype)
    norm = _tensor(files, info, "model.norm.weight", torch.float32)
    tied = not any("lm_head.weight" in names for names in files.values())
    head = embed if tied else _tensor(files, info, "lm_head.weight", dtype)
    return FrozenHead(embed, norm, info.rms_norm_eps, head)


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """The folder's safetensors files and the tensor names in each. Raises UserError when there are none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"target {folder}: no *.safetensors files; save the model in safetensors format")
    files = {}
    for path in paths:
        with safe_open(path, "pt") as reader:
            files[path] = list(reader.keys())
    return files


def _tensor(files, info, suffix, dtype):
    for path, names in files.items():
        for name in names:
            if name == suffix or name.endswith("." + suffix):
                with safe_open(path, "pt") as reader:
                    return reader.get_tensor(name).to(dtype)
    raise UserError(f"target {info.path}: no tensor {suffix}; is this a decoder-only model of a supported family?")


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
    return f"{folder.resolve().name}@{digest.hexdigest()[:16]}"


def weight_bytes(info: TargetInfo) -> int:
    """Size of the target's weight files in bytes."""
    return sum(path.stat().st_size for path in weight_files(Path(info.path)))
