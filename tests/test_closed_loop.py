"""Learning from served traffic without an engine: the mixture, the pace, the intake and its window."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.stream_peers import EXPECT, LIMIT_S, make_sample
from torchspec_lite.acceptance import Counts
from torchspec_lite.config import build
from torchspec_lite.errors import UserError
from torchspec_lite.keys import SenderKeys, load_keys, make_pair
from torchspec_lite.mixture import Mixture
from torchspec_lite.pace import Pace
from torchspec_lite.reuse import Entry, ReuseBuffer
from torchspec_lite.sections import TrafficConfig
from torchspec_lite.stream import Sender
from workers.served import ServedTraffic
from workers.target_address import ReceiverAddress, written_down
from workers.traffic_intake import TrafficIntake


def buffer_of(kind: str, lengths: list[int], reuse: int = 1) -> ReuseBuffer:
    buffer = ReuseBuffer(reuse, 1 << 30, seed=0)
    for place, length in enumerate(lengths):
        sample = SimpleNamespace(id=f"{kind}{place}", purpose={"g": "train", "s": "traffic"}[kind], token_ids=torch.zeros(length), nbytes=length, ordinal=place)
        buffer.add(Entry(sample, None))
    return buffer


def kinds(mixture: Mixture, steps: int, tokens: int) -> dict[str, int]:
    """Tokens drawn of each kind over some steps, each sample trained once."""
    total = {"g": 0, "s": 0}
    for _ in range(steps):
        entries = mixture.draw(tokens)
        assert sum(entry.tokens for entry in entries) <= tokens or len(entries) == 1
        for entry in entries:
            total[entry.sample.id[0]] += entry.tokens
        mixture.count_general_pass([entry for entry in entries if entry.sample.id[0] == "g"])
        mixture.served.count_pass([entry for entry in entries if entry.sample.id[0] == "s"])
    return total


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_the_general_share_holds_over_steps_however_long_samples_are(share):
    lengths = [30, 170, 90, 300] * 100
    total = kinds(Mixture(buffer_of("g", lengths), buffer_of("s", lengths), share), 60, 512)
    assert total["g"] / sum(total.values()) == pytest.approx(share, abs=0.02)


def test_one_kind_alone_fills_the_batch():
    assert kinds(Mixture(buffer_of("g", []), buffer_of("s", [100] * 50), 0.25), 5, 512) == {"g": 0, "s": 2500}
    assert kinds(Mixture(buffer_of("g", [100] * 50), buffer_of("s", []), 0.25), 5, 512) == {"g": 2500, "s": 0}


def test_general_samples_that_had_their_passes_are_rehearsed_in_turns_as_long_as_traffic_waits():
    mixture = Mixture(buffer_of("g", [100] * 4), buffer_of("s", [100] * 30), 0.5)
    assert kinds(mixture, 2, 400) == {"g": 400, "s": 400} and not mixture.general.entries
    assert kinds(mixture, 4, 400) == {"g": 800, "s": 800}
    assert [entry.passes for entry in mixture.rehearsal.entries.values()] == [3, 3, 3, 3]
    assert kinds(mixture, 60, 400)["s"] == 1800
    assert mixture.draw(400) == []


def test_without_a_general_share_nothing_is_rehearsed():
    mixture = Mixture(buffer_of("g", [100]), buffer_of("s", [100] * 8), 0.0)
    assert kinds(mixture, 10, 400) == {"g": 100, "s": 800}


def test_the_rehearsal_takes_no_more_memory_than_the_general_buffer():
    mixture = Mixture(ReuseBuffer(1, 250, seed=0), buffer_of("s", [100] * 8), 0.5)
    for entry in buffer_of("g", [100] * 6).entries.values():
        mixture.general.add(entry)
    kinds(mixture, 4, 400)
    assert len(mixture.rehearsal) == 3  # the third passes the bound of 250 bytes


def test_the_pace_exports_what_is_better_rests_without_gain_and_wakes():
    pace = Pace(TrafficConfig(export_margin=0.02, rest_after=3, wake_drop=0.05))
    assert [pace.look(1.50, 1.49), pace.look(1.52, 1.49), pace.look(1.50, 1.50), pace.look(1.49, 1.50)] == [
        "go_on", "export", "go_on", "go_on"]
    assert not pace.resting
    assert pace.look(1.51, 1.50) == "rest" and pace.resting
    assert not pace.wakes(1.46)
    assert not pace.wakes(1.60)      # traffic became easier: that is what must fall now
    assert not pace.wakes(1.56) and pace.resting
    assert pace.wakes(1.55) and not pace.resting
    assert pace.look(1.55, 1.55) == "go_on"  # looks are counted anew


def test_no_rest_begins_while_traffic_changes():
    pace = Pace(TrafficConfig(export_margin=0.02, rest_after=3, wake_drop=0.05))
    falling = [1.60, 1.58, 1.40, 1.30, 1.29, 1.31]  # the second fall is from 1.40, not from 1.60
    assert [pace.look(serving, serving) for serving in falling] == ["go_on"] * 6
    assert pace.look(1.30, 1.30) == "rest"  # three looks without gain or fall: 1.29, 1.31, 1.30
    assert pace.wakes(1.25)
    # What a version was that no longer serves does not count.
    assert [pace.look(1.60, 1.60), pace.look(1.64, 1.60), pace.look(1.5, 1.5), pace.look(1.5, 1.5), pace.look(1.5, 1.5)] == [
        "go_on", "export", "go_on", "go_on", "rest"]


@dataclass
class Told:
    """A coordinator that takes everything and remembers it."""

    serving: int | None = None
    known: list = field(default_factory=list)

    def call(self, method, *args):
        self.known.append((method, *args))
        return {"arrived": lambda: {id: 0 for id, _ in args[0]}, "serving_version": lambda: self.serving}[method]()

    def tell(self, method, *args):
        self.known.append((method, *args))

    def of(self, method):
        return [call[1:] for call in self.known if call[0] == method]


def intake_of(closing, told, clock, **options):
    config = build({"target": {"model": "x"}, "data": {"train": ["demo"]}, "trainer": {"reuse_buffer_mib": 1, "reuse": 2},
                    "traffic": {"fraction": 0.5, "window": 8} | options}, "test")
    intake = closing(TrafficIntake(config, 0, EXPECT, told, lambda sample: "taught", clock))
    sender = closing(Sender(intake.listen("127.0.0.1", None, True), "replica", 2**24))
    return intake, sender


def stream(intake, sender, count, tokens=20, resting=False):
    """Send numbered samples and take them in."""
    for number in range(count):
        sender.send(make_sample(number, tokens))
    while intake.arrivals < count:
        assert intake.fill(LIMIT_S, resting)


def test_the_newest_requests_are_predicted_on_before_they_are_trained(closing):
    told = Told()
    intake, sender = intake_of(closing, told, lambda: 0.0, window=4)
    stream(intake, sender, 10)
    assert [entry.sample.ordinal for entry in intake.window] == [6, 7, 8, 9]
    assert [entry.sample.ordinal for entry in intake.buffer.entries.values()] == [0, 1, 2, 3, 4, 5]
    assert [id for (deliveries, rank) in told.of("arrived") for id, _ in deliveries] == [f"s{number}" for number in range(10)]


def test_a_second_answer_is_not_predicted_on_and_waits_as_long_as_the_first(closing):
    intake, _ = intake_of(closing, Told(), lambda: 0.0, window=4)
    windows, trained = [], []
    for place in (0, 1, 2, "0 again", 3, 4, "2 again", 5, "5 again", 6):
        id = f"traffic-second-{place}" if isinstance(place, str) else f"traffic-{place}"
        intake._keep(Entry(replace(make_sample(0, 20), id=id), "taught"), resting=False)
        windows.append([entry.sample.id for entry in intake.newest()])
        trained.append([id.rpartition("-")[2] for id in intake.buffer.entries])
    assert windows[-1] == ["traffic-3", "traffic-4", "traffic-5", "traffic-6"] and windows[4] == [f"traffic-{n}" for n in range(4)]
    assert trained[4] == [] and trained[5] == ["0"] and trained[7] == ["0", "1"]
    assert trained[9] == ["0", "1", "2", "0 again"]  # "2 again" came after "3", which is still predicted on
    assert intake.arrivals == 7
    intake.rank = 1
    intake._keep(Entry(replace(make_sample(0, 20), id="traffic-second-x"), "taught"), resting=False)
    assert "traffic-second-x" in intake.buffer.entries


def test_what_was_looked_at_is_trained_at_once(closing):
    intake, sender = intake_of(closing, Told(), lambda: 0.0, window=4)
    stream(intake, sender, 3)
    intake.let_train()
    assert not intake.window and [entry.sample.ordinal for entry in intake.buffer.entries.values()] == [0, 1, 2]
    sender.send(make_sample(3, 20))
    while intake.arrivals < 4:
        intake.fill(LIMIT_S)
    assert [entry.sample.ordinal for entry in intake.newest()] == [3]


def test_other_ranks_train_at_once(closing):
    intake, sender = intake_of(closing, Told(), lambda: 0.0)
    intake.rank = 1
    stream(intake, sender, 3)
    assert not intake.window and len(intake.buffer) == 3


def test_old_requests_leave_the_memory_and_are_counted(closing):
    told, now = Told(), [0.0]
    intake, sender = intake_of(closing, told, lambda: now[0], max_age_s=100.0, window=4)
    stream(intake, sender, 6)
    assert len(intake.window) == 4 and len(intake.buffer) == 2
    now[0] = 101.0
    intake.fill(0.0)
    assert not intake.buffer.entries and not intake.window and intake.buffer.nbytes == 0 and not intake.came
    assert [(id, reason) for id, _, reason in told.of("rejected")] == [(f"s{number}", "too_old") for number in range(6)]


def test_states_of_another_target_are_an_alarm(closing):
    told = Told()
    intake, sender = intake_of(closing, told, lambda: 0.0)
    for number in range(3):
        sender.send(replace(make_sample(number, 20), fingerprint="tiny@1"))
    sender.send(make_sample(9, 20))
    while not intake.arrivals:
        intake.fill(LIMIT_S)
    sender.flush(LIMIT_S)
    intake.fill(0.0)
    assert told.of("traffic_refused") == [("mismatch",)] * 3 and len(told.of("arrived")) == 1
    (alarm,) = told.of("raise_alarm")
    assert "tiny@1" in alarm[0] and "tiny@0" in alarm[0]


def test_what_had_all_its_passes_leaves_the_memory(closing):
    told = Told()
    intake, sender = intake_of(closing, told, lambda: 0.0, window=4)
    stream(intake, sender, 10)
    entries = list(intake.buffer.entries.values())
    assert intake.count_pass(entries) == []
    assert len(entries) == 6 and intake.count_pass(entries) == entries
    assert len(intake.came) == 4 and intake.buffer.nbytes == 0


def test_a_resting_trainer_keeps_the_newest(closing):
    told = Told()
    intake, sender = intake_of(closing, told, lambda: 0.0, window=4)
    stream(intake, sender, 20, resting=True)
    assert [entry.sample.ordinal for entry in intake.buffer.entries.values()] == [12, 13, 14, 15]
    assert [entry.sample.ordinal for entry in intake.window] == [16, 17, 18, 19]
    assert {reason for _, _, reason in told.of("rejected")} == {"newer_came"} and len(told.of("rejected")) == 12


def test_in_a_full_buffer_new_requests_take_the_place_of_those_trained_most(closing):
    told = Told()
    intake, sender = intake_of(closing, told, lambda: 0.0)
    intake.rank, intake.buffer.reuse = 1, 9

    def come(number):
        sender.send(make_sample(number, 20))
        while intake.arrivals <= number:
            assert intake.fill(LIMIT_S)
        return list(intake.buffer.entries)

    come(0)
    intake.buffer.max_bytes = 3 * intake.buffer.nbytes
    come(1)
    assert come(2) == ["s0", "s1", "s2"]
    sender.send(make_sample(3, 20))
    assert not intake.fill(0.0)  # nothing has been trained: the stream waits
    for ids in (("s1", "s2"), ("s1",)):
        intake.count_pass([intake.buffer.entries[id] for id in ids])
    assert intake.fill(LIMIT_S) and list(intake.buffer.entries) == ["s0", "s2", "s3"]
    assert come(4) == ["s0", "s3", "s4"] and "s1" not in intake.came
    assert [(id, reason) for id, _, reason in told.of("rejected")] == [("s1", "newer_came"), ("s2", "newer_came")]
    intake.window.append(Entry(make_sample(5, 20), "taught"))
    intake.let_train()
    assert list(intake.buffer.entries) == ["s0", "s3", "s4", "s5"]  # what was not trained at all stays


class Looks:
    """`ServedTraffic` at whose looks `lengths` gives each drafter's accepted drafts in 100 rounds a request."""

    def __init__(self, tmp_path, monkeypatch, **traffic):
        self.told = Told(serving=3)
        config = build({"target": {"model": "x"}, "data": {"train": ["demo"]},
                        "traffic": {"fraction": 1, "window": 8, "blend": [0.5]} | traffic}, "test")
        self.intake = TrafficIntake(config, 0, EXPECT, self.told, lambda sample: "taught")
        self.lengths = {"serving": 50, ("serving", "candidate", 0.5): 20}
        self.served = ServedTraffic(self.intake, ReuseBuffer(1, 1, 0), tmp_path, None, None, self.told, self._predict)
        monkeypatch.setattr("workers.served.load_drafter", lambda folder, info, head: "serving")
        monkeypatch.setattr("workers.served.blend", lambda *ends: ends)

    def _predict(self, drafter, pairs):
        walk = Counts(100 * len(pairs), (self.lengths[drafter] * len(pairs),))
        return SimpleNamespace(walked=walk.acceptance_length, walk=walk)

    def come(self, requests):
        for _ in range(requests):
            self.intake._keep(Entry(make_sample(self.intake.arrivals, 20), "taught"), self.served.pace.resting)

    def look(self, requests, candidate, blended=20):
        """So many requests come; what is seen of them."""
        self.come(requests)
        self.lengths["candidate"], self.lengths["serving", "candidate", 0.5] = candidate, blended
        return self.served.look("candidate")


def test_a_look_compares_on_the_window_and_rest_is_told(tmp_path, monkeypatch):
    looks = Looks(tmp_path, monkeypatch, rest_after=2)
    served, told = looks.served, looks.told
    assert looks.look(8, 30) is None  # the serving version's folder is gone
    (tmp_path / "drafters" / "v000003").mkdir(parents=True)
    look = looks.look(0, 30)
    assert (look.decision, look.serving.walked, look.candidate.walked) == ("go_on", 1.50, 1.30)
    assert (look.drafter, look.serving_drafter, look.serving_version) == ("candidate", "serving", 3)
    assert len(looks.intake.buffer) == 8 and not looks.intake.window
    assert looks.look(8, 60).decision == "export"
    assert looks.look(8, 60, 65).drafter == ("serving", "candidate", 0.5)
    assert [looks.look(8, 51, 51).decision for _ in range(2)] == ["go_on", "rest"]
    assert [kind for kind, _ in told.of("event")] == ["rest"]
    looks.lengths["serving"] = 40
    assert not served.wakes()  # nothing new in the window
    looks.come(4)
    assert served.wakes() and [kind for kind, _ in told.of("event")] == ["rest", "wake"]
    assert [(report.window, report.serving, report.candidate, report.resting) for (report,) in told.of("pace")] == [
        (8, 1.5, 1.3, False), (8, 1.5, 1.6, False), (8, 1.5, 1.65, False), (8, 1.5, 1.51, False), (8, 1.5, 1.51, True),
        (4, 1.4, None, False)]


def test_few_requests_are_looked_at_together_with_those_of_the_look_before(tmp_path, monkeypatch):
    (tmp_path / "drafters" / "v000003").mkdir(parents=True)
    (tmp_path / "drafters" / "v000004").mkdir()
    looks = Looks(tmp_path, monkeypatch, export_margin=0.05)
    assert looks.look(3, 60) is None                     # versions are exported by step count until four have come
    assert looks.look(1, 52).decision == "go_on"         # half of the window, at least
    assert not looks.intake.window
    waits = looks.look(3, 90)
    assert (waits.decision, waits.candidate) == ("go_on", None) and len(looks.intake.window) == 3
    # Four requests at +0.02 and four at +0.06: +0.04. The next four push the first out: +0.06.
    assert [looks.look(1, 56).decision, looks.look(4, 56).decision] == ["go_on", "export"]
    assert looks.look(4, 52).decision == "go_on"         # what led to a version does not count again
    looks.told.serving = 4
    assert looks.look(4, 57).decision == "export"        # nor does what was seen of another serving version


@pytest.mark.parametrize("values, named", [
    ({"serve": {"replicas": 0}, "data": {"train": ["demo"]}}, "serve.replicas"),
    ({"data": {"train": []}}, "drafter.init_from")])
def test_traffic_that_cannot_be_learned_from_is_refused(values, named):
    with pytest.raises(UserError, match=named):
        build({"target": {"model": "x"}, "traffic": {"fraction": 0.1}} | values, "test")


def test_keys_are_written_down_again_when_trainers_come_back(tmp_path):
    pair, end = make_pair(), make_pair()
    receivers = [ReceiverAddress("tcp://a:1", SenderKeys(pair, end.public)), ReceiverAddress("tcp://b:2")]
    for _ in range(2):
        (first, path), second = written_down(receivers, tmp_path)
        assert first == "tcp://a:1" and second == ("tcp://b:2", None)
        assert load_keys(Path(path)) == receivers[0].keys and Path(path).stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 2
