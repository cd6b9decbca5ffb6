"""Sampled requests on a CPU, mended: vLLM 0.32 gives their draft tokens no temperature there.

`vllm.v1.sample.rejection_sampler.expand_batch_to_tokens` hands each request's temperature, top-k and top-p to its draft
tokens. Its CPU kernel (`vllm.utils.cpu_triton_utils._expand_kernel_impl`) writes them into a copy, and what is used
instead is whatever the memory held. One sampled request then spoils every answer of its batch, greedy ones too.
"""

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


def mend_cpu_sampling() -> None:
    """Call it in the worker, before it answers."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0,
                           replace_to: int = 0) -> torch.Tensor:
    """x [requests] with each value as often as its request has tokens: [num_tokens], in x's dtype.

    cu_num_tokens [requests]: tokens of the requests up to this one. `replace_from` becomes `replace_to`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts.long(), output_size=num_tokens)
