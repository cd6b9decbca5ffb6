"""A drafter between two: what was learned last, taken part of the way."""

import torch

from torchspec_lite.drafter import Drafter


@torch.no_grad()
def blend(anchor: Drafter, trained: Drafter, share: float) -> Drafter:
    """A new drafter whose weights lie `share` of the way from `anchor`'s to `trained`'s, fp32, on the CPU.

    Trained on few samples, a drafter goes further than they warrant, and away from what it knew. Weights between the
    two often draft better than both on the new traffic, and forget less of the old (WiSE-FT: Wortsman et al.,
    arXiv 2109.01903). Raises ValueError for drafters of different shape or vocabulary.
    """
    if anchor.config != trained.config or not torch.equal(anchor.draft_ids.cpu(), trained.draft_ids.cpu()):
        raise ValueError("drafters of different shape or vocabulary have nothing between them")
    between = Drafter(trained.config, trained.draft_ids.cpu())
    for name, weight in between.named_parameters():
        weight.copy_(torch.lerp(anchor.get_parameter(name).float(), trained.get_parameter(name).float(), share))
    return between
