"""vLLM worker extension: replace the drafter's weights inside a running engine, or leave them exactly as they were.

vLLM mixes `ServingExtension` into each worker (`worker_extension_cls`) and runs its methods between two engine steps
(`collective_rpc`), so requests in flight go on. Importing this module in a worker also keeps a drafter's own head its
own (`_never_share_own`), mends what sampled requests get on a CPU (`workers.cpu_sampling`) and prepares capture
(`workers.tap`), which must happen before vLLM loads the models; a worker imports it early enough by itself. From then on the
engine ends with the process that started it (`workers.parent`).
"""

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.spec_decode.eagle import utils as v2_eagle

from torchspec_lite.export import verify
from workers.answer import answered
from workers.cpu_sampling import mend_cpu_sampling
from workers.draft_log import DraftLog
from workers.parent import end_with_parent
from workers.read_back import read_back
from workers.serving_capture import ServingCapture
from workers.tap import prepare_runners

DESCRIPTIVE_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


class DrafterSwap:
    """The swap in three calls, so that under tensor parallelism all ranks agree before any changes a weight.

    `swap_prepare` on every rank, then `swap_load` on every rank, then `swap_keep`, or `swap_undo` if any rank failed.
    `workers.server.swap_drafter` is the caller. Each call answers {"ok", "value" | "error"} and raises nothing.
    """

    swap_start: dict | None = None
    swap_staged: tuple[str, dict[str, torch.Tensor]] | None = None
    swap_snapshot: list | None = None

    @answered
    def swap_describe(self) -> dict:
        """Read the start-up checkpoint's names and shapes (its folder may go later) and compare it with the engine. Asked
        again, as by a run that is resumed, it answers the same: by then the engine may draft with another version."""
        if self.swap_start is None:
            folder = Path(self.vllm_config.speculative_config.draft_model_config.model)
            tensors = load_file(folder / "model.safetensors")
            self.swap_start = {
                "described": {"fingerprint": read_back(self.get_draft_model(), tensors, self._borrowed()),
                              "runner": type(self.model_runner).__module__,
                              "borrowed": sorted(type(module).__name__ for module in self._borrowed())},
                "config": _meaning(folder),
                "tensors": {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()},
            }
        return self.swap_start["described"]

    @answered
    def swap_prepare(self, version_dir: str, target_fingerprint: str) -> None:
        """Read a version and refuse it unless its manifest, target, names, shapes, numbers and config fit. Changes
        nothing."""
        self.swap_staged = None
        folder = Path(version_dir)
        verify(folder, target_fingerprint)
        tensors = load_file(folder / "model.safetensors")
        self._check_fits(folder, tensors)
        self.swap_staged = version_dir, tensors

    @answered
    def swap_load(self) -> str:
        """Load what `swap_prepare` read; return the fingerprint read back. On any error the old weights are back."""
        version_dir, tensors = self.swap_staged
        self.swap_snapshot = _snapshot(self.get_draft_model(), self._borrowed())
        try:
            self._reload(tensors)
            return read_back(self.get_draft_model(), tensors, self._borrowed())
        except BaseException:
            self._undo()
            raise

    @answered
    def swap_keep(self) -> None:
        """The new weights stay: forget the old ones."""
        self.swap_snapshot = self.swap_staged = None

    @answered
    def swap_undo(self) -> None:
        """Put the old weights back, whatever state the drafter is in; nothing happens when they are there already."""
        self._undo()
        self.swap_staged = None

    def _undo(self) -> None:
        if self.swap_snapshot is not None:
            _restore(self.swap_snapshot)
            self.swap_snapshot = None

    def _borrowed(self) -> set[nn.Module]:
        """The drafter's modules that are also the target's (embedding, rotary cache): a swap must not touch them."""
        return set(self.get_draft_model().modules()) & set(self.get_model().modules())

    def _check_fits(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        start = self.swap_start["tensors"]
        names = set(start) ^ set(tensors)
        if names:
            raise ValueError(f"{folder}: tensors that only one of the start-up drafter and this one has: "
                             f"{', '.join(sorted(names)[:4])}")
        for name, tensor in tensors.items():
            shape, floating = start[name]
            if tuple(tensor.shape) != shape or tensor.is_floating_point() != floating:
                raise ValueError(f"{folder}: {name} is {tensor.dtype} {tuple(tensor.shape)}, the engine started "
                                 f"with {'floats' if floating else 'integers'} {shape}")
            if floating and not torch.isfinite(tensor).all():
                raise ValueError(f"{folder}: {name} holds NaN or infinity")
        config = _meaning(folder)
        changed = [key for key in config.keys() | self.swap_start["config"].keys()
                   if config.get(key) != self.swap_start["config"].get(key)]
        if changed:
            raise ValueError(f"{folder}/config.json differs from the start-up drafter's in "
                             f"{', '.join(sorted(changed))}")
        if "d2t" in tensors:
            targets = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
            vocabulary = self.model_config.get_vocab_size()
            if targets.min() < 0 or targets.max() >= vocabulary or len(targets.unique()) != len(targets):
                raise ValueError(f"{folder}: d2t does not map to distinct tokens of a vocabulary of {vocabulary}")

    def _reload(self, tensors: dict[str, torch.Tensor]) -> None:
        """vLLM's layerwise reload: into the old storage where kernels read it (CUDA graphs stay valid), packed anew on
        a CPU. Modules of the target, and those without weights of their own, are taken out of its sight."""
        draft = self.get_draft_model()
        hidden = _hide(draft, self._borrowed())
        try:
            with set_current_vllm_config(self.vllm_config), torch.inference_mode():
                initialize_layerwise_reload(draft)
                draft.load_weights(iter(tensors.items()))
                finalize_layerwise_reload(draft, self.vllm_config.speculative_config.draft_model_config)
        finally:
            for module, children in hidden:
                module._modules.clear()
                module._modules.update(children)


class ServingExtension(DrafterSwap, DraftLog, ServingCapture):
    """What a serving replica's workers can do beyond vLLM: swap the drafter, log what it drafts, capture states."""


def _meaning(folder: Path) -> dict:
    config = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in DESCRIPTIVE_KEYS}


def _hide(draft: nn.Module, borrowed: set[nn.Module]) -> list[tuple[nn.Module, dict]]:
    changed = []
    for module in list(draft.modules()):
        keep = {name: child for name, child in module._modules.items()
                if child not in borrowed and any(True for _ in child.parameters())}
        if module not in borrowed and len(keep) < len(module._modules):
            changed.append((module, dict(module._modules)))
            module._modules.clear()
            module._modules.update(keep)
    return changed


def _snapshot(draft: nn.Module, borrowed: set[nn.Module]) -> list:
    """Everything a reload can change: each module's attributes (packed weights are closures), each tensor's values."""
    saved = []
    for module in draft.modules():
        if module not in borrowed:
            attributes = {key: dict(value) if isinstance(value, dict) else value
                          for key, value in module.__dict__.items()}
            tensors = [*module._parameters.values(), *module._buffers.values()]
            values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors if tensor is not None]
            saved.append((module, attributes, values))
    return saved


def _restore(saved: list) -> None:
    for module, attributes, values in saved:
        module.__dict__.clear()
        module.__dict__.update({key: dict(value) if isinstance(value, dict) else value
                                for key, value in attributes.items()})
        with torch.inference_mode():
            for tensor, value in values:
                tensor.data.copy_(value)
        get_layerwise_info(module).reset()


def _never_share_own() -> None:
    """A drafter that ships its own head or embedding keeps it, even when it equals the target's at start-up.

    vLLM would share the equal module, and the next swap would write into the target's head: its output would change
    silently. Every rank decides alike, because only the checkpoint's names decide.
    """
    for name, own in (("_maybe_share_lm_head", "has_own_lm_head"),
                      ("_maybe_share_embeddings", "has_own_embed_tokens")):
        setattr(SpecDecodeBaseProposer, name, _unless_own(getattr(SpecDecodeBaseProposer, name), own))
    v2_eagle._should_share = lambda eagle, own, draft, target: not _has(eagle, own)


def _unless_own(share, own: str):
    @functools.wraps(share)
    def share_unless_own(self, target_model):
        if not _has(self.model, own):
            share(self, target_model)
    return share_unless_own


def _has(model: nn.Module, own: str) -> bool:
    """vLLM sets these flags while it reads a checkpoint that holds the tensor; other models have no such attribute."""
    return hasattr(model, own) and bool(model.__dict__.get(own, False))


_never_share_own()
prepare_runners()
mend_cpu_sampling()
end_with_parent()
