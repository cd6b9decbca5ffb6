"""Few requests, and requests faster than they are handled, and requests without a draft round: what becomes of them."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.stream_peers import EXPECT, make_sample
from tests.test_closed_loop import Looks, Told
from torchspec_lite.config import build
from torchspec_lite.pace import Pace
from torchspec_lite.reuse import Entry, ReuseBuffer
from torchspec_lite.sections import TrafficConfig
from torchspec_lite.stream import StreamTimeout
from workers.served import ServedTraffic
from workers.traffic_intake import TrafficIntake
from workers.trainer import Trainer


class Rank:
    """A trainer rank without a stream or a drafter, under a clock that is set. Its samples have 20 tokens."""

    def __init__(self, rank=0, reuse=8, **traffic):
        self.now, self.told, self.ids = 0.0, Told(), 0
        self.config = build({"target": {"model": "x"}, "data": {"train": ["demo"]}, "trainer": {"reuse": reuse, "batch_tokens": 200},
                             "stream": {"max_samples": 12}, "traffic": {"fraction": 1, "window": 8} | traffic}, "test")
        self.intake = TrafficIntake(self.config, rank, EXPECT, self.told, lambda sample: "taught", lambda: self.now)
        self.intake.receiver = SimpleNamespace(get=self._nothing, events=list)
        self.general = ReuseBuffer(reuse, 1 << 20, seed=0)
        self.served = ServedTraffic(self.intake, self.general, None, None, None, self.told, None)
        self.trainer = SimpleNamespace(
            options=self.config.trainer, buffer=self.general, served=self.served, stopping=False, time_is_up=False, resting=False,
            _fill=lambda wait_s: False, _open_ended=lambda: True)

    def _nothing(self, wait_s):
        raise StreamTimeout

    def come(self, requests):
        for _ in range(requests):
            self.intake._keep(Entry(make_sample(self.ids, 20), "taught"), self.trainer.resting)
            self.ids += 1

    def step(self):
        """Ids of the step that the trainer would make now."""
        entries = Trainer._mixed_entries(self.trainer)
        self.served.count_pass(entries)
        return [entry.sample.id for entry in entries]


@pytest.fixture
def at_once(monkeypatch):
    """The trainer gives up waiting for samples at once, and asks again at its next turn."""
    monkeypatch.setattr("workers.trainer.FEW_S", 0.0)
    monkeypatch.setattr("workers.trainer.SERVED_WAIT_S", 0.0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("max_age_s", [3600.0, 600.0])
def test_all_of_few_requests_is_trained_in_time(at_once, rank, max_age_s):
    """Nine of 20 tokens in the time that they may be kept; a batch is 200 tokens, the window eight requests."""
    it, trained, age = Rank(rank, max_age_s=max_age_s), Counter(), Counter()
    turn = max_age_s / 360
    for number in range(1080):
        it.now = number * turn
        if number % 40 == 0 and number < 720:
            it.come(1)
        for id in it.step():
            trained[id] += 1
            age[id] = it.now - int(id[1:]) * 40 * turn
    assert trained == {f"s{number}": 8 for number in range(18)}
    assert it.told.of("rejected") == [] and not it.intake.came and max(age.values()) <= max_age_s
    # On the rank that predicts on them they wait for a look during half of their time, elsewhere not at all.
    assert (min(age.values()) > max_age_s / 2) == (rank == 0)


def test_a_request_waits_for_a_look_during_half_of_its_time_but_longer_at_rest():
    it = Rank()
    it.come(1)
    it.now = 1000.0
    it.come(1)
    it.now = 1800.0
    it.intake.fill(0.0)
    assert [entry.sample.id for entry in it.intake.window] == ["s0", "s1"]
    it.now = 1801.0
    it.intake.fill(0.0, resting=True)
    assert [entry.sample.id for entry in it.intake.window] == ["s0", "s1"]
    it.intake.fill(0.0)
    assert [entry.sample.id for entry in it.intake.window] == ["s1"] and list(it.intake.buffer.entries) == ["s0"]


def test_a_step_waits_for_a_batch_but_not_for_ever(at_once):
    it = Rank(rank=1, reuse=3)  # three passes within a quarter of an hour: the wait is THIN_S, 300 s
    it.now = 4000.0
    assert it.step() == []
    it.now = 5000.0             # the wait begins when something waits
    it.come(9)
    assert it.step() == []
    it.now = 5299.0
    assert it.step() == []
    it.now = 5300.0
    assert sorted(it.step()) == [f"s{number}" for number in range(9)]
    it.now = 5301.0
    assert it.step() == []      # the next wait has begun
    it.come(1)
    assert len(it.step()) == len(it.step()) == 10  # a whole batch waits for nothing
    it.now = 5600.0
    assert it.step() == []      # counted from the first turn that finds less than one: the last of the ten has a pass left
    it.now = 5899.0
    assert it.step() == []
    it.now = 5900.0
    assert it.step() == ["s9"] and not it.intake.came


def test_general_samples_that_are_left_over_are_trained_too(at_once):
    it = Rank(reuse=1)
    it.general.add(Entry(make_sample(0, 20), "taught"))
    assert it.step() == []
    it.now = 300.0
    assert it.step() == ["s0"] and it.step() == [] and not it.general.entries


@pytest.mark.parametrize("resting, most", [(True, 8), (False, 12)])
def test_requests_that_come_faster_than_they_are_handled_leave_the_trainer_its_turn(resting, most):
    """At rest a window's worth at a time, else as many as the receiver holds."""
    it = Rank()

    def get(wait_s):
        assert it.ids < 100, "it goes on for ever"
        it.ids += 1
        return make_sample(it.ids, 20)

    it.intake.receiver = SimpleNamespace(get=get, release=lambda sample: None, events=list)
    for turn in (1, 2):
        assert it.intake.fill(0.0, resting) and it.intake.arrivals == turn * most


def test_where_requests_are_few_the_fewest_are_looked_at(tmp_path, monkeypatch):
    (tmp_path / "drafters" / "v000003").mkdir(parents=True)
    looks, now = Looks(tmp_path, monkeypatch, window=16), [0.0]
    looks.intake.clock = lambda: now[0]
    looks.served.looked_when = 0.0
    now[0] = 1799.0
    assert looks.look(4, 60).candidate is None
    now[0] = 1800.0
    assert looks.look(0, 60).decision == "export" and not looks.intake.window
    now[0] = 3599.0
    assert looks.look(7, 60).candidate is None  # half of the window until half of the time has gone by again
    assert looks.look(1, 60).decision == "export"
    now[0] = 7200.0
    assert looks.look(3, 60).candidate is None  # three are too few however long it takes


def test_nothing_follows_from_what_is_not_a_number():
    pace = Pace(TrafficConfig(rest_after=2))
    pairs = [(math.nan, math.nan), (1.9, math.nan), (math.nan, 1.5)] * 2
    assert [pace.look(*pair) for pair in pairs] == ["go_on"] * 6 and not pace.resting
    assert [pace.look(1.5, 1.5), pace.look(math.nan, math.nan), pace.look(1.5, 1.5)] == ["go_on", "go_on", "rest"]
    assert not pace.wakes(math.nan) and pace.resting and pace.rested_at == 1.5


def test_requests_without_a_round_decide_nothing(tmp_path, monkeypatch):
    (tmp_path / "drafters" / "v000003").mkdir(parents=True)
    looks = Looks(tmp_path, monkeypatch, rest_after=1)
    looks.served.predict = lambda drafter, pairs: None
    look = looks.look(8, 60)
    assert (look.decision, look.candidate, look.serving) == ("go_on", None, None)  # a version by step count would be blind
    assert looks.served.looked_at == 0 and not looks.told.of("pace")
    looks.served.pace.rested_at = 1.5
    looks.come(8)
    assert not looks.served.wakes() and looks.served.pace.resting


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_prediction_without_a_round_is_none(monkeypatch, rounds):
    found = SimpleNamespace(rows=5, rounds=rounds)
    monkeypatch.setattr("workers.trainer.predict", lambda *arguments, **options: found)
    trainer = SimpleNamespace(device_head=None, serving_dtype=None, options=SimpleNamespace(compile=False),
                              config=SimpleNamespace(serve=SimpleNamespace(num_speculative_tokens=3)))
    assert Trainer._predict_on(trainer, "drafter", [("sample", "statistics")]) is (found if rounds else None)
