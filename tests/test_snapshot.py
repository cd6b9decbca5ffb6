"""The live state: written in one step, read strictly, told in words."""

import json
from dataclasses import replace

import pytest

from torchspec_lite import snapshot as snapshots
from torchspec_lite.errors import UserError
from torchspec_lite.ledger import Ledger
from torchspec_lite.snapshot import (
    Alarm,
    Buffer,
    Pipeline,
    Replica,
    Snapshot,
    SnapshotWriter,
    drafting_sentence,
    ended,
    format_count,
    format_duration,
    is_silent,
    progress_line,
    read_snapshot,
    render_status,
    sentences,
    status,
    waiting_sentence,
    write_snapshot,
)

FLOWING = Pipeline(target_workers=1, trainer_ranks=2, streamed_tokens_per_s=900.0, trained_tokens_per_s=880.0)
RUNNING = Snapshot(
    run="demo", state="running", started=1000.0, updated=1450.0, elapsed_s=450.0, prompts_done=120, prompts_total=400,
    samples={"queued": 200, "leased": 8, "streamed": 6, "trained": 20, "durable": 160, "rejected": 6},
    step=55, loss=2.345, tokens_trained=51_234, predicted=2.4, served_before=1.31, served=2.18, version=4,
    serving_version=3, pipeline=FLOWING,
    replicas=(Replica(name="r0", version=3, state="ready", acceptance_length=2.2),),
)  # fmt: skip


def test_it_is_read_back_as_it_was_written(tmp_path):
    write_snapshot(tmp_path, RUNNING)
    assert read_snapshot(tmp_path) == RUNNING
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    full = replace(RUNNING, alarms=(Alarm(time=1.0, text="AL 1.00"),), links={"endpoint": "http://127.0.0.1:8000"},
                   pipeline=replace(FLOWING, receiver=Buffer(bytes=5, budget_bytes=10)))  # fmt: skip
    write_snapshot(tmp_path, full)
    assert read_snapshot(tmp_path) == full


def test_a_loss_that_is_not_a_number_is_null(tmp_path):
    write_snapshot(tmp_path, replace(RUNNING, loss=float("nan")))
    assert read_snapshot(tmp_path).loss is None


def test_reading_is_strict(tmp_path):
    with pytest.raises(UserError, match="status.json: No such file"):
        read_snapshot(tmp_path)
    write_snapshot(tmp_path, RUNNING)
    path = tmp_path / "status.json"
    good = json.loads(path.read_text())
    for change in ({"surprise": 1}, {"step": "55"}, {"state": "asleep"}, {"replicas": [{"name": "r0", "gpu": 1}]}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=next(iter(change))):
            read_snapshot(tmp_path)
    path.write_text(json.dumps(good | {"schema": 2}))
    with pytest.raises(UserError, match="schema 2, this torchspec-lite reads 1"):
        read_snapshot(tmp_path)
    path.write_text(path.read_text()[:50])
    with pytest.raises(UserError, match="not a status"):
        read_snapshot(tmp_path)


def test_at_most_one_write_a_second(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(snapshots.clock, "monotonic", lambda: now[0])
    writer = SnapshotWriter(tmp_path)
    assert writer.offer(RUNNING)
    now[0] = 100.9
    assert not writer.offer(replace(RUNNING, step=56)) and read_snapshot(tmp_path).step == 55
    now[0] = 101.0
    assert writer.offer(replace(RUNNING, step=57)) and read_snapshot(tmp_path).step == 57


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"trainer_wait": 0.62, "receiver": Buffer(bytes=1, budget_bytes=100)},
         "Trainers wait for the target 62% of the time; add target workers (now 1)."),
        ({"target_wait": 0.5, "receiver": Buffer(bytes=99, budget_bytes=100)},
         "The target waits for the trainers 50% of the time; "
         "add trainer ranks (now 2) or train each sample fewer times."),
        ({"trainer_wait": 0.9, "target_wait": 0.3, "receiver": Buffer(samples=9, budget_samples=10)},
         "Trainers wait 90% of the time although their buffer is full: it holds less than one batch; "
         "raise stream.budget_mib and stream.max_samples."),
        ({"trainer_wait": 0.1, "target_wait": 0.19}, "Target and trainers keep pace; nobody waits."),
        ({"streamed_tokens_per_s": 0.0, "trained_tokens_per_s": 0.0},
         "Nothing flows at this moment: the first samples are on their way."),
        ({"target_workers": 0, "trainer_ranks": 0}, "No target worker and no trainer is up yet."),
    ],
)  # fmt: skip
def test_who_waits_for_whom(changes, words):
    assert waiting_sentence(replace(RUNNING, pipeline=replace(FLOWING, **changes))) == words


def test_who_waits_at_the_ends_of_a_run():
    waiting = replace(FLOWING, trainer_wait=0.8)
    drained = replace(RUNNING, pipeline=waiting, samples={"queued": 0, "leased": 0, "durable": 400})
    assert waiting_sentence(drained) == (
        "Trainers wait 80% of the time: no prompt is left to capture; the run is draining."
    )
    assert waiting_sentence(replace(RUNNING, state="starting")).startswith("The run is starting")
    for state in ("finished", "stopped", "failed"):
        last = ended(replace(RUNNING, pipeline=waiting), state, None)
        assert "nothing waits" in waiting_sentence(last) and last.pipeline.trained_tokens_per_s == 0


@pytest.mark.parametrize("running, most, words", [
    (8, 4, "Drafting costs more than it gives at this load: at acceptance length 1.55 it pays up to 4 requests at once and 8 "
           "run; set serve.max_concurrency_for_speculation=auto."),
    (4, 4, None), (8, None, None)])
def test_drafting_that_costs_more_than_it_gives_is_said(running, most, words):
    idle = Replica(name="r0", running=1, acceptance_length=1.6, drafting_pays_up_to=4)
    busy = Replica(name="r1", running=running, acceptance_length=1.55, drafting_pays_up_to=most)
    snapshot = replace(RUNNING, replicas=(idle, busy))
    assert drafting_sentence(snapshot) == words
    assert sentences(snapshot) == " ".join(filter(None, ["Target and trainers keep pace; nobody waits.", words]))
    assert drafting_sentence(ended(snapshot, "finished", None)) is None


def test_progress_line():
    assert progress_line(RUNNING) == (
        "7 min 30 s · prompts 120 of 400, 6 in training · step 55 · 51.2k tokens, 880/s · loss 2.345 · predicted AL 2.40 · "
        "served AL 1.31 → 2.18 · v4 (serving v3)"
    )
    fresh = Snapshot(run="demo", state="starting", started=0.0, updated=0.0)
    assert progress_line(fresh) == "0 s · prompts 0 · step 0 · 0 tokens, 0/s"


def test_silence():
    assert not is_silent(RUNNING, now=1465.0)
    assert is_silent(RUNNING, now=1475.0)
    assert not is_silent(ended(RUNNING, "finished", None), now=1e12)


def test_status_counts_by_the_ledger(tmp_path):
    write_snapshot(tmp_path, RUNNING)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_samples([(f"s{i}", i) for i in range(4)], "train")
    ledger.add_samples([("h", 9)], "held_out")
    first, second, third = ledger.lease("w", 3, rank=0, purpose="train")
    ledger.rejected(first.id, first.attempt, "empty mask")
    ledger.streamed([(second.id, second.attempt, 10)])
    ledger.trained([(second.id, second.attempt)], step=1)
    ledger.checkpointed(1)
    ledger.add_version(1, 10, 1, None, None)
    ledger.add_version(5, 50, 1, 1, 2.4)
    ledger.close()
    values = status(tmp_path)
    assert values["samples"] == {"queued": 1, "leased": 1, "streamed": 0, "trained": 0, "durable": 1, "rejected": 1}
    assert values["drafter"] == {"version": 5, "serving": 3, "step": 50}
    assert values["acceptance"] == {"served_before": 1.31, "served_after": 2.18, "predicted": 2.4}
    assert values["state"] == "silent"  # written long ago, by the clock
    assert json.loads(json.dumps(values)) == values
    text = render_status(values)
    assert "served 1.31 at first, 2.18 now" in text and "1 durable, 1 rejected" in text and "newest v5" in text


def test_status_without_a_ledger_names_it(tmp_path):
    write_snapshot(tmp_path, RUNNING)
    with pytest.raises(UserError, match="ledger.sqlite"):
        status(tmp_path)


def test_formats():
    assert [format_duration(s) for s in (42, 450, 7500, 270_000)] == ["42 s", "7 min 30 s", "2 h 05 min", "3 d 03 h"]
    assert [format_count(n) for n in (987, 12_345, 4_560_000, 7.8e9)] == ["987", "12.3k", "4.56M", "7.80G"]
