"""Two ranks of one engine: whatever a control call meets on one of them, the next call gets its own answers.

vLLM's `collective_rpc` reads the ranks' queues in turn and stops at the first exception; what the others have answered would
then be read as the answer to the next call.
"""

from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from tests.tiny import make_tiny_target
from torchspec_lite.target import describe
from workers import serving_capture
from workers.answer import RankFailed, values_of
from workers.hot_swap import ServingExtension
from workers.tap import SETTING

STATUS = WorkerProc.ResponseStatus
SETTINGS = dict(identity="engine", fingerprint="x@0", layer_ids=[1, 2, 3], longest=512, fraction=1.0, budget_bytes=1 << 20,
                max_tokens_per_s=None, prefer_low=0.5, max_age_s=60.0, heartbeat_s=2.0, wait_s=300.0, shared_memory=False)
RECEIVERS = [["tcp://127.0.0.1:1", None]]


class Queue:
    """Where vLLM's executor reads one rank's answers."""

    def __init__(self):
        self.answers = deque()

    def dequeue(self, timeout=None):
        return self.answers.popleft()


class Engine:
    """vLLM's own `collective_rpc` over two workers in this process."""

    def __init__(self, monkeypatch, model="org/model", prepared=True):
        self.workers = [ServingExtension() for _ in range(2)]
        for rank, worker in enumerate(self.workers):
            worker.rank = rank
            worker.vllm_config = SimpleNamespace(additional_config={SETTING: prepared})
            worker.model_config = SimpleNamespace(model=model)
            worker.model_runner = SimpleNamespace(capture_tap=SimpleNamespace(watcher=None), drafter=SimpleNamespace(propose=None))
        self.executor = SimpleNamespace(is_failed=False, futures_queue=deque(), response_mqs=[Queue(), Queue()],
                                        rpc_broadcast_mq=SimpleNamespace(enqueue=self._run))
        self.rank = 0
        monkeypatch.setattr(serving_capture, "get_tensor_model_parallel_rank", lambda: self.rank)

    def _run(self, message):
        method, args, options, _ = message
        for self.rank, worker in enumerate(self.workers):
            try:
                answer = STATUS.SUCCESS, getattr(worker, method)(*args, **options)
            except Exception as error:
                answer = STATUS.FAILURE, str(error)
            self.executor.response_mqs[self.rank].answers.append(answer)

    def call(self, method, *args):
        return MultiprocExecutor.collective_rpc(self.executor, method, args=args)

    def in_step(self) -> bool:
        return not any(queue.answers for queue in self.executor.response_mqs)


@pytest.fixture
def engine(monkeypatch):
    made = []

    def make(**options):
        made.append(Engine(monkeypatch, **options))
        return made[-1]
    yield make
    for one in made:
        one.call("capture_off")


def test_what_one_rank_refuses_or_fails_at_leaves_the_next_call_its_own_answers(engine, monkeypatch):
    one = engine()

    def broken(*_):
        raise OSError("no such key file")

    monkeypatch.setattr(serving_capture, "Courier", broken)
    calls = {"capture_on": (SETTINGS, RECEIVERS), "draft_log_take": (), "swap_prepare": ("/nowhere", "x@0")}
    for method, args in calls.items():
        answers = one.call(method, *args)
        assert not answers[0]["ok"] and one.in_step()
        with pytest.raises(RankFailed, match="rank 0: "):
            values_of(answers)
    assert values_of(one.call("capture_stats")) == values_of(one.call("capture_off")) == [None, None]
    assert "no such key file" in one.call("capture_on", SETTINGS, RECEIVERS)[0]["error"]


def test_a_hub_name_is_no_hindrance(engine):
    one = engine(model="org/model")
    assert values_of(one.call("capture_on", SETTINGS, RECEIVERS)) == [None, None]
    first, second = values_of(one.call("capture_stats"))
    assert second is None and first["receivers"] == ["tcp://127.0.0.1:1"] and first["sampled"] == 0
    assert one.workers[0].capture_courier.settings.fingerprint == "x@0"
    totals = values_of(one.call("capture_off"))
    assert totals[0]["sent"] == 0 and totals[1] is None


def test_an_engine_of_another_target_or_without_the_setting_refuses(engine, tmp_path):
    folder = make_tiny_target(tmp_path / "made")
    right = describe(folder).fingerprint
    elsewhere = folder.rename(tmp_path / "another-name")
    one = engine(model=str(elsewhere))
    with pytest.raises(RankFailed, match=f"this engine serves another-name@.*, the run trains for {right[:-1]}x"):
        values_of(one.call("capture_on", SETTINGS | {"fingerprint": right[:-1] + "x"}, RECEIVERS))
    assert values_of(one.call("capture_stats")) == [None, None]
    assert values_of(one.call("capture_on", SETTINGS | {"fingerprint": right}, RECEIVERS)) == [None, None]
    other = engine(prepared=False)
    with pytest.raises(RankFailed, match="rank 0: .*lacks torchspec_lite_capture; rank 1: "):
        values_of(other.call("capture_on", SETTINGS, RECEIVERS))
    assert other.in_step()
