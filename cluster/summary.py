"""What a run comes to: one object for machines, one page for people."""

from dataclasses import dataclass
from pathlib import Path

from torchspec_lite.acceptance import Counts

WAIT = {"wait": "wait for data"}
"""Phases whose name says too little on a page for people."""


@dataclass(frozen=True)
class Measurement:
    """What vLLM counted while the pool answered all held-out prompts with one drafter version."""

    version: int
    counts: Counts


def summarize(run_dir: Path, state: str, account: dict, trained: dict, before: Measurement | None,
              after: Measurement | None, predicted: float | None, seconds: float, profiled: bool, next_command: str) -> tuple[dict, str]:
    """The closing object and the closing page of a run. The page of a `profiled` one says where the time went."""
    samples = account["samples"]
    settled = samples["durable"] + samples["rejected"] + samples["queued"]
    values = {
        "run_dir": str(run_dir), "state": state, "failed": state == "failed", "seconds": round(seconds, 1),
        "samples": samples, "balanced": settled == samples["all"], "rejected": account["reasons"],
        "traffic": account["traffic"],
        "drafter": {"version": trained["version"], "step": trained["step"]}, "tokens_trained": trained["tokens"],
        "phases": {name: round(seconds, 1) for name, seconds in trained["phases"].items()},
        "trace": trained["trace"],
        "acceptance": {
            "served_before": before.counts.acceptance_length if before else None,
            "served_after": after.counts.acceptance_length if after else None, "predicted": predicted,
            "per_position_before": list(before.counts.per_position) if before else None,
            "per_position_after": list(after.counts.per_position) if after else None},
    }
    return values, "\n".join(_page(values, before, after, profiled, next_command))


def _page(values, before, after, profiled, next_command):
    samples = values["samples"]
    if before and after:
        positions = len(after.counts.per_position)
        yield "held-out prompts, measured by vLLM" + "".join(f"{f'position {k + 1}':>12}" for k in range(positions))
        for name, measured in (("before", before), ("after", after)):
            rates = "".join(f"{rate:>12.1%}" for rate in measured.counts.per_position)
            yield (f"{name:<7} v{measured.version:<4} acceptance length {measured.counts.acceptance_length:.2f}"
                   f"{'':<3}{rates}").rstrip()
        if values["acceptance"]["predicted"] is not None:
            yield f"predicted by the trainer: acceptance length {values['acceptance']['predicted']:.2f}"
    parts = [f"{samples[state]} {state}" for state in ("durable", "rejected", "queued")]
    others = [f"{samples[state]} {state}" for state in ("leased", "streamed", "trained") if samples[state]]
    yield f"samples: {' + '.join(parts + others)} = {samples['all']}" + ("" if values["balanced"] else "  (not settled)")
    served = values["traffic"]
    if served["all"]:
        yield f"served requests: {served['durable']} durable + {served['rejected']} rejected = {served['all']}"
    for reason, number in values["rejected"].items():
        yield f"  rejected, {reason}: {number}"
    version = values["drafter"]["version"]
    yield (f"{values['state']} after {values['seconds'] / 60:.1f} minutes: step {values['drafter']['step']}, "
           f"{'no version yet' if version is None else f'version {version}'}, {values['tokens_trained']:,} tokens trained")
    if profiled:
        yield from _profile(values)
    yield f"run directory: {values['run_dir']}"
    if version is not None:
        yield f"next: {next_command}"


def _profile(values):
    total = sum(values["phases"].values())
    yield "time of trainer rank 0 by phase"
    for name, seconds in values["phases"].items():
        yield f"  {WAIT.get(name, name):<14}{seconds:>9.1f} s{seconds / max(total, 0.1):>8.1%}"
    yield f"trace: {values['trace'] or 'none, the run had too few optimizer steps'}"
