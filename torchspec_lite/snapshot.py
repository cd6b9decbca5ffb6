"""The live state of a run: written by the driver to `run_dir/status.json`, read by status, dashboard and people."""

import os
import time as clock
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchspec_lite.errors import UserError
from torchspec_lite.ledger import STATES, Ledger

SCHEMA = 1
WRITE_EVERY_S = 1.0
SILENT_AFTER_S = 20.0
"""A running run whose snapshot is older than this has lost its driver, or the driver hangs."""
ENDINGS = {
    "finished": "The run has finished; nothing waits.",
    "stopped": "The run was stopped; nothing waits.",
    "failed": "The run has failed; nothing waits.",
}
STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Bytes and samples that wait somewhere, against what may wait there."""

    __pydantic_config__ = STRICT
    bytes: int = 0
    budget_bytes: int = 0
    samples: int = 0
    budget_samples: int = 0

    @property
    def fill(self) -> float:
        """Share of the budget in use, by the tighter of bytes and samples; 0 without a budget."""
        parts = ((self.bytes, self.budget_bytes), (self.samples, self.budget_samples))
        return max((used / budget for used, budget in parts if budget), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Rates, waits and buffers over the last seconds. Rates are tokens per second, waits shares of the time."""

    __pydantic_config__ = STRICT
    target_workers: int = 0
    trainer_ranks: int = 0
    streamed_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    target_wait: float = 0.0
    """Share of the time that the senders were held back for want of credit."""
    trainer_wait: float = 0.0
    """Share of the time that the trainers waited for samples."""
    sender: Buffer = Buffer()
    """All senders together."""
    receiver: Buffer = Buffer()
    """All receivers together; what is not in use is the credit left."""
    reuse: Buffer = Buffer()


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One serving replica."""

    __pydantic_config__ = STRICT
    name: str
    version: int | None = None
    """Drafter version it serves; None: no drafter."""
    state: Literal["starting", "ready", "swapping", "down"] = "starting"
    role: Literal["serving", "canary"] = "serving"
    acceptance_length: float | None = None
    running: int = 0
    waiting: int = 0
    requests: int = 0
    tokens: int = 0
    """Tokens written since it started."""
    tokens_per_s: float = 0.0
    drafting_pays_up_to: int | None = None
    """Most requests at once for which drafting pays at this acceptance length; None: not known, or not drafting now."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What of the served requests is learned from. Counts are since the replicas and trainers now alive started."""

    __pydantic_config__ = STRICT
    requests: int = 0
    excluded: int = 0
    """Requests whose sender forbade capture."""
    sampled: int = 0
    second_answers: int = 0
    """Answers to sampled prompts that the target gave for the trainers alone."""
    sent: int = 0
    sent_tokens: int = 0
    left_out: dict[str, int] | None = None
    """Sampled requests that were not sent, by reason."""
    samples: dict[str, int] | None = None
    """Those that reached a trainer to be trained on, by the ledger's states."""
    window: int = 0
    """Requests that the last looks predicted on, before they were trained."""
    window_serving: float | None = None
    """Acceptance length predicted on the window for the serving version."""
    window_candidate: float | None = None
    """And for the trainer's weights at the last look."""
    resting: bool = False
    """Training rests: nothing was gained for a while."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something a person should look at now."""

    __pydantic_config__ = STRICT
    time: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run at `updated` (seconds since the epoch, as all times here)."""

    __pydantic_config__ = STRICT
    schema: int = SCHEMA
    run: str
    state: Literal["starting", "running", "draining", "finished", "stopped", "failed"]
    reason: str | None = None
    """Why it stopped or failed, in one sentence."""
    started: float
    updated: float
    elapsed_s: float = 0.0
    """Time in all attempts of the run; a resumed run counts on."""
    prompts_done: int = 0
    prompts_total: int | None = None
    """None: open-ended, fed by served traffic."""
    samples: dict[str, int] | None = None
    """Samples of the ledger by state, training purpose only."""
    step: int = 0
    max_steps: int | None = None
    skipped_steps: int = 0
    tokens_streamed: int = 0
    tokens_trained: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    predicted: float | None = None
    """Acceptance length predicted on held-out samples, walked as serving does."""
    served_before: float | None = None
    """Acceptance length that requests got from the first drafter served."""
    served: float | None = None
    """Acceptance length that requests get now."""
    version: int | None = None
    """Newest drafter version exported."""
    serving_version: int | None = None
    """Version that the pool serves; None: no drafter yet."""
    pipeline: Pipeline = Pipeline()
    replicas: tuple[Replica, ...] = ()
    traffic: Traffic | None = None
    """None while no traffic is captured."""
    alarms: tuple[Alarm, ...] = ()
    links: dict[str, str] | None = None
    """Addresses of this run: `endpoint`, `dashboard`, `prometheus`."""


_ADAPTER = TypeAdapter(Snapshot)


class SnapshotWriter:
    """Writes the snapshots it is offered to `run_dir/status.json`, at most one a second."""

    def __init__(self, run_dir: Path | str, every_s: float = WRITE_EVERY_S):
        self._run_dir, self._every_s = Path(run_dir), every_s
        self._next = 0.0

    def offer(self, snapshot: Snapshot) -> bool:
        """Write it unless the last write is too young; tells whether it was written."""
        now = clock.monotonic()
        if now < self._next:
            return False
        self._next = now + self._every_s
        write_snapshot(self._run_dir, snapshot)
        return True


def write_snapshot(run_dir: Path | str, snapshot: Snapshot) -> None:
    """Replace `run_dir/status.json` in one step. Non-finite numbers become null."""
    path = Path(run_dir) / "status.json"
    partial = path.with_name("status.json.partial")
    partial.write_bytes(_ADAPTER.dump_json(snapshot, indent=1))
    os.replace(partial, path)


def read_snapshot(run_dir: Path | str) -> Snapshot:
    """Read it back. Raises UserError when there is none or it is not one of this schema."""
    path = Path(run_dir) / "status.json"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; give the directory of a run that has started") from error
    try:
        snapshot = _ADAPTER.validate_json(text)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3])
        raise UserError(f"{path}: not a status of this version of torchspec-lite: {faults}") from error
    if snapshot.schema != SCHEMA:
        raise UserError(f"{path}: schema {snapshot.schema}, this torchspec-lite reads {SCHEMA}; use the run's version")
    return snapshot


def is_over(snapshot: Snapshot) -> bool:
    """Whether the run has ended, well or not."""
    return snapshot.state in ENDINGS


def is_silent(snapshot: Snapshot, now: float) -> bool:
    """Whether a run that should be alive has not written for too long."""
    return not is_over(snapshot) and now - snapshot.updated > SILENT_AFTER_S


def status(run_dir: Path | str) -> dict:
    """What `torchspec-lite status RUN_DIR --json` prints: the live state, with the ledger's own counts.

    `samples` {queued, leased, streamed, trained, durable, rejected}, `drafter` {version, serving, step},
    `acceptance` {served_before, served_after, predicted}, and the progress, pipeline, replicas and alarms of the run.
    """
    snapshot = read_snapshot(run_dir)
    now = clock.time()
    ledger = Ledger(Path(run_dir) / "ledger.sqlite", read_only=True)
    try:
        account = ledger.account("train")
        newest = max(ledger.versions(), key=lambda row: row["version"], default={"version": None, "step": None})
    finally:
        ledger.close()
    tree = _ADAPTER.dump_python(snapshot, mode="json")
    return {
        "run": snapshot.run,
        "state": "silent" if is_silent(snapshot, now) else snapshot.state,
        "reason": snapshot.reason,
        "elapsed_s": snapshot.elapsed_s,
        "updated": snapshot.updated,
        "prompts": {"done": snapshot.prompts_done, "total": snapshot.prompts_total},
        "samples": {state: account[state] for state in STATES},
        "drafter": {"version": newest["version"], "serving": snapshot.serving_version, "step": newest["step"]},
        "acceptance": {
            "served_before": snapshot.served_before,
            "served_after": snapshot.served,
            "predicted": snapshot.predicted,
        },
        "training": {key: tree[key] for key in ("step", "max_steps", "skipped_steps", "loss", "learning_rate")},
        "tokens": {"streamed": snapshot.tokens_streamed, "trained": snapshot.tokens_trained},
        "pipeline": tree["pipeline"],
        "waiting": waiting_sentence(snapshot),
        "drafting": drafting_sentence(snapshot),
        "replicas": tree["replicas"],
        "alarms": tree["alarms"],
        "links": tree["links"],
    }


def waiting_sentence(snapshot: Snapshot) -> str:
    """Who waits for whom and what to do, in one sentence, from the rates and buffers."""
    pipe, counts = snapshot.pipeline, snapshot.samples or {}
    if snapshot.state == "starting":
        return "The run is starting: the engines load the target."
    if snapshot.state in ENDINGS:
        return ENDINGS[snapshot.state]
    if not pipe.target_workers and not pipe.trainer_ranks:
        return "No target worker and no trainer is up yet."
    if pipe.trainer_wait >= 0.2 and pipe.trainer_wait >= pipe.target_wait:
        share = f"{pipe.trainer_wait:.0%} of the time"
        if snapshot.state == "draining" or (counts and not counts.get("queued") and not counts.get("leased")):
            return f"Trainers wait {share}: no prompt is left to capture; the run is draining."
        if pipe.receiver.fill > 0.8:
            return (
                f"Trainers wait {share} although their buffer is full: it holds less than one batch; "
                "raise stream.budget_mib and stream.max_samples."
            )
        return f"Trainers wait for the target {share}; add target workers (now {pipe.target_workers})."
    if pipe.target_wait >= 0.2:
        return (
            f"The target waits for the trainers {pipe.target_wait:.0%} of the time; "
            f"add trainer ranks (now {pipe.trainer_ranks}) or train each sample fewer times."
        )
    if not pipe.streamed_tokens_per_s and not pipe.trained_tokens_per_s:
        return "Nothing flows at this moment: the first samples are on their way."
    return "Target and trainers keep pace; nobody waits."


def drafting_sentence(snapshot: Snapshot) -> str | None:
    """That drafting costs more than it gives at the present load, and what to do; None when it does not, or nobody
    knows."""
    costly = [replica for replica in snapshot.replicas
              if replica.drafting_pays_up_to is not None and replica.running > replica.drafting_pays_up_to]
    if not costly or is_over(snapshot):
        return None
    busiest = max(costly, key=lambda replica: replica.running)
    return (f"Drafting costs more than it gives at this load: at acceptance length {_number(busiest.acceptance_length)} it "
            f"pays up to {busiest.drafting_pays_up_to} requests at once and {busiest.running} run; set "
            "serve.max_concurrency_for_speculation=auto.")


def sentences(snapshot: Snapshot) -> str:
    """What a person should know now, for the page and the terminal."""
    return " ".join(filter(None, (waiting_sentence(snapshot), drafting_sentence(snapshot), resting_sentence(snapshot))))


def resting_sentence(snapshot: Snapshot) -> str | None:
    """Whether training rests, where served traffic is learned from."""
    if snapshot.traffic is None or not snapshot.traffic.resting or is_over(snapshot):
        return None
    return "Training rests: the last looks gained nothing on present traffic; it wakes when the drafter gets worse there."


def prompts_in_words(snapshot: Snapshot) -> str:
    """Prompts done with, of all, and those that have some of their passes before them."""
    total = f" of {snapshot.prompts_total:,}" if snapshot.prompts_total else ""
    streamed = (snapshot.samples or {}).get("streamed", 0)
    return f"{snapshot.prompts_done:,}{total}" + (f", {streamed:,} in training" if streamed else "")


def progress_line(snapshot: Snapshot) -> str:
    """One line for the terminal."""
    parts = [format_duration(snapshot.elapsed_s), f"prompts {prompts_in_words(snapshot)}", f"step {snapshot.step:,}"]
    parts.append(f"{format_count(snapshot.tokens_trained)} tokens, {snapshot.pipeline.trained_tokens_per_s:,.0f}/s")
    if snapshot.loss is not None:
        parts.append(f"loss {snapshot.loss:.3f}")
    if snapshot.predicted is not None:
        parts.append(f"predicted AL {snapshot.predicted:.2f}")
    if snapshot.served is not None:
        before = f"{snapshot.served_before:.2f} → " if snapshot.served_before is not None else ""
        parts.append(f"served AL {before}{snapshot.served:.2f}")
    if snapshot.version is not None:
        serving = "" if snapshot.serving_version is None else f" (serving v{snapshot.serving_version})"
        parts.append(f"v{snapshot.version}{serving}")
    if snapshot.alarms:
        parts.append(f"ALARM {snapshot.alarms[-1].text}")
    return " · ".join(parts)


def ended(snapshot: Snapshot, state: Literal["finished", "stopped", "failed"], reason: str | None) -> Snapshot:
    """The last snapshot of a run: nothing flows any more, and its serving pool is gone."""
    pipeline = replace(
        snapshot.pipeline, streamed_tokens_per_s=0.0, trained_tokens_per_s=0.0, target_wait=0.0, trainer_wait=0.0
    )
    return replace(snapshot, state=state, reason=reason, pipeline=pipeline, replicas=(), updated=clock.time())


def format_duration(seconds: float) -> str:
    """`3 d 04 h`, `2 h 05 min`, `7 min 30 s` or `42 s`."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def format_count(number: float) -> str:
    """`987`, `12.3k`, `4.56M`, `7.80G`."""
    for size, suffix, digits in ((1e9, "G", 2), (1e6, "M", 2), (1e3, "k", 1)):
        if abs(number) >= size:
            return f"{number / size:.{digits}f}{suffix}"
    return f"{number:.0f}"


def render_status(values: dict) -> str:
    """The object of `status` as lines for a person."""
    samples, drafter, acceptance = values["samples"], values["drafter"], values["acceptance"]
    total = values["prompts"]["total"]
    lines = [
        f"run        {values['run']}: {values['state']}" + (f", {values['reason']}" if values["reason"] else ""),
        f"elapsed    {format_duration(values['elapsed_s'])}",
        f"prompts    {values['prompts']['done']:,}" + (f" of {total:,}" if total else ""),
        "samples    " + ", ".join(f"{count:,} {state}" for state, count in samples.items()),
        f"training   step {values['training']['step']:,}, loss {_number(values['training']['loss'], 3)}",
        f"drafter    newest {_version(drafter['version'])}, serving {_version(drafter['serving'])}",
        f"acceptance served {_number(acceptance['served_before'])} at first, "
        f"{_number(acceptance['served_after'])} now; predicted {_number(acceptance['predicted'])}",
        f"waiting    {values['waiting']}",
    ]
    if values["drafting"]:
        lines.append(f"drafting   {values['drafting']}")
    for replica in values["replicas"]:
        lines.append(
            f"replica    {replica['name']}: {replica['state']}, {_version(replica['version'])}, "
            f"AL {_number(replica['acceptance_length'])}, {replica['running']} running"
        )
    lines += [f"ALARM      {alarm['text']}" for alarm in values["alarms"]]
    lines += [f"{name:10} {address}" for name, address in (values["links"] or {}).items()]
    return "\n".join(lines)


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _version(version: int | None) -> str:
    return "none" if version is None else f"v{version}"
