"""Where a run's time goes: the clock, the trace and the closing page."""

import gzip
import json
import threading
from types import SimpleNamespace

import pytest
import torch

from cluster.summary import summarize
from tests.test_learner import make_learner, make_samples
from tests.tiny import make_tiny_target
from torchspec_lite.target import describe
from workers import phases as clock
from workers.phases import Phases
from workers.reports import PHASES
from workers.trace import RECORDED, SKIPPED, WARM_UP, Trace


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return describe(make_tiny_target(tmp_path_factory.mktemp("target")))


def test_an_inner_phase_is_not_counted_for_the_outer_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    phases = Phases(traced=False)
    with phases.phase("wait"):
        now[0] += 5
        with phases.phase("teacher"):
            now[0] += 2
        now[0] += 1
        with pytest.raises(ZeroDivisionError), phases.phase("teacher"):
            now[0] += 0.5
            1 / 0
    with phases.phase("wait"):
        now[0] += 10
    assert phases.seconds == dict.fromkeys(PHASES, 0.0) | {"wait": 16.0, "teacher": 2.5}
    with pytest.raises(KeyError), phases.phase("waiting"):
        pass


def test_an_optimizer_step_is_forward_backward_and_optimizer(target):
    learner = make_learner(target, micro_batch_tokens=64)
    entered = []

    class Phase:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append((self.name, learner.drafter.fc.grad is not None, float(learner.drafter.fc.detach().norm())))

        def __exit__(self, *error):
            pass

    samples = make_samples(target, learner.head, number=3)  # 12 + 19 + 26 tokens: one micro-batch
    start = float(learner.drafter.fc.detach().norm())
    learner.train(samples, 0.0, Phase)
    assert [name for name, *_ in entered] == ["forward", "forward", "backward", "backward", "optimizer"]
    assert [gradient for _, gradient, _ in entered] == [False, False, False, True, True]
    assert all(norm == start for *_, norm in entered) and float(learner.drafter.fc.detach().norm()) != start
    entered.clear()
    learner.train(make_samples(target, learner.head), 0.0, Phase)
    assert len(entered) > 5 and [name for name, *_ in entered][-2:] == ["backward", "optimizer"]


def spans(path):
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("name") in PHASES and event["ph"] == "X"]


def test_a_trace_has_the_phases_of_a_few_steady_steps(target, tmp_path):
    learner, phases = make_learner(target), Phases(traced=True)
    samples = make_samples(target, learner.head, number=2)
    trace = Trace(tmp_path / "profile")
    for step in range(1, SKIPPED + WARM_UP + RECORDED + 3):
        assert (trace.path is None) == (step <= SKIPPED + WARM_UP + RECORDED)
        learner.train(samples, 0.0, phases.phase)
        trace.step()
    trace.close()
    assert trace.path.parent == tmp_path / "profile" and list(trace.path.parent.iterdir()) == [trace.path]
    found = spans(trace.path)
    assert found.count("optimizer") == RECORDED and found.count("forward") == 2 * RECORDED
    assert torch.tensor([phases.seconds[name] for name in ("forward", "backward", "optimizer")]).min() > 0


@pytest.mark.parametrize("steps, written", [(2, 0), (SKIPPED + WARM_UP + 1, 1)])
def test_a_run_that_ends_early_writes_what_there_is(tmp_path, steps, written):
    """In a thread that is not the main one, as in a Ray actor."""
    phases, paths = Phases(traced=True), []

    def work():
        trace = Trace(tmp_path)
        for _ in range(steps):
            with phases.phase("optimizer"):
                torch.ones(3).sum()
            trace.step()
        trace.close()
        paths.append(trace.path)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert (paths[0] is not None) == bool(written)
    assert not written or spans(paths[0]).count("optimizer") == written


def test_the_closing_object_has_the_phases_and_the_page_of_a_profiled_run_too(tmp_path):
    account = {"samples": {"durable": 3, "rejected": 0, "queued": 0, "leased": 0, "streamed": 0, "trained": 0, "all": 3},
               "traffic": {"durable": 2, "rejected": 1, "all": 3},
               "reasons": {}}
    trained = {"version": 1, "step": 9, "tokens": 100, "trace": "runs/x/profile/trace.json.gz",
               "phases": dict.fromkeys(PHASES, 0.0) | {"wait": 30.0, "forward": 7.52, "backward": 2.48}}
    pages = []
    for profiled in (False, True):
        values, page = summarize(tmp_path, "finished", account, trained, None, None, None, 60.0, profiled, "next")
        assert values["phases"] == trained["phases"] | {"forward": 7.5, "backward": 2.5}
        assert values["trace"] == trained["trace"]
        pages.append(page.splitlines())
    plain, profiled = pages
    assert [line for line in profiled if line in plain] == plain
    more = [line.split() for line in profiled if line not in plain]
    assert ["wait", "for", "data", "30.0", "s", "75.0%"] in more and ["forward", "7.5", "s", "18.8%"] in more
    assert ["trace:", "runs/x/profile/trace.json.gz"] in more
    assert len(more) == 2 + len(PHASES)
