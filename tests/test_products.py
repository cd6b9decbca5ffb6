"""Products of the training step whose layout or memory depends on the machine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchspec_lite import compiling
from torchspec_lite.scratch import scratch


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("left, right", [(24, 16), (16, 24)])
@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 2 ** -8), (torch.float32, 1e-6)])
def test_weight_gradient_is_the_transposed_product(has_amx, left, right, dtype, error, monkeypatch):
    monkeypatch.setattr(compiling, "_has_amx", lambda: has_amx)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(100, width, generator=generator).to(dtype) for width in (left, right))
    product = compiling.outer(x, y, True)
    wanted = x.double().t() @ y.double()
    assert product.dtype == torch.float32 and product.shape == (left, right)
    assert (product - wanted).abs().max() <= error * wanted.abs().max()


def test_scratch_is_one_block_of_a_thread():
    like = torch.empty(0)
    first = scratch(4, 8, like)
    assert first.shape == (4, 8) and first.dtype == torch.float32
    assert scratch(2, 3, like.bfloat16()).data_ptr() == first.data_ptr()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(scratch, 4, 8, like).result().data_ptr() != first.data_ptr()
