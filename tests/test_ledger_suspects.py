"""Samples that a target worker had in hand when it died: who gets them, and when nobody does any more."""

import pytest

from torchspec_lite.lease import LeaseCall
from torchspec_lite.ledger import Ledger
from torchspec_lite.ledger_suspects import MOST_DEATHS

BUSY = LeaseCall("process", 9, (("another", 1),))


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.add_samples([(f"s{i}", i) for i in range(10)], "train")
    yield ledger
    ledger.close()


def dies(ledger, leases, worker="w"):
    deadly = ledger.blame(worker, [(lease.id, lease.attempt) for lease in leases])
    ledger.requeue_worker(worker)
    return deadly


def ids(leases):
    return [lease.id for lease in leases]


def test_suspects_are_leased_alone_in_parts_then_one_by_one(ledger):
    first = ledger.lease("w", 8, 0)
    assert not any(lease.alone for lease in first)
    assert dies(ledger, first) == []
    second = ledger.lease("w", 8, 0)
    assert ids(second) == ["s0", "s1"] and all(lease.alone for lease in second)  # a quarter of what there is room for
    assert dies(ledger, second) == []
    third = ledger.lease("w", 8, 0)
    assert ids(third) == ["s0"] and third[0].alone
    assert dies(ledger, third) == [("s0", 3)] and MOST_DEATHS == 3


def test_a_worker_with_something_in_hand_gets_no_suspect(ledger):
    dies(ledger, ledger.lease("w", 4, 0))
    leases = ledger.lease("other", 9, 0, call=BUSY)
    assert ids(leases) == [f"s{i}" for i in range(4, 10)] and not any(lease.alone for lease in leases)
    assert ledger.queued_for(idle=True) and not ledger.queued_for(idle=False)
    assert ledger.lease("other", 9, 0, call=BUSY) == []
    assert not ledger.queued_for(True, "held_out")


def test_a_sample_that_gets_through_is_no_suspect_any_more(ledger):
    leases = ledger.lease("w", 10, 0)
    dies(ledger, leases)
    again = ledger.lease("w", 10, 0)
    ledger.streamed([(again[0].id, again[0].attempt, 5)])
    ledger.rejected(again[1].id, again[1].attempt, "too_long")
    dies(ledger, [])
    assert [row[0] for row in ledger._db.execute("SELECT id FROM deaths ORDER BY id")] == [f"s{i}" for i in range(2, 10)]
    ledger.restore(0)  # the trainers came back without what they held
    assert ids(ledger.lease("other", 9, 0, call=BUSY)) == ["s0"]


def test_what_the_worker_had_sent_before_it_died_is_no_suspect(ledger):
    leases = ledger.lease("w", 3, 0)
    assert dies(ledger, leases[2:]) == []
    assert ids(ledger.lease("other", 2, 0, call=BUSY)) == ["s0", "s1"]


def test_a_late_word_about_an_attempt_that_is_over_blames_nobody(ledger):
    old = ledger.lease("w", 1, 0)
    ledger.requeue_worker("w")
    ledger.lease("other", 1, 0)
    for _ in range(MOST_DEATHS):
        assert ledger.blame("w", [(old[0].id, old[0].attempt)]) == []
        assert ledger.blame("w", [(old[0].id, 2)]) == []  # another's
    assert not ledger._db.execute("SELECT * FROM deaths").fetchall()


def test_a_new_attempt_of_the_run_suspects_nobody(ledger):
    ledger.begin("first")
    dies(ledger, ledger.lease("w", 4, 0))
    ledger.begin("first")
    assert ids(ledger.lease("other", 9, 0, call=BUSY)) == [f"s{i}" for i in range(4, 10)]
    ledger.begin("--resume")
    assert ids(ledger.lease("other", 9, 0, call=BUSY)) == [f"s{i}" for i in range(4)]


def test_a_ledger_of_before_there_were_suspects_goes_on(ledger):
    ledger._db.execute("DROP TABLE deaths")
    ledger.close()
    again = Ledger(ledger.path)
    assert dies(again, again.lease("w", 4, 0)) == []
    assert ids(again.lease("w", 4, 0)) == ["s0"]
    again.close()


def test_a_repeated_call_gets_what_was_not_taken_back(ledger):
    call = LeaseCall("process", 1)
    given = ledger.lease("w", 4, 1, call=call)
    assert ledger.leased_before("w", call) == given
    ledger.streamed([(given[0].id, 1, 5)])
    ledger.requeue_ids([(given[1].id, 1)])
    assert ledger.leased_before("w", call) == given[2:]
    ledger.lease("other", 1, 0)  # s1, which is another's now
    assert ledger.leased_before("w", call) == given[2:]
    assert ledger.leased_before("w", LeaseCall("process", 2)) is None
    assert ledger.leased_before("w", LeaseCall("its successor", 1)) is None
    assert ledger.leased_before("other", call) is None
    assert ledger.leased_before("w", LeaseCall()) is None
