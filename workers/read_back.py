"""Read a drafter's weights back out of a running vLLM engine, packed or not, and compare them with a checkpoint."""

import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

COLUMNS = 8
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def read_back(draft: nn.Module, checkpoint: dict[str, torch.Tensor], borrowed: set[nn.Module]) -> str:
    """Compare what the engine's drafter computes with what the checkpoint says, bit for bit; return a digest of it.

    A matrix answers one-hot inputs with its own columns, exactly, even where the engine keeps only a packed copy (vLLM
    on a CPU empties the parameter): columns spread evenly over each matrix are compared, vectors and the vocabulary
    map whole. Under tensor parallelism every rank compares its own shard; there is no communication.

    draft: vLLM's draft model. checkpoint: tensors by file name. borrowed: modules of the target, not looked into.
    Returns 16 hex digits of a SHA-256 over all that was read. Raises ValueError naming the first tensor that differs.
    """
    tensors = {plain_name(name): tensor for name, tensor in checkpoint.items()}
    digest = hashlib.sha256()
    for name, got, expected in _values(draft, tensors, borrowed):
        expected = expected.to(device=got.device, dtype=got.dtype)
        if not torch.equal(got, expected):
            raise ValueError(f"the engine computes with other values of {name} than the checkpoint holds")
        digest.update(got.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def plain_name(name: str) -> str:
    """A checkpoint's tensor name as vLLM's module path without `model.`: both spellings of the one layer are used."""
    return name.replace("midlayer.", "layers.0.").replace("d2t", "draft_id_to_target_id")


def _values(draft: nn.Module, tensors: dict, borrowed: set) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for path, module in draft.named_modules():
        if module in borrowed:
            continue
        name = path.removeprefix("model.")
        if isinstance(module, LinearBase | ParallelLMHead):
            prefix, _, leaf = name.rpartition(".")
            parts = [f"{prefix}.{part}.weight" if prefix else f"{part}.weight" for part in STACKED.get(leaf, (leaf,))]
            shard = _local_shard(module, [tensors[part] for part in parts])  # [rows, columns]
            yield name, *_columns(module, shard)
        elif isinstance(module, VocabParallelEmbedding):
            shard = _local_shard(module, [tensors[f"{name}.weight"]])
            yield name, module.weight[:len(shard)], shard
        else:
            for leaf, parameter in module.named_parameters(recurse=False):
                full = f"{name}.{leaf}" if name else leaf
                yield full, parameter.data, tensors[full]


def _columns(module: nn.Module, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = torch.linspace(0, shard.shape[1] - 1, min(COLUMNS, shard.shape[1])).round().long()
    one_hot = torch.zeros(len(wanted), shard.shape[1], dtype=module.weight.dtype, device=module.weight.device)
    one_hot[torch.arange(len(wanted)), wanted] = 1
    got = module.quant_method.apply(module, one_hot)[:, :shard.shape[0]]  # [C, rows]; padding rows are cut off
    return got, shard[:, wanted.to(shard.device)].T


def _local_shard(module: nn.Module, parts: list[torch.Tensor]) -> torch.Tensor:
    """This rank's rows and columns of a full matrix, or of matrices stacked by rows, as vLLM's loaders cut them."""
    if isinstance(module, VocabParallelEmbedding):
        rows = module.shard_indices
        return parts[0][rows.org_vocab_start_index:rows.org_vocab_end_index]
    if module.tp_size == 1 or isinstance(module, ReplicatedLinear):
        return torch.cat(parts)
    if isinstance(module, RowParallelLinear):
        return parts[0].chunk(module.tp_size, dim=1)[module.tp_rank]
    if isinstance(module, QKVParallelLinear):
        query, key, value = parts
        heads = module.num_heads * module.head_size
        kv_heads = module.num_kv_heads * module.head_size
        first = module.tp_rank // module.num_kv_head_replicas * kv_heads
        return torch.cat([query.narrow(0, module.tp_rank * heads, heads),
                          key.narrow(0, first, kv_heads), value.narrow(0, first, kv_heads)])
    return torch.cat([part.chunk(module.tp_size)[module.tp_rank] for part in parts])
