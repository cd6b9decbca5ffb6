"""Names, history on disk and outputs of the metrics."""

import json
import os
import random
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from torchspec_lite.config import MetricsConfig
from torchspec_lite.errors import UserError
from torchspec_lite.history import POINTS, RECENT, SCHEMA, History, history_table, read_history
from torchspec_lite.metrics import METRICS, VERSIONS_SERVED, Metrics

UNITS_AT_THE_END = {"bytes": "bytes", "seconds": "seconds", "tokens/s": "per_second"}


def scrape(metrics):
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.prometheus_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_names_follow_the_conventions():
    for name, metric in METRICS.items():
        assert name == metric.name
        assert name.endswith("_total") == (metric.kind == "counter")
        assert len(metric.labels) <= 1 and metric.help.endswith(".")
        if metric.unit in UNITS_AT_THE_END:
            assert UNITS_AT_THE_END[metric.unit] in name.removesuffix("_total")


def test_what_is_recorded_is_read_back(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.record({"loss": 2.5, "grad_norm": 1}, step=3, time=1000.0)
    metrics.record({"loss_per_step": 2.0}, step=3, labels={"k": 1}, time=1000.25)
    metrics.record({"served_acceptance_length": 1.5}, time=1001.0)
    frame = read_history(tmp_path)  # while the writer lives
    metrics.close()
    assert list(frame.columns) == ["time", "step", "name", "k", "value", "low", "high", "count"]
    assert list(frame["name"]) == ["loss", "grad_norm", "loss_per_step", "served_acceptance_length"]
    assert list(frame["value"]) == [2.5, 1.0, 2.0, 1.5]
    assert list(frame["step"].dropna()) == [3, 3, 3] and frame["step"].isna().sum() == 1
    assert frame["k"].tolist()[2] == "1" and frame["k"].isna().sum() == 3
    assert str(frame["time"][2]) == "1970-01-01 00:16:40.250000+00:00"
    assert read_history(tmp_path).equals(frame)  # and after it has rolled into Parquet
    assert [path.name for path in tmp_path.glob("metrics/*.parquet")] == ["000001-000001.parquet"]
    assert list(read_history(tmp_path, ["loss"])["value"]) == [2.5]


def test_unknown_names_and_wrong_labels_are_refused(tmp_path):
    metrics = Metrics(tmp_path)
    with pytest.raises(ValueError, match="'los' is not registered.*nearest: loss"):
        metrics.record({"los": 1})
    with pytest.raises(ValueError, match="has the labels"):
        metrics.record({"loss_per_step": 1})
    with pytest.raises(ValueError, match="has the labels"):
        metrics.record({"loss": 1}, labels={"k": 1})
    metrics.close()


def test_prometheus_serves_the_newest_values(tmp_path):
    metrics = Metrics(tmp_path, MetricsConfig(prometheus_port=0))
    metrics.record({"tokens_trained_total": 10})
    metrics.record({"tokens_trained_total": 25, "loss": float("nan")})
    metrics.record({"rejected_total": 2}, labels={"reason": 'a "b"'})
    for version in range(20):
        metrics.record({"served_acceptance_length_by_version": version / 10}, labels={"version": version})
    metrics.record({"running_requests": 3}, labels={"replica": "r0"})
    series = scrape(metrics)
    assert series["torchspec_lite_tokens_trained_total"] == "25.0"
    assert series["torchspec_lite_loss"] == "NaN"
    assert series['torchspec_lite_rejected_total{reason="a \\"b\\""}'] == "2.0"
    versions = [key for key in series if "by_version" in key]
    assert len(versions) == VERSIONS_SERVED
    assert series['torchspec_lite_served_acceptance_length_by_version{version="19"}'] == "1.9"
    metrics.forget("replica", "r0")
    assert not any("running_requests" in key for key in scrape(metrics))
    taken = metrics.prometheus_port
    with pytest.raises(UserError, match=f"prometheus_port {taken}.*choose another"):
        Metrics(tmp_path / "other", MetricsConfig(prometheus_port=taken))
    metrics.close()
    with pytest.raises(OSError):
        scrape(metrics)


def test_one_writer_for_a_run(tmp_path):
    first = History(tmp_path)
    with pytest.raises(UserError, match="another process records"):
        History(tmp_path)
    first.close()
    History(tmp_path).close()


def test_a_killed_writer_loses_nothing_it_wrote(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from torchspec_lite.history import History\n"
        "history = History(sys.argv[1], roll_rows=10)\n"
        "for i in range(25): history.append(float(i), i, '{}', {'loss': float(i)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    tail = tmp_path / "metrics" / "000003.tail"
    with open(tail, "a") as file:
        file.write('[25.0, 25, "{}", {"lo')  # a line cut short
    (tmp_path / "metrics" / "000009-000009.partial").write_text("half")
    assert history_table(tmp_path)["value"].to_pylist() == [float(i) for i in range(25)]
    history = History(tmp_path, roll_rows=10)
    history.append(25.0, 25, "{}", {"loss": 25.0})
    assert history_table(tmp_path)["value"].to_pylist() == [float(i) for i in range(26)]
    history.close()
    assert not list(tmp_path.glob("metrics/*.partial"))
    assert history_table(tmp_path)["step"].to_pylist() == list(range(26))


def test_a_tail_that_its_segment_covers_is_not_read_twice(tmp_path):
    history = History(tmp_path)
    history.append(1.0, 1, "{}", {"loss": 1.0})
    kept = (tmp_path / "metrics" / "000001.tail").read_bytes()
    history.close()
    (tmp_path / "metrics" / "000001.tail").write_bytes(kept)  # killed between the rename and the removal
    segment = (tmp_path / "metrics" / "000001-000001.parquet").read_bytes()
    (tmp_path / "metrics" / "000001-000002.parquet").write_bytes(segment)  # and in the middle of a merge
    assert history_table(tmp_path).num_rows == 1
    History(tmp_path).close()
    assert sorted(path.name for path in tmp_path.glob("metrics/*.parquet")) == ["000001-000002.parquet"]
    assert history_table(tmp_path).num_rows == 1


def test_a_week_stays_bounded_and_true(tmp_path):
    """A value every 10 s for a week: means and extremes are kept, the newest rows untouched, the counter exact."""
    history = History(tmp_path, roll_rows=8192, points=512, recent=128)
    generator = random.Random(0)
    losses, start = [], 1_800_000_000.0
    for i in range(60_480):
        losses.append(generator.gauss(2.0, 0.3))
        history.append(start + 10 * i, i, "{}", {"loss": losses[-1], "tokens_trained_total": 100.0 * (i + 1)})
    history.close()
    rows = history_table(tmp_path).to_pylist()
    # between two merges up to 8 fresh segments wait, here 4,096 rows of each metric
    loss = [row for row in rows if row["name"] == "loss"]
    assert len(loss) <= 512 + 128 + 9 * 4096 and len(list(tmp_path.glob("metrics/*.parquet"))) <= 9
    assert sum(row["count"] for row in loss) == 60_480
    mean = sum(row["value"] * row["count"] for row in loss) / 60_480
    assert mean == pytest.approx(sum(losses) / 60_480, rel=1e-9)
    assert min(row["low"] for row in loss) == min(losses) and max(row["high"] for row in loss) == max(losses)
    assert [row["value"] for row in loss[-128:]] == losses[-128:]
    for row in rows:
        if row["name"] == "tokens_trained_total":
            assert row["value"] == 10 * (row["time"] - start) + 100
    size = sum(path.stat().st_size for path in tmp_path.glob("metrics/*"))
    assert size < 1_500_000


def test_default_bounds():
    assert POINTS + RECENT < 8192 and len(SCHEMA) == 8


def test_merging_twice_changes_nothing(tmp_path):
    from torchspec_lite.history import thin

    history = History(tmp_path)
    for i in range(2000):
        labels = json.dumps({"replica": f"r{i % 3}"})
        history.append(1000.0 + i, None, labels, {"running_requests": float(i)})
    history.close()
    once = thin(history_table(tmp_path), points=100, recent=50)
    assert once.num_rows <= 150 and sum(once["count"].to_pylist()) == 2000
    assert sorted(map(str, thin(once, 100, 50).to_pylist())) == sorted(map(str, once.to_pylist()))


def test_tensorboard_gets_the_same_names(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, MetricsConfig(tensorboard=True))
    metrics.record({"loss": 1.25}, step=7)
    metrics.record({"loss_per_step": 0.5}, step=7, labels={"k": 2})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "loss_per_step/k=2"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 1.25)]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_trackers_get_the_same_names(tmp_path, monkeypatch, package):
    calls = []
    module = type(sys)(package)
    module.init = lambda **arguments: calls.append(("init", arguments))
    module.log = lambda values: calls.append(("log", values))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, package, module)
    metrics = Metrics(tmp_path / "demo", MetricsConfig(**{package: True}), run_config={"seed": 1})
    metrics.record({"loss": 1.0}, step=4)
    metrics.close()
    init = ("init", {"project": "torchspec-lite", "name": "demo", "config": {"seed": 1}})
    assert calls == [init, ("log", {"loss": 1.0, "step": 4}), ("finish",)]


def test_a_missing_tracker_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="metrics.wandb is on.*pip install wandb"):
        Metrics(tmp_path, MetricsConfig(wandb=True))
    Metrics(tmp_path).close()  # the failed start gave the lock back


def test_a_run_without_metrics_is_named(tmp_path):
    with pytest.raises(UserError, match="no metrics there"):
        read_history(tmp_path)


def test_segments_are_plain_parquet(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.record({"loss": 1.0})
    metrics.close()
    assert pq.read_schema(tmp_path / "metrics" / "000001-000001.parquet").names == SCHEMA.names


# The Grafana dashboard

GRAFANA = Path(__file__).parents[1] / "deploy" / "grafana" / "torchspec-lite.json"


def grafana_expressions(board):
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    notes = [note["target"]["expr"] for note in board["annotations"]["list"]]
    return [(target["expr"], target["legendFormat"]) for target in targets] + [(text, "") for text in variables + notes]


def test_the_grafana_dashboard_asks_for_registered_names_and_labels_only():
    board = json.loads(GRAFANA.read_text())
    expressions = grafana_expressions(board)
    assert len(expressions) > 30
    for expression, legend in expressions:
        names = re.findall(r"torchspec_lite_(\w+)", expression)
        assert names, expression
        for name in names:
            labels = re.findall(r"(\w+)=~?\"", expression) + re.findall(r"\{\{(\w+)\}\}", legend)
            assert name in METRICS, expression
            assert set(labels) <= {"job", *METRICS[name].labels}, (expression, legend)
            # a counter is looked at by its growth, save where its total by reason is what is asked
            grows = re.search(r"(rate|increase)\(torchspec_lite_" + name, expression)
            asked = METRICS[name].labels == ("reason",) or "label_values" in expression
            assert bool(grows) == (METRICS[name].kind == "counter" and not asked), expression


def test_the_grafana_dashboard_has_what_grafana_needs():
    board = json.loads(GRAFANA.read_text())
    assert board["uid"] and board["title"] and board["schemaVersion"] >= 36 and "id" not in board
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert panel["title"] and place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "timeseries":  # what scripts/check-grafana found missing: Grafana's types want it
            assert panel["options"]["legend"]["calcs"] == []
        references = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(references)) == len(references)
        for holder in [panel, *panel.get("targets", [])]:
            assert panel["type"] == "row" or holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert {one["name"] for one in board["templating"]["list"]} == {"datasource", "job"}
