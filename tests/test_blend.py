"""Weights between two drafters, by hand."""

import pytest
import torch

from tests.tiny import make_tiny_target
from torchspec_lite.blend import blend
from torchspec_lite.config import DrafterConfigSection
from torchspec_lite.drafter import init_drafter
from torchspec_lite.target import describe, load_head


@pytest.fixture(scope="module")
def make_drafter(tmp_path_factory):
    info = describe(make_tiny_target(tmp_path_factory.mktemp("target")))
    head = load_head(info, torch.float32)
    return lambda seed, first=0: init_drafter(info, head, DrafterConfigSection(), torch.arange(first, first + 40),
                                              torch.Generator().manual_seed(seed), (1, 2, 3))


def test_weights_lie_on_the_line(make_drafter):
    anchor, trained = make_drafter(1), make_drafter(2)
    before = [weight.clone() for weight in trained.parameters()]
    between = blend(anchor, trained, 0.75)
    for name, weight in between.named_parameters():
        expected = 0.25 * anchor.get_parameter(name) + 0.75 * trained.get_parameter(name)
        torch.testing.assert_close(weight.detach(), expected.detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(between.draft_ids, trained.draft_ids)
    assert all(map(torch.equal, before, trained.parameters()))


def test_drafters_of_another_vocabulary_have_nothing_between_them(make_drafter):
    with pytest.raises(ValueError, match="vocabulary"):
        blend(make_drafter(1), make_drafter(2, first=3), 0.5)
