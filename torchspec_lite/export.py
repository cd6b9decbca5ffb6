"""Servable drafter directories: written whole, verified, read back, and converted from and to other tools' formats."""

import json
import logging
import re
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from torchspec_lite.atomic import new_directory, sha256
from torchspec_lite.drafter import Drafter, DrafterConfig
from torchspec_lite.errors import UserError
from torchspec_lite.servable import from_tensors, read_config, servable_config, speculators_config, to_tensors
from torchspec_lite.target import FrozenHead, TargetInfo

CONFIG, WEIGHTS, CARD, MANIFEST = "config.json", "model.safetensors", "README.md", "manifest.json"
LISTED = (CARD, CONFIG, WEIGHTS)  # the files a manifest vouches for; names from a manifest are never used as paths
SCHEMA = 1
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """What a version is and was made from. `files`: SHA-256 in hex by name. `predicted`: acceptance length."""

    schema: int
    version: int
    step: int
    samples: int
    parent: int | None
    target: str        # fingerprint
    predicted: float | None
    created: float     # seconds since 1970
    files: dict[str, str]


def version_path(directory: Path, version: int) -> Path:
    """Where a version's directory is: `drafters/v000012`."""
    return Path(directory) / f"v{version:06d}"


def versions(directory: Path) -> dict[int, Path]:
    """Whole versions under `directory` by number, ascending. Empty when there is no such directory."""
    found = {}
    for path in Path(directory).glob("v*"):
        match = re.fullmatch(r"v(\d{6,})", path.name)
        if match and (path / MANIFEST).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def export(drafter: Drafter, directory: Path, version: int, dtype: torch.dtype, info: TargetInfo, step: int,
           samples: int, parent: int | None, predicted: float | None) -> Path:
    """Write `directory/v000012`, which `vllm serve` takes as it is, and return its path.

    It is written to a temporary name, read back and verified, then renamed: a reader sees all of it or nothing.
    Weights are in `dtype`. Raises UserError when the version is there already, the disk is full or a weight is
    not finite (in `dtype`).
    """
    final = version_path(directory, version)
    with new_directory(final) as partial:
        contents = {
            CONFIG: _json(servable_config(drafter.config, dtype)),
            WEIGHTS: save(to_tensors(drafter, dtype), {"format": "pt"}),
            CARD: _card(drafter, version, info, step, samples, predicted).encode(),
        }
        for name, content in contents.items():
            (partial / name).write_bytes(content)
        manifest = Manifest(
            schema=SCHEMA, version=version, step=step, samples=samples, parent=parent, target=info.fingerprint,
            predicted=predicted, created=time.time(), files={name: sha256(partial / name) for name in LISTED})
        (partial / MANIFEST).write_bytes(_json(asdict(manifest)))
        verify(partial, info.fingerprint)
    return final


def verify(directory: Path, expected_fingerprint: str | None) -> Manifest:
    """Check a version: manifest, each file's hash, names, shapes, finiteness, vocabulary map and target.

    `expected_fingerprint` None: of any target. Raises UserError naming the directory and what is wrong with it.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    if expected_fingerprint is not None and manifest.target != expected_fingerprint:
        raise UserError(f"drafter {directory}: trained against target {manifest.target}, not {expected_fingerprint}")
    for name in LISTED:
        if sha256(_file(directory, name)) != manifest.files[name]:
            raise UserError(f"drafter {directory}: {name} is not the file that was exported (SHA-256 differs)")
    load_drafter(directory)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest alone, its fields checked but no file. Raises UserError when it is missing or malformed."""
    values = _read_json(Path(directory), MANIFEST)
    known = {field.name for field in fields(Manifest)}
    if set(values) != known or values["schema"] != SCHEMA:
        raise UserError(f"drafter {directory}/{MANIFEST}: expected the keys {sorted(known)} and schema {SCHEMA}")
    manifest = Manifest(**values)
    number, none = (int, float), type(None)
    kinds = {"version": int, "step": int, "samples": int, "parent": (int, none), "target": str,
             "predicted": (*number, none), "created": number, "files": dict}
    for name, kind in kinds.items():
        if not isinstance(values[name], kind):
            raise UserError(f"drafter {directory}/{MANIFEST}: {name} is {values[name]!r}")
    if sorted(manifest.files) != sorted(LISTED):
        raise UserError(f"drafter {directory}/{MANIFEST}: lists {sorted(manifest.files)}, expected {list(LISTED)}")
    return manifest


def read_drafter_config(directory: Path, info: TargetInfo | None) -> DrafterConfig:
    """The shape of a drafter folder, without its weights. `info` and errors as in `load_drafter`."""
    return read_config(_read_json(Path(directory), CONFIG), str(directory), info)


def load_drafter(directory: Path, info: TargetInfo | None = None, head: FrozenHead | None = None) -> Drafter:
    """Read a drafter, fp32: ours, vLLM style (`midlayer.` or `layers.0.`) or speculators' eagle3 format.

    `info` supplies layer ids that a file leaves to the target's default, and is checked for size and vocabulary; `head`
    supplies the head of a drafter that ships none, and is checked against an `embed_tokens` that it ships (without
    `head` such a tensor is ignored with a warning). Raises UserError naming each key, tensor or shape that does
    not fit.
    """
    directory = Path(directory)
    config, tensors = read_drafter_config(directory, info), {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"drafter {path}: not a readable safetensors file: {error}") from error
    if not tensors:
        raise UserError(f"drafter {directory}: no *.safetensors file; pickled weights are not read, convert them first")
    if "embed_tokens.weight" in tensors and head is None:
        log.warning("drafter %s ships embed_tokens; it is taken to be the target's", directory)
    return from_tensors(config, tensors, str(directory), head)


def export_speculators(drafter: Drafter, directory: Path, dtype: torch.dtype, info: TargetInfo, head: FrozenHead,
                       num_speculative_tokens: int) -> Path:
    """Write the drafter to `directory` in speculators' eagle3 format and return its path.

    Tensors are `layers.0.…`, with `embed_tokens` and `t2d` as that library saves them. Raises UserError as `export`.
    """
    directory = Path(directory)
    tensors = {re.sub(r"^midlayer\.", "layers.0.", name): value for name, value in to_tensors(drafter, dtype).items()}
    tensors["embed_tokens.weight"] = head.embed_tokens.to("cpu", dtype, copy=True)
    if "d2t" in tensors:
        tensors["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][drafter.draft_ids.cpu()] = True
    with new_directory(directory) as partial:
        config = speculators_config(drafter.config, dtype, info.path, num_speculative_tokens)
        (partial / CONFIG).write_bytes(_json(config))
        (partial / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
        load_drafter(partial, info, head)
    return directory


def _file(directory, name):
    path = directory / name
    if path.is_symlink() or not path.is_file():
        raise UserError(f"drafter {directory}: no file {name}")
    return path


def _read_json(directory, name):
    try:
        values = json.loads(_file(directory, name).read_text())
    except ValueError as error:
        raise UserError(f"drafter {directory}/{name}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"drafter {directory}/{name}: expected an object")
    return values


def _json(values: dict) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _card(drafter, version, info, step, samples, predicted):
    c = drafter.config
    kind = {(False, False): "EAGLE 3", (True, True): "EAGLE 3.1"}.get((c.fc_norm, c.norm_output), "EAGLE 3 variant")
    vocabulary = "the target's whole vocabulary" if drafter.full_vocabulary else (
        f"{c.draft_vocab_size:,} of the target's {c.vocab_size:,} tokens")
    expected = "not predicted" if predicted is None else f"{predicted:.3f} tokens per target forward (held-out prompts)"
    speculative = json.dumps({"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": 3})
    return f"""---
tags: [speculative-decoding, eagle3]
---
# {kind} drafter for {info.name}, version {version}

Proposes tokens for `{info.name}`, which checks each of them: answers stay the target's own, they only come faster.
Trained online by torchspec-lite on hidden states of the target; of no use with another target or other weights of it.

| | |
| --- | --- |
| target | `{info.fingerprint}` |
| optimizer steps | {step:,} |
| samples | {samples:,} |
| predicted acceptance length | {expected} |
| reads the residual streams entering layers | {", ".join(map(str, c.layer_ids))} |
| proposes | {vocabulary} |
| `fc_norm`, `norm_output` | {c.fc_norm}, {c.norm_output} |

```
vllm serve {info.name} --speculative-config '{speculative}'
```

The embedding is the target's and not in this folder. `manifest.json` has the SHA-256 of each file. A drafter is trained
on text that its target wrote and may retain traces of it.
"""
