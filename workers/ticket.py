"""What a capture request carries into the engine, and what comes back of its sample."""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind


@dataclass(frozen=True)
class Ticket:
    """Rides in a request's `kv_transfer_params`, so that its states become a sample and find their receiver.

    `mask_runs` are [start, end) pairs of supervised tokens, None where the target writes the answer: every token it
    writes is supervised then. `last_token` is set in replay: the prompt is the sample without its last token (which
    needs no states), and the one token that the engine must generate is thrown away. `key_file` holds the CURVE keys
    for the endpoint, so that no key ever lies in a config that an engine may print.
    """

    sample: str
    attempt: int
    ordinal: int
    purpose: str
    endpoint: str
    key_file: str | None
    mask_runs: list[list[int]] | None = None
    last_token: int | None = None

    def extra_args(self) -> dict[str, Any]:
        """For `SamplingParams.extra_args`."""
        return {"kv_transfer_params": {"ticket": asdict(self)}}


def read_ticket(kv_transfer_params: dict[str, Any] | None) -> Ticket | None:
    """The ticket of a request, None for one whose states nobody asked for."""
    values = (kv_transfer_params or {}).get("ticket")
    return None if values is None else Ticket(**values)


@dataclass(frozen=True)
class Outcome:
    """What became of one sample.

    `kind`: "sent" (it is with its sender), "failed" (its receiver is gone or gave no credit; another try may do) or
    "rejected" (the sample itself cannot be sent). `reason` is a short stable word, `detail` is for people.
    """

    sample: str
    attempt: int
    kind: str
    reason: str = ""
    detail: str = ""


def sampling(ticket: Ticket | None, max_tokens: int, temperature: float, seed: int | None) -> SamplingParams:
    """Greedy at temperature 0; else sampled with a seed of its own, so that the same lease gives the same answer."""
    return SamplingParams(
        temperature=temperature, seed=None if temperature == 0 else seed, max_tokens=max_tokens,
        detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, extra_args=ticket.extra_args() if ticket else None)


def sample_seed(run_seed: int, ordinal: int) -> int:
    """A sample's own seed: it depends on the run's seed and the sample's place, not on worker or attempt."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{ordinal}".encode(), digest_size=6).digest(), "big")
