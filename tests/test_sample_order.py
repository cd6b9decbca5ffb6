"""What a run learns from and measures on: read and queued before anything of the run is there."""

import json
import os
import time

import pytest
import yaml

from cluster.run import open_run_dir
from tests.tiny import make_tiny_target
from torchspec_lite import config as configs
from torchspec_lite.cli import main
from torchspec_lite.errors import UserError
from torchspec_lite.ledger import Ledger
from torchspec_lite.sample_order import SampleOrder, read_order


def write(path, *ids):
    path.write_text("".join(json.dumps({"id": id, "messages": [{"role": "user", "content": id}]}) + "\n" for id in ids))
    return str(path)


@pytest.fixture
def values(tmp_path):
    return {"name": "r", "run_root": str(tmp_path), "target": {"model": "x"}, "data": {
        "train": [write(tmp_path / "train.jsonl", "a", "b", "c")], "held_out": [write(tmp_path / "held.jsonl", "d", "e")],
        "epochs": 2, "max_prompts": 4, "held_out_prompts": 1}}


def build(values, **sections):
    return configs.build(values | sections, "test")


def test_held_out_samples_come_behind_those_to_learn_from(values, tmp_path):
    order = read_order(build(values), tmp_path)
    assert sorted(order.train[:3]) == ["a", "b", "c"] and order.train[3] in ("a#2", "b#2", "c#2")
    assert len(order.held_out) == 1 and order.held_out[0] in ("d", "e")
    for _ in range(2):  # a resume queues them again, which changes nothing
        order.queue(tmp_path / "ledger.sqlite", 1)
    ledger = Ledger(tmp_path / "ledger.sqlite", reuse=1)
    try:
        assert ledger.account() == ledger.account() | {"queued": 4} and ledger.account("held_out")["queued"] == 1
        assert [lease.id for lease in ledger.lease("w", 9, 0)] == [*order.train, *order.held_out]
    finally:
        ledger.close()


def test_learning_and_measuring_the_same_conversation_is_refused(values, tmp_path):
    values["data"]["held_out"] = [write(tmp_path / "same.jsonl", "b")]
    with pytest.raises(UserError, match="same.jsonl, line 1: id 'b' is among the training files too"):
        read_order(build(values), tmp_path)


def test_serving_without_anything_to_compare_versions_on_is_refused(values, tmp_path):
    values["data"] = {"train": values["data"]["train"]}
    with pytest.raises(UserError, match="data.held_out is empty"):
        read_order(build(values), tmp_path)
    for section in ({"serve": {"replicas": 0}}, {"serve": {"replicas": 2}}, {"traffic": {"fraction": 0.1}}):
        assert len(read_order(build(values, **section), tmp_path).train) == 3


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_wrong_conversation_files_are_named_before_anything_is_written(values, tmp_path, capfd, flags):
    make_tiny_target(tmp_path / "target")
    values["target"]["model"] = str(tmp_path / "target")
    values["data"]["train"] = [str(tmp_path / "none.jsonl")]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", str(tmp_path / "my.yaml"), *flags]) == 2
    assert f"data.train: no file {tmp_path / 'none.jsonl'}" in capfd.readouterr().err
    (tmp_path / "none.jsonl").write_text('{"id": "a", "messages": [{"role": "user", "content": "a"}]}\n{"id": 7}\n')
    assert main(["train", str(tmp_path / "my.yaml"), *flags]) == 2
    assert "none.jsonl, line 2" in capfd.readouterr().err and not (tmp_path / "r").exists()


def test_a_ledger_that_does_not_fit_leaves_the_config_as_it_was(values, tmp_path):
    first, order = build(values), read_order(build(values), tmp_path)
    began = open_run_dir(first, order)
    assert abs(began - time.time()) < 60
    os.utime(first.run_dir / "ledger.sqlite.lock", (began - 5000, began - 5000))  # as if that had been long ago
    before = (first.run_dir / "config.yaml").read_text()
    for other, others, told in ((build(values, trainer={"reuse": 2}), order, "trainer.reuse=1"),
                                (first, SampleOrder(order.train[::-1], order.held_out), "same data files and seed")):
        with pytest.raises(UserError, match=told):
            open_run_dir(other, others)
    assert (first.run_dir / "config.yaml").read_text() == before
    for _ in range(2):  # each resume counts from the first start
        assert open_run_dir(first, order) == pytest.approx(began - 5000, abs=1e-3)
