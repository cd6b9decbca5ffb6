"""`torchspec-lite serve` without an engine: what it starts."""

from contextlib import contextmanager
from types import SimpleNamespace

from cluster import serving
from tests.tiny import make_tiny_target
from torchspec_lite.config import build
from workers.server import serving_args
from workers.tap import SETTING


def test_serving_from_a_closed_loops_config_captures_nothing(tmp_path, monkeypatch):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    target = make_tiny_target(tmp_path / "target")
    config = build({
        "target": {"model": str(target)}, "run_root": str(tmp_path), "serve": {"drafter": str(tmp_path / "drafter"), "port": 0},
        "drafter": {"init_from": str(tmp_path / "drafter")},
        "traffic": {"fraction": 1.0, "second_answers": 1, "opt_out_key": "quiet"}}, "test")
    started, stopped = [], []

    @contextmanager
    def nothing(*_):
        yield ()

    async def at_once():
        return None

    def start(config, *_):
        started.append(config)
        return SimpleNamespace(url="http://here")

    monkeypatch.setattr(serving, "session", nothing)
    monkeypatch.setattr(serving, "_until_signal", at_once)
    monkeypatch.setattr(serving.pools, "start", start)
    monkeypatch.setattr(serving.pools, "stop", stopped.append)
    assert serving.serve(config, as_json=False) == 0
    (served,) = started
    assert served.traffic.fraction == 0.0 and config.traffic.fraction == 1.0
    assert served.model_dump() == config.model_dump() | {"traffic": config.traffic.model_dump() | {"fraction": 0.0}}
    assert serving.pools.application(served) == serving.pools.application(stopped[0])  # what it started is what it stops
    assert serving_args(served, str(target), "v000001")["additional_config"][SETTING] is False
