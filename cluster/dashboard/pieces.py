"""The page's words, numbers and tables as HTML: pure functions of a `View`. Everything from the run is escaped."""

import math
from datetime import UTC, datetime
from html import escape

from cluster.dashboard.charts import STATE_WORDS, predicted_line
from cluster.dashboard.view import View
from torchspec_lite.snapshot import (
    Buffer, Pipeline, Snapshot, format_count, format_duration, is_over, prompts_in_words, sentences,
)

STATES = {
    "starting": "Starting",
    "running": "Running",
    "draining": "Draining",
    "finished": "Finished",
    "stopped": "Stopped",
    "failed": "Failed",
}
NONE = "–"
VERSIONS_LISTED, EVENTS_LISTED, ALARMS_LISTED = 12, 12, 3


def header(view: View) -> str:
    snapshot = view.snapshot
    if snapshot is None:
        return f"<h1>{escape(view.run)}</h1><span class='pill'>No status yet</span>"
    state = "silent" if view.silent else snapshot.state
    words = "Silent" if view.silent else STATES[snapshot.state]
    steps = f"{snapshot.step:,}" + (f" of {snapshot.max_steps:,}" if snapshot.max_steps else "")
    return (
        f"<h1>{escape(view.run)}</h1><span class='pill {state}' data-value='state'>{words}</span>"
        f"<span class='meta'><span data-value='elapsed'>{format_duration(snapshot.elapsed_s)}</span>"
        f"<span>step <b data-value='step'>{steps}</b></span></span>"
    )


def banner(view: View) -> str:
    """Alarms and faults, newest first; empty when all is well."""
    lines = []
    if view.fault:
        lines.append(f"<p>Part of the run directory could not be read: {escape(view.fault)}</p>")
    if view.silent:
        lines.append(
            f"<p>No news from the driver since {_time(view.snapshot.updated)}. "
            "If it is gone, start it again with <code>--resume</code>.</p>"
        )
    if view.snapshot and view.snapshot.state == "failed":
        lines.append(f"<p>The run failed: {escape(view.snapshot.reason or 'no reason was given')}</p>")
    alarms = view.snapshot.alarms if view.snapshot else ()
    for alarm in alarms[: -ALARMS_LISTED - 1 : -1]:
        lines.append(f"<p data-value='alarm'>{_time(alarm.time)} {escape(alarm.text)}</p>")
    if len(alarms) > ALARMS_LISTED:
        lines.append(f"<p class='muted'>and {len(alarms) - ALARMS_LISTED} earlier</p>")
    return f"<div class='banner' role='alert'>{''.join(lines)}</div>" if lines else ""


def headline(view: View) -> str:
    """The hero's number: served acceptance length now, against that of the first drafter served."""
    snapshot = view.snapshot
    served = snapshot.served if snapshot else None
    before = snapshot.served_before if snapshot else None
    change = "No request has been drafted for yet."
    if served is not None and before is not None:
        rise = served - before
        sign = "+" if rise >= 0 else "−"
        change = (
            f"<b class='change'>{sign}{abs(rise):.2f}</b> since the first drafter "
            f"(<span data-value='served_before'>{before:.2f}</span>)"
        )
    facts = [
        ("serving", _version(snapshot.serving_version if snapshot else None), "serving_version"),
        ("newest", _version(snapshot.version if snapshot else None), "version"),
        ("predicted", _number(snapshot.predicted if snapshot else None), "predicted"),
        ("gap", _signed(gap(view)), "gap"),
    ]
    return (
        f"<p class='big'><span data-value='served'>{_number(served)}</span><small>tokens per pass of the target</small></p>"
        f"<p class='muted'>{change}</p><dl class='facts'>{_facts(facts)}</dl>"
    )


def progress(view: View) -> str:
    snapshot = view.snapshot
    if snapshot is None:
        return ""
    facts = [
        ("prompts", prompts_in_words(snapshot), "prompts"),
        ("tokens trained", format_count(snapshot.tokens_trained), "tokens_trained"),
        ("trained a second", f"{snapshot.pipeline.trained_tokens_per_s:,.0f}", "tokens_per_s"),
        ("loss", _number(snapshot.loss, 3), "loss"),
        ("steps skipped", f"{snapshot.skipped_steps:,}", "skipped"),
    ]
    return f"<dl class='facts wide'>{_facts(facts)}</dl>"


def sentence(view: View) -> str:
    words = sentences(view.snapshot) if view.snapshot else "The run has not written its status yet."
    return f"<p class='sentence' data-value='waiting'>{escape(words)}</p>"


def pipeline(view: View) -> str:
    """The pipeline as a picture: four stations and what flows between them."""
    snapshot = view.snapshot
    if snapshot is None:
        return ""
    pipe, counts = snapshot.pipeline, view.samples
    stations = [
        _station("Prompts", f"{counts.get('queued', 0):,}", "queued", [f"{counts.get('leased', 0):,} leased"]),
        _flow("leases", ""),
        _station(
            "Target",
            f"{pipe.streamed_tokens_per_s:,.0f}",
            "tokens a second",
            [_plural(pipe.target_workers, "worker"), f"held back {pipe.target_wait:.0%} of the time"],
            _mood(pipe.target_wait, pipe.trainer_wait),
        ),
        _flow("hidden states", _stream(pipe)),
        _station(
            "Trainers",
            f"{pipe.trained_tokens_per_s:,.0f}",
            "tokens a second",
            [_plural(pipe.trainer_ranks, "rank"), f"waiting {pipe.trainer_wait:.0%} of the time"],
            _mood(pipe.trainer_wait, pipe.target_wait),
        ),
        _flow("drafters", f"<small>{escape(_newest(snapshot))}</small>"),
        _station(
            "Serving pool",
            _number(snapshot.served),
            "acceptance length",
            _pool_notes(snapshot),
        ),
    ]
    return f"<ol class='pipe'>{''.join(stations)}</ol>"


def ledger(view: View) -> str:
    total = sum(view.samples.values())
    if not total:
        return "<p class='muted'>No sample yet.</p>"
    parts = "".join(
        f"<span class='s-{state}' style='flex-grow:{count}'></span>" for state, count in view.samples.items() if count
    )
    items = "".join(
        f"<div><dt><i class='s-{state}'></i>{state}</dt><dd data-value='samples-{state}'>{count:,}</dd></div>"
        for state, count in view.samples.items()
    )
    held_out = f"<p class='muted'>{view.held_out:,} held-out samples beside these.</p>" if view.held_out else ""
    return f"<div class='bar' aria-hidden='true'>{parts}</div><dl class='states'>{items}</dl>{held_out}{_rejects(view)}"


def replicas(view: View) -> str:
    found = view.snapshot.replicas if view.snapshot else ()
    if view.snapshot and is_over(view.snapshot) and not found:
        return "<p class='muted'>The serving pool ended with the run.</p>"
    if not found:
        return "<p class='muted'>No serving replica.</p>"
    rows = [
        [
            escape(replica.name),
            f"<span class='tag {replica.state}'>{replica.state}</span>"
            + (" <span class='tag canary'>canary</span>" if replica.role == "canary" else ""),
            _version(replica.version),
            _number(replica.acceptance_length),
            f"{replica.running:,}" + (f" + {replica.waiting:,} waiting" if replica.waiting else ""),
            f"{replica.requests:,}",
            f"{replica.tokens_per_s:,.0f}",
        ]
        for replica in found
    ]
    names = ["Replica", "State", "Drafter", "AL", "Running", "Requests", "Tokens/s"]
    return _table("Serving replicas", names, rows, numbers=3)


def traffic(view: View) -> str:
    """How much of what users send is sampled, and what becomes of it."""
    found = view.snapshot.traffic if view.snapshot else None
    if found is None:
        return "<p class='muted off'>No served request is captured: <code>traffic.fraction</code> is 0.</p>"
    samples = found.samples or {}
    share = found.sampled / found.requests if found.requests else 0.0
    facts = [
        ("requests", f"{found.requests:,}", "traffic-requests"),
        ("excluded by their sender", f"{found.excluded:,}", "traffic-excluded"),
        ("sampled", f"{found.sampled:,} ({share:.0%})", "traffic-sampled"),
        ("answered once more", f"{found.second_answers:,}", "traffic-second"),
        ("sent to the trainers", f"{found.sent:,}", "traffic-sent"),
        ("in training", f"{samples.get('streamed', 0):,}", "traffic-streamed"),
        ("all passes done", f"{samples.get('durable', 0):,}", "traffic-durable"),
        ("requests compared on", f"{found.window:,}", "traffic-window"),
        ("serving, predicted", _number(found.window_serving), "traffic-serving"),
        ("in training, predicted", _number(found.window_candidate), "traffic-candidate"),
    ]
    rows = [[escape(reason), f"{count:,}"] for reason, count in (found.left_out or {}).items() if count]
    table = _table("Sampled and not sent", ["Sampled and not sent", "Requests"], rows, numbers=1) if rows else ""
    rest = "<p class='muted'>Training rests.</p>" if found.resting else ""
    return f"<dl class='facts wide'>{_facts(facts)}</dl>{rest}{table}"


def rollout(view: View) -> str:
    """Versions, newest first, with what was predicted, what was served and why it was decided so."""
    if not view.versions:
        return "<p class='muted'>No drafter version yet.</p>"
    served = view.lines.get("served_acceptance_length_by_version", {})
    rows = []
    for version in view.versions[: -VERSIONS_LISTED - 1 : -1]:
        line = served.get(str(version.number))
        rows.append(
            [
                f"<b data-value='v{version.number}'>v{version.number}</b>",
                f"<span class='tag {version.state}'>{STATE_WORDS[version.state]}</span>",
                _number(version.predicted),
                _number(line.last if line else None),
                _time(version.decided or version.created),
                escape(version.reason or ""),
            ]
        )
    names = ["Version", "State", "Predicted", "Served", "When", "Reason"]
    return _table("Drafter versions", names, rows, numbers=2, last_number=3)


def events(view: View) -> str:
    if not view.events:
        return "<p class='muted'>Nothing has happened yet.</p>"
    items = []
    for event in view.events[:EVENTS_LISTED]:
        where = " ".join(
            ([f"v{event.version}"] if event.version is not None else []) + ([event.replica] if event.replica else [])
        )
        kind = escape(event.kind.replace("_", " "))
        items.append(
            f"<li class='{'warn' if event.kind == 'alarm' else ''}'>{_time(event.time)}"
            f"<span><b>{kind}{f' · {escape(where)}' if where else ''}</b> {escape(event.text)}</span></li>"
        )
    return _region("Events, newest first", f"<ol class='events'>{''.join(items)}</ol>")


def gap(view: View) -> float | None:
    """Predicted less served acceptance length, of the newest measurement of both."""
    line = view.line("train_serve_gap")
    return line.last if line else None


def describe_hero(view: View) -> str:
    """The hero chart in words, for a screen reader."""
    served, predicted = view.line("served_acceptance_length"), predicted_line(view)
    if served is None:
        return "Served acceptance length over time: nothing is served yet."
    words = f"Served acceptance length over time: from {served.values[0]:.2f} to {served.last:.2f}"
    if predicted:
        words += f", predicted {predicted.last:.2f}"
    marks = [f"v{version.number} {STATE_WORDS[version.state]}" for version in view.versions[-3:]]
    return words + (f". Newest versions: {', '.join(marks)}." if marks else ".")


def _rejects(view: View) -> str:
    if not view.rejects:
        return "<p class='muted'>No sample was rejected.</p>"
    rows = [
        [escape(reject.reason), f"{reject.count:,}", " ".join(f"<code>{escape(id)}</code>" for id in reject.examples)]
        for reject in view.rejects
    ]
    return _table("Rejected samples by reason", ["Rejected because", "Count", "Newest"], rows, numbers=1, last_number=1)


def _station(title: str, number: str, unit: str, notes: list[str], mood: str = "") -> str:
    lines = "".join(f"<small>{escape(note)}</small>" for note in notes if note)
    return f"<li class='station {mood}'><h3>{title}</h3><p><b>{number}</b> {unit}</p>{lines}</li>"


def _flow(title: str, body: str) -> str:
    return f"<li class='flow'><span>{title}</span><i aria-hidden='true'></i>{body}</li>"


def _stream(pipe: Pipeline) -> str:
    receiver = pipe.receiver
    left = max(receiver.budget_bytes - receiver.bytes, 0), max(receiver.budget_samples - receiver.samples, 0)
    return (
        f"<div class='meter' role='meter' aria-label='receiver buffer' aria-valuemin='0' aria-valuemax='100' "
        f"aria-valuenow='{receiver.fill * 100:.0f}'><span style='width:{min(receiver.fill, 1):.0%}'></span></div>"
        f"<small>buffered {_buffer(receiver)}</small><small>credit {_mebibytes(left[0])}, {left[1]:,} samples</small>"
        f"<small>to send {_buffer(pipe.sender)}</small>"
    )


def _buffer(buffer: Buffer) -> str:
    return f"{_plural(buffer.samples, 'sample')}, {_mebibytes(buffer.bytes)} of {_mebibytes(buffer.budget_bytes)}"


def _mood(own_wait: float, other_wait: float) -> str:
    if own_wait >= 0.2 and own_wait >= other_wait:
        return "waits"
    return "awaited" if other_wait >= 0.2 else ""


def _newest(snapshot: Snapshot) -> str:
    return "none exported yet" if snapshot.version is None else f"newest v{snapshot.version}"


def _pool_notes(snapshot: Snapshot) -> list[str]:
    """How many replicas are ready and what they serve; of a run that is over, what they served last."""
    if is_over(snapshot):
        return ["no drafter was served" if snapshot.serving_version is None else f"v{snapshot.serving_version} was served last"]
    ready = sum(replica.state == "ready" for replica in snapshot.replicas)
    return [f"{ready} of {_plural(len(snapshot.replicas), 'replica')} ready",
            "no drafter" if snapshot.serving_version is None else f"serving v{snapshot.serving_version}"]


def _table(caption: str, names: list[str], rows: list[list[str]], numbers: int, last_number: int | None = None) -> str:
    """`numbers`: first column set right, as figures; `last_number`: the last such column (default: all that follow).

    The roles are said in words because on a phone the rows are laid out as blocks, which takes a table's own away.
    """
    last = len(names) - 1 if last_number is None else last_number

    def attribute(place: int) -> str:
        return " class='n'" if numbers <= place <= last else ""

    head = "".join(f"<th scope='col' role='columnheader'{attribute(place)}>{name}</th>" for place, name in enumerate(names))
    body = "".join(
        "<tr role='row'>" + "".join(f"<td role='cell'{attribute(place)}>{cell}</td>" for place, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return _region(caption, (
        f"<table role='table'><caption>{caption}</caption><thead role='rowgroup'><tr role='row'>{head}</tr></thead>"
        f"<tbody role='rowgroup'>{body}</tbody></table>"
    ))


def _region(name: str, body: str) -> str:
    """What may have to be scrolled: the keyboard reaches it, and a screen reader says what it is."""
    return f"<div class='scroll' tabindex='0' role='region' aria-label='{name}'>{body}</div>"


def _facts(facts: list[tuple[str, str, str]]) -> str:
    return "".join(f"<div><dt>{name}</dt><dd data-value='{key}'>{value}</dd></div>" for name, value, key in facts)


def _time(seconds: float) -> str:
    """An element that the browser shows in its own time zone."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"<local-time datetime='{moment.isoformat(timespec='seconds')}'>{moment:%d %b %H:%M} UTC</local-time>"


def _number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{'+' if value >= 0 else '−'}{abs(value):.2f}"


def _version(number: int | None) -> str:
    return NONE if number is None else f"v{number}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 10 * 2**20 or not size else f"{size / 2**20:.1f} MiB"
