"""vLLM's rejection sampler on a CPU with our part in it: what it samples is the target's distribution, whatever is drafted."""

import math

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from workers.cpu_sampling import expand_batch_to_tokens, mend_cpu_sampling

pytestmark = [pytest.mark.skipif(not current_platform.is_cpu(), reason="this is about vLLM's CPU kernels"),
              pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op`:FutureWarning")]
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
REQUESTS = 6000


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()  # as a worker does at its start
    mend_cpu_sampling()


def sampled(temperatures: torch.Tensor, drafted: list[int], top_k: int | None = None) -> torch.Tensor:
    """Tokens [requests, drafts + 1] that come of the same drafts and the same logits for requests of these temperatures."""
    count, drafts = len(temperatures), len(drafted)
    metadata = SamplingMetadata(
        temperature=temperatures, all_greedy=False, all_random=bool((temperatures > 0).all()), top_p=None,
        top_k=None if top_k is None else torch.full((count,), top_k, dtype=torch.int32), generators={}, max_num_logprobs=None,
        no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.zeros(count), presence_penalties=torch.zeros(count),
        repetition_penalties=torch.ones(count), output_token_ids=[], allowed_token_ids_mask=None, bad_words_token_ids={},
        logitsprocs=LogitsProcessors())
    ends = torch.arange(1, count + 1, dtype=torch.int32) * drafts
    logits = rejection_sampler.apply_sampling_constraints(LOGITS.repeat(count * drafts, 1), ends, metadata)
    return rejection_sampler.rejection_sample(
        torch.tensor(drafted, dtype=torch.int32).repeat(count), [drafts] * count, drafts, ends, None, logits,
        torch.full((count, 1), 4, dtype=torch.int32), metadata)


def agrees(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Frequencies within four standard deviations of the probabilities."""
    shares = torch.bincount(tokens.long(), minlength=len(expected)) / len(tokens)
    for share, p in zip(shares.tolist(), expected.tolist()):
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / len(tokens))


def test_values_are_handed_to_each_requests_tokens():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expand_batch_to_tokens(torch.tensor([0.5, 0.7, 0.0]), ends, 5, 0, 1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0] and found.dtype == torch.float32
    found = expand_batch_to_tokens(torch.tensor([3, 9, 7], dtype=torch.int32), ends, 5)
    assert found.tolist() == [3, 3, 7, 7, 7] and found.dtype == torch.int32


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("drafted", [0, 3])
def test_the_first_token_has_the_targets_distribution(temperature, drafted):
    torch.manual_seed(0)
    tokens = sampled(torch.full((REQUESTS,), temperature), [drafted, 1])
    agrees(tokens[:, 0], torch.softmax(LOGITS / temperature, 0))
    second = tokens[tokens[:, 0] == drafted][:, 1]  # only what follows an accepted draft
    agrees(second, torch.softmax(LOGITS / temperature, 0))


def test_top_k_reaches_the_drafts():
    torch.manual_seed(0)
    tokens = sampled(torch.ones(REQUESTS), [3, 1], top_k=2)
    agrees(tokens[:, 0], torch.softmax(torch.tensor([2.0, 1.0, -math.inf, -math.inf, -math.inf]), 0))


def test_sampled_requests_leave_greedy_ones_beside_them_alone():
    temperatures = torch.tensor([0.0, 1.0, 0.0, 2.0] * 500)
    tokens = sampled(temperatures, [0, 0])
    assert tokens[temperatures == 0].tolist() == [[0, 0, 4]] * 1000  # both accepted, then the bonus token
    tokens = sampled(temperatures, [1, 0])
    assert tokens[temperatures == 0].tolist() == [[0, -1, -1]] * 1000
