"""The life of a sample in the ledger, through kills and faults."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchspec_lite import ledger_file
from torchspec_lite.errors import UserError
from torchspec_lite.ledger import FOLD_EVERY, REPEATED_S, IllegalTransition, Ledger


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_samples([(f"s{i}", i) for i in range(6)], "train")
    yield ledger
    ledger.close()


def deliver(ledger, count, worker="w0"):
    leases = ledger.lease(worker, count, 0)
    assert len(ledger.streamed([(lease.id, lease.attempt, 10) for lease in leases])) == len(leases)
    return [(lease.id, lease.attempt) for lease in leases]


def test_a_sample_lives_through_its_states(ledger):
    first, second = ledger.lease("w0", 2, rank=1)
    assert (first.id, first.ordinal, first.attempt, first.purpose, first.rank) == ("s0", 0, 1, "train", 1)
    assert second.id == "s1"
    assert ledger.account()["leased"] == 2
    assert ledger.streamed([("s0", 1, 33)]) == {"s0": 0}
    assert ledger.get("s0").state == "streamed" and ledger.get("s0").tokens == 33
    assert ledger.trained([("s0", 1)], 7) == ["s0"]
    assert (ledger.get("s0").state, ledger.get("s0").step) == ("trained", 7)
    assert ledger.checkpointed(6) == 0 and ledger.get("s0").state == "trained"
    assert ledger.checkpointed(7) == 1 and ledger.get("s0").state == "durable"
    assert ledger.rejected("s1", 1, "too_long", "9 tokens")
    assert ledger.account() == dict(queued=4, leased=0, streamed=0, trained=0, durable=1, rejected=1, all=6)
    assert ledger.reasons() == {"too_long": 1}


def test_leases_come_in_the_runs_order_whatever_the_order_of_adding(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.add_samples([("b", 5), ("a", 9), ("c", 1)], "train")
    ledger.add_samples([("h", 3)], "held_out")
    assert [lease.id for lease in ledger.lease("w", 1, 0, "held_out")] == ["h"]
    assert [lease.id for lease in ledger.lease("w", 9, 0)] == ["c", "b", "a"]
    assert ledger.account("held_out")["all"] == 1 and ledger.account()["all"] == 3


def test_adding_again_is_harmless_and_another_order_is_refused(ledger):
    assert ledger.add_samples([(f"s{i}", i) for i in range(8)], "train") == 2
    with pytest.raises(UserError, match="same data files and seed"):
        ledger.add_samples([("s0", 1)], "train")
    with pytest.raises(UserError, match="s1"):
        ledger.add_samples([("new", 1)], "train")
    with pytest.raises(UserError, match="held_out"):
        ledger.add_samples([("s0", 0)], "held_out")
    assert ledger.account()["all"] == 8


@pytest.mark.parametrize("report", [
    lambda ledger: ledger.streamed([("s0", 2, 1)]),           # an attempt that was never leased
    lambda ledger: ledger.streamed([("nobody", 1, 1)]),
    lambda ledger: ledger.trained([("s0", 1)], 1),            # leased, not admitted
    lambda ledger: ledger.trained([("s5", 0)], 1),            # queued
    lambda ledger: ledger.trained([("s2", 1)], 9),            # all passes trained already
    lambda ledger: ledger.rejected("s2", 1, "x"),             # in the weights
    lambda ledger: ledger.rejected("s3", 1, "x"),             # durable
    lambda ledger: ledger.streamed([("s4", 1, 1)]),           # rejected
    lambda ledger: ledger.trained([("s4", 1)], 9),
    lambda ledger: ledger.trained([("h", 1)], 9),             # held out
])
def test_illegal_reports_raise_and_change_nothing(ledger, report):
    ledger.lease("w0", 5, 0)
    ledger.streamed([("s2", 1, 1), ("s3", 1, 1)])
    ledger.trained([("s3", 1)], 1)
    ledger.trained([("s2", 1)], 2)
    ledger.checkpointed(1)
    ledger.rejected("s4", 1, "bad")
    ledger.add_samples([("h", 100)], "held_out")
    ledger.lease("w0", 1, 0, "held_out")
    ledger.streamed([("h", 1, 1)])
    before = [ledger.get(id) for id in ("s0", "s1", "s2", "s3", "s4", "s5", "h")]
    with pytest.raises(IllegalTransition):
        report(ledger)
    assert [ledger.get(id) for id in ("s0", "s1", "s2", "s3", "s4", "s5", "h")] == before


def test_one_bad_report_in_a_batch_undoes_the_batch(ledger):
    ledger.lease("w0", 2, 0)
    with pytest.raises(IllegalTransition):
        ledger.streamed([("s0", 1, 5), ("s5", 1, 5)])
    assert ledger.get("s0").state == "leased"


def test_a_dead_workers_samples_are_leased_again_and_its_late_delivery_dropped(ledger):
    ledger.lease("w0", 2, 0)
    ledger.lease("w1", 1, 0)
    assert ledger.requeue_worker("w0") == 2
    assert [lease.attempt for lease in ledger.lease("w1", 1, 0)] == [2]
    assert ledger.streamed([("s0", 1, 5), ("s1", 1, 5)]) == {"s1": 0}   # s1 was not leased anew: no need to repeat it
    assert ledger.streamed([("s0", 2, 5)]) == {"s0": 0}
    assert not ledger.rejected("s0", 1, "late")
    assert ledger.trained([("s0", 1)], 1) == []
    assert ledger.ignored() == {"stale": 3, "duplicates": 0}


def test_repeated_reports_count_once(ledger):
    (item,) = deliver(ledger, 1)
    assert ledger.streamed([(*item, 10)]) == {"s0": 0}      # the answer to the first report was lost
    assert ledger.trained([item], 1) == ["s0"]
    assert ledger.trained([item], 1) == []
    assert ledger.streamed([(*item, 10)]) == {}             # would be trained twice
    ledger.checkpointed(1)
    ledger.checkpointed(1)
    assert ledger.get("s0").passes_durable == 1
    assert ledger.ignored() == {"stale": 0, "duplicates": 3}


def test_restore_undoes_exactly_the_passes_the_weights_do_not_hold(tmp_path):
    ledger = Ledger(tmp_path / "l", reuse=2)
    ledger.add_samples([(name, place) for place, name in enumerate("abcdef")], "train")
    items = deliver(ledger, 5)
    a, b, c, d, e = items
    ledger.trained([a, b], 1)
    ledger.trained([a, c], 2)
    ledger.checkpointed(2)
    ledger.trained([b, c, d], 3)
    assert ledger.get("a").state == "durable" and ledger.get("b").state == "trained"
    assert ledger.restore(2) == 4
    rows = {name: (ledger.get(name).state, ledger.get(name).passes, ledger.get(name).step) for name in "abcdef"}
    assert rows == {"a": ("durable", 2, 2), "b": ("queued", 1, 1), "c": ("queued", 1, 2), "d": ("queued", 0, None),
                    "e": ("queued", 0, None), "f": ("queued", 0, None)}
    assert ledger.trained([b, c], 4) == [] and ledger.ignored()["stale"] == 2    # reports of the lost trainers
    leases = ledger.lease("w1", 6, 0)
    assert ledger.streamed([(lease.id, lease.attempt, 1) for lease in leases]) == dict(b=1, c=1, d=0, e=0, f=0)
    assert ledger.trained([(lease.id, lease.attempt) for lease in leases], 3) == ["b", "c"]


def test_training_may_run_ahead_of_a_checkpoint(tmp_path):
    ledger = Ledger(tmp_path / "l", reuse=2)
    ledger.add_samples([("a", 0), ("b", 1)], "train")
    a, b = deliver(ledger, 2)
    for step, batch in enumerate([[a], [a, b], [b]], 1):
        ledger.trained(batch, step)
    assert ledger.checkpointed(2) == 1
    assert (ledger.get("a").state, ledger.get("a").passes_durable) == ("durable", 2)
    assert (ledger.get("b").state, ledger.get("b").passes_durable) == ("trained", 1)
    assert ledger.checkpointed(1) == 0 and ledger.checkpoint_step() == 2
    assert ledger.checkpointed(3) == 1 and ledger.get("b").passes_durable == 2


def test_restore_to_an_older_checkpoint_takes_durability_back(ledger):
    items = deliver(ledger, 3)
    for step, item in enumerate(items, 1):
        ledger.trained([item], step)
    ledger.checkpointed(3)
    assert ledger.restore(1) == 2
    assert [ledger.get(id).state for id in ("s0", "s1", "s2")] == ["durable", "queued", "queued"]
    assert ledger.checkpoint_step() == 1
    assert ledger.restore(0) == 1 and ledger.account()["queued"] == 6


def test_restore_counts_a_checkpoint_whose_report_was_lost(ledger):
    ledger.trained(deliver(ledger, 1), 1)
    ledger.restore(1)
    assert ledger.get("s0").state == "durable"


def test_a_failed_delivery_is_queued_again_unless_a_trainer_has_it(ledger):
    ledger.lease("w0", 3, 0)
    ledger.streamed([("s1", 1, 5)])
    assert ledger.requeue_ids([("s0", 1), ("s1", 1), ("s2", 1)]) == 2
    assert [ledger.get(id).state for id in ("s0", "s1", "s2")] == ["queued", "streamed", "queued"]
    assert ledger.requeue_ids([("s0", 1)]) == 0                # its worker died before and was reported too
    assert ledger.streamed([("s2", 1, 5)]) == {"s2": 0}        # it came through after all
    assert ledger.trained([("s1", 1)], 1) == ["s1"]
    assert ledger.requeue_ids([("s1", 1)]) == 0 and ledger.get("s1").state == "trained"
    (lease,) = ledger.lease("w1", 1, 0)
    assert (lease.id, lease.attempt) == ("s0", 2)
    assert ledger.requeue_ids([("s0", 1)]) == 0 and ledger.get("s0").state == "leased"
    assert ledger.ignored() == {"stale": 1, "duplicates": 3}


def test_one_writer_and_any_readers(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "l", reuse=4)
    ledger.add_samples([("a", 0), ("b", 1)], "train")
    monkeypatch.setattr(ledger_file, "LOCK_S", 0.2)
    with pytest.raises(UserError, match="another process"):
        Ledger(tmp_path / "l", reuse=4)
    reader = Ledger(tmp_path / "l", read_only=True)
    assert reader.reuse == 4
    ledger.lease("w", 1, 0)
    assert reader.account()["leased"] == 1 and [row.id for row in reader.rows("leased")] == ["a"]
    with pytest.raises(UserError, match="written|readonly"):
        reader.lease("w", 1, 0)
    ledger.close()
    reader.close()
    Ledger(tmp_path / "l", reuse=4).close()
    with pytest.raises(UserError, match="trainer.reuse=4"):
        Ledger(tmp_path / "l", reuse=2)
    assert Ledger(tmp_path / "l", read_only=True).account()["leased"] == 1
    with pytest.raises(UserError, match="exists"):
        Ledger(tmp_path / "missing", read_only=True)


@pytest.mark.parametrize("version, words", [(0, "older"), (99, "newer")])
def test_another_schema_version_is_refused_by_name(tmp_path, version, words):
    Ledger(tmp_path / "l").close()
    db = sqlite3.connect(tmp_path / "l")
    with db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (version,))
    db.close()
    for read_only in (False, True):
        with pytest.raises(UserError, match=f"schema version {version} of an? {words}"):
            Ledger(tmp_path / "l", read_only=read_only)


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a database at all, but long enough to have a header" * 20)
    with pytest.raises(UserError, match="text: file is not a database"):
        Ledger(tmp_path / "text")
    db = sqlite3.connect(tmp_path / "other")
    db.execute("CREATE TABLE notes(text)")
    db.close()
    with pytest.raises(UserError, match="no ledger of torchspec-lite"):
        Ledger(tmp_path / "other")


def test_a_full_disk_is_one_clear_error_and_changes_nothing(ledger):
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(UserError, match="ledger.sqlite: database or disk is full; free some disk space"):
        ledger.add_samples([(f"more-{i}" * 20, 100 + i) for i in range(1000)], "train")
    ledger._db.execute("PRAGMA max_page_count = 1000000")
    assert ledger.account()["all"] == 6
    assert ledger.add_samples([("more", 100)], "train") == 1


def test_versions_and_events(ledger):
    ledger.add_version(1, 50, 400, None, 1.31)
    ledger.add_version(2, 100, 800, 1, None)
    with pytest.raises(IllegalTransition, match="exists"):
        ledger.add_version(2, 100, 800, 1, 1.4)
    ledger.add_version(1, 50, 400, None, 1.31)  # the answer to the first report was lost
    assert ledger.ignored()["duplicates"] == 1
    ledger.set_version_state(2, "rolled_back", "acceptance 1.0")
    with pytest.raises(IllegalTransition, match="lost"):
        ledger.set_version_state(1, "lost")
    with pytest.raises(IllegalTransition, match="not in the ledger"):
        ledger.set_version_state(3, "gated")
    one, two = ledger.versions()
    assert (one["version"], one["step"], one["samples"], one["parent"], one["predicted"], one["state"]) == (
        1, 50, 400, None, 1.31, "exported")
    assert (two["state"], two["reason"], two["parent"]) == ("rolled_back", "acceptance 1.0", 1)
    for number in range(5):
        ledger.add_event("swap" if number % 2 else "alarm", f"text {number}", version=2, replica="r0",
                         data={"number": number})
    assert [event["data"]["number"] for event in ledger.history(limit=2)] == [3, 4]
    assert [event["text"] for event in ledger.history(kind="swap")] == ["text 1", "text 3"]
    ledger.add_event("alarm", "plain")
    assert ledger.history(1)[0]["data"] is None


@pytest.mark.parametrize("events, serving, before", [
    ("", None, None), ("+1", 1, None), ("+1 +5 +7", 7, 5), ("+1 +1", 1, None),
    ("+5 +7 +3", 3, 7),                   # 3 by hand
    ("+5 +7 +5 -7", 5, None),             # gone back by hand
    ("+5 +7 -7", 5, None), ("+5 +7 -7 +5", 5, None),
    ("+5 +7 +5 -7 +5", 5, None),          # and resumed
    ("+5 +7 +5 -7 +8", 8, 5),
    ("+5 -6 +7 -8", 7, 5), ("-1", None, None), ("+1 -1", None, None)])
def test_what_serves_follows_from_the_order_of_events(ledger, events, serving, before):
    for event in events.split():
        ledger.add_event("promoted" if event[0] == "+" else "rolled_back", "", version=int(event[1:]))
        ledger.add_event("exported", "", version=9)
    assert ledger.served() == (serving, before)


def test_the_newest_event_about_a_version(ledger):
    for number, (kind, version) in enumerate([("exported", 1), ("exported", 1), ("exported", 2), ("canary", 1)]):
        ledger.add_event(kind, f"text {number}", version, data={"number": number})
    assert [event["data"] for event in ledger.history(1, "exported", 1)] == [{"number": 1}]
    ledger.add_event("canary", "plain", 2)
    assert [event["data"] for event in ledger.history(1, "canary", 2)] == [None] and ledger.history(1, "gated", 1) == []


def test_five_thousand_transitions_a_second_in_batches(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.add_samples([(f"s{i}", i) for i in range(4096)], "train")
    started = time.process_time()
    for step in range(1, 33):
        ledger.trained(deliver(ledger, 128), step)
    ledger.checkpointed(32)
    assert ledger.account()["durable"] == 4096
    # CPU time, so that a busy machine's disk does not decide: four transitions each.
    assert 4 * 4096 / (time.process_time() - started) > 5000


KILLED = """
import sys
from torchspec_lite.ledger import Ledger
ledger = Ledger(sys.argv[1], reuse=2)
ledger.add_samples([(f"s{i}", i) for i in range(4000)], "train")
step = 0
while leases := ledger.lease("w", 4, 0):
    items = [(lease.id, lease.attempt) for lease in leases]
    ledger.streamed([(*item, 1) for item in items])
    for _ in range(2):
        step += 1
        ledger.trained(items, step)
        print("trained", step, *[item[0] for item in items], flush=True)
    if step % 8 == 0:
        ledger.checkpointed(step)
        print("checkpointed", step, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 40, 173])
def test_what_was_reported_survives_kill_9(tmp_path, lines):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "l")], stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parent.parent, env=os.environ | {"PYTHONPATH": "."})
    said = [child.stdout.readline() for _ in range(lines)]
    os.kill(child.pid, signal.SIGKILL)
    said += child.stdout.read().splitlines(keepends=True)
    child.wait(10)
    said = [line.split() for line in said if line.endswith("\n")]
    trained = {}
    for word, step, *ids in said:
        if word == "trained":
            for id in ids:
                trained.setdefault(id, set()).add(int(step))
    checkpoint = max([int(step) for word, step, *_ in said if word == "checkpointed"], default=0)
    with_ledger = Ledger(tmp_path / "l", reuse=2)
    assert all(with_ledger.get(id).passes >= len(steps) for id, steps in trained.items())
    with_ledger.restore(checkpoint)
    held = {id: len([step for step in steps if step <= checkpoint]) for id, steps in trained.items()}
    for id, passes in held.items():
        row = with_ledger.get(id)
        assert row.passes == passes and row.state == ("durable" if passes == 2 else "queued")
    account = with_ledger.account()
    assert account["durable"] + account["queued"] == account["all"] == 4000
    assert account["durable"] == sum(passes == 2 for passes in held.values())


# Served requests

def test_a_served_request_is_never_queued(ledger):
    assert ledger.arrived([("t1", 40), ("t2", 50)], rank=0) == {"t1": 0, "t2": 0}
    assert ledger.arrived([("t2", 50)], rank=0) == {"t2": 0}  # a repeated report
    assert ledger.trained([("t1", 1)], 1) == ["t1"]
    assert ledger.arrived([("t1", 40)], rank=0) == {}
    assert ledger.checkpointed(1) == 1
    assert ledger.restore(1) == 0
    assert ledger.account("traffic") == dict(queued=0, leased=0, streamed=0, trained=0, durable=1, rejected=1, all=2)
    assert ledger.reasons() == {"not_kept": 1}
    assert ledger.arrived([("t2", 50)], rank=0) == {}
    assert ledger.account()["all"] == 6 and [lease.id for lease in ledger.lease("w", 9, 0)] == [f"s{i}" for i in range(6)]


def test_settled_served_requests_are_counted_and_forgotten(ledger):
    for step in range(1, 51):
        ids = [f"t{step}-{place}" for place in range(4)]
        ledger.arrived([(id, 10) for id in ids], rank=0)
        ledger.trained([(id, 1) for id in ids[:3]], step)
        ledger.rejected(ids[3], 1, "too_old")
        ledger.checkpointed(step)
    account = ledger.account("traffic")
    assert (account["durable"], account["rejected"], account["all"]) == (150, 50, 200)
    assert ledger.reasons() == {"too_old": 50}
    held = ledger._db.execute("SELECT COUNT(*) FROM samples WHERE purpose = 'traffic'").fetchone()[0]
    assert held <= 4 and ledger._db.execute("SELECT COUNT(*) FROM passes").fetchone()[0] <= 4
    assert ledger.account()["queued"] == 6


def test_requests_rejected_without_any_checkpoint_are_forgotten_too(ledger, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("torchspec_lite.ledger.time.time", lambda: clock[0])
    for place in range(1, 4 * FOLD_EVERY + 1):  # as trainers do that rest: what a newer one pushes out of the window is rejected
        ledger.arrived([(f"t{place}", 10)], rank=0)
        if place > 16:
            ledger.rejected(f"t{place - 16}", 1, "newer_came")
        clock[0] += 4 * REPEATED_S / FOLD_EVERY  # so that a quarter of FOLD_EVERY were rejected lately
    account = ledger.account("traffic")
    assert (account["streamed"], account["rejected"], account["all"]) == (16, 4 * FOLD_EVERY - 16, 4 * FOLD_EVERY)
    assert ledger.reasons() == {"newer_came": 4 * FOLD_EVERY - 16}
    held = ledger._db.execute("SELECT COUNT(*) FROM samples WHERE state = 'rejected'").fetchone()[0]
    assert held <= FOLD_EVERY // 4 + 1
    assert ledger.arrived([(f"t{4 * FOLD_EVERY}", 10)], rank=0) == {f"t{4 * FOLD_EVERY}": 0}  # a repeated report
