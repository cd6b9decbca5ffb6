"""Before a target worker streams anything, one prompt's captured states are held against what they must be."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from torchspec_lite.sample import DTYPES, Sample
from torchspec_lite.stream import Expectation, Receiver
from torchspec_lite.target import FrozenHead, TargetInfo, load_head, weight_files
from workers.ticket import Ticket, sampling

PROBE_TEXT = "Explain in two sentences why the sky is blue, then write a function that adds two numbers."
PROBE_ANSWER_TOKENS = 24
# Targets of more bytes than this are not loaded a second time; their head's agreement is checked alone.
PLAIN_FORWARD_BYTES = 3 << 30
# Largest relative error of a layer's states that rounding explains, against a forward in fp32.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
# Least share of greedy tokens that the frozen head must find again in the captured last state (ties may flip some).
HEAD_AGREEMENT = 0.75
RECEIVE_LIMIT_S = 60.0


class ProbeError(Exception):
    """The engine captures other states than the target's: nothing learned from them would be right."""


@dataclass(frozen=True)
class ProbeReport:
    """Relative error of each captured layer (None: not compared) and the share of tokens the head finds again."""

    errors: dict[int, float] | None
    head_agreement: float


async def probe_states(worker) -> ProbeReport:
    """Send a prompt through `worker.capture` to a receiver of this process and check the sample that arrives.

    Raises ProbeError naming the layer and its error.
    """
    info, target = worker.info, worker.config.target
    prompt = worker.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][:target.max_model_len // 2]
    answer = min(PROBE_ANSWER_TOKENS, target.max_model_len - len(prompt))
    expect = Expectation(info.fingerprint, worker.layer_ids, DTYPES[target.dtype], info.hidden_size,
                         target.max_model_len)
    receiver = Receiver("127.0.0.1", 2 * target.max_model_len * _bytes_per_token(expect), 4, expect)
    try:
        ticket = Ticket("probe", 1, 0, "held_out", receiver.endpoint, None)
        params = sampling(ticket, answer, 0.0, None)
        params.ignore_eos = True
        _, outcome = await worker.capture(prompt, params, ticket)
        if outcome.kind != "sent":
            raise ProbeError(f"target {info.path}: the probe prompt could not be streamed: {outcome.detail}")
        sample = await asyncio.to_thread(receiver.get, RECEIVE_LIMIT_S)
        report = await asyncio.to_thread(check_states, sample.clone(), len(prompt), info, target.dtype)
        receiver.release(sample)
        return report
    finally:
        await worker.drop_receiver(receiver.endpoint)
        receiver.close()


def check_states(sample: Sample, prompt_tokens: int, info: TargetInfo, dtype: str) -> ProbeReport:
    """Compare a greedy sample's states with a plain forward (small targets) and with the frozen head's greedy tokens.

    Raises ProbeError.
    """
    errors = None
    if sum(path.stat().st_size for path in weight_files(Path(info.path))) <= PLAIN_FORWARD_BYTES:
        errors = compare_layers(sample, plain_forward(info, sample.token_ids[:-1]), info, TOLERANCE[dtype])
    agreement = head_agreement(sample, prompt_tokens, load_head(info, torch.float32))
    if agreement < HEAD_AGREEMENT:
        raise ProbeError(
            f"target {info.path}: its head finds only {agreement:.0%} of the engine's greedy tokens in the captured "
            f"last state (layer id {info.num_layers}, before the norm); expected at least {HEAD_AGREEMENT:.0%}")
    return ProbeReport(errors, agreement)


def compare_layers(sample: Sample, reference: list[torch.Tensor], info: TargetInfo,
                   tolerance: float) -> dict[int, float]:
    """Relative error of each captured layer id against `reference`, N + 1 states [n - 1, H] each.

    Raises ProbeError when one is beyond `tolerance`, naming the layer whose states they look like instead.
    """
    captured = {id: sample.aux[:, place] for place, id in enumerate(sample.layer_ids)}
    captured[info.num_layers] = sample.last
    errors = {}
    for id, states in captured.items():
        every = [relative_error(states, layer) for layer in reference]
        errors[id] = every[id]
        if not every[id] <= tolerance:
            nearest = min(range(len(every)), key=every.__getitem__)
            raise ProbeError(
                f"target {info.path}: the states captured for layer id {id} are off a plain forward's by "
                f"{every[id]:.2g} of their size (at most {tolerance:g} is rounding); nearest is layer id {nearest}, "
                f"{every[nearest]:.2g}")
    return errors


def relative_error(states: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean over tokens, each by its own size: a few tokens have states hundreds of times larger than all others."""
    states, reference = states.float(), reference.float()
    return float(((states - reference).norm(dim=-1) / reference.norm(dim=-1)).mean())


@torch.no_grad()
def plain_forward(info: TargetInfo, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """Residual streams 0 … N of a Hugging Face forward in fp32 on the CPU, the last one before the final norm."""
    model = AutoModelForCausalLM.from_pretrained(info.path, dtype=torch.float32, local_files_only=True).eval()
    last = []
    hook = model.base_model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    states = model(token_ids[None].long(), output_hidden_states=True).hidden_states
    hook.remove()
    # The model's own last entry is after the norm.
    return [layer[0] for layer in (*states[:-1], last[0])]  # N + 1 times [T, H]


def head_agreement(sample: Sample, prompt_tokens: int, head: FrozenHead) -> float:
    """Share of generated tokens that are the frozen head's argmax over the state before them."""
    states = sample.last[prompt_tokens - 1:].float()  # [G, H]
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + head.norm_eps) * head.norm_weight.float()
    found = (normed @ head.lm_head.float().T).argmax(-1)  # [G]
    return float((found == sample.token_ids[prompt_tokens:]).float().mean())


def _bytes_per_token(expect: Expectation) -> int:
    return (len(expect.layer_ids) + 1) * expect.hidden_size * expect.dtype.itemsize + 64
