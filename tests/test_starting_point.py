"""The drafter that a run starts from or goes on with decides which layers are captured, and refuses what does not fit it."""

import json
from contextlib import contextmanager

import pytest
import torch

from cluster import dry_run as dry_runs
from cluster import run as runs
from cluster import serving
from cluster.dry_run import dry_run
from tests.test_trainer import drafter_of
from tests.tiny import make_tiny_target
from torchspec_lite import checkpoint
from torchspec_lite import config as configs
from torchspec_lite.errors import UserError
from torchspec_lite.export import export
from torchspec_lite.starting_point import layer_ids, settled
from torchspec_lite.target import describe
from workers.capture_settings import capture_settings
from workers.target import TargetWorker

OWN = (0, 2, 3)


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return describe(make_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def folder(info, tmp_path_factory):
    """A drafter that reads other layers than the default ones."""
    return str(export(drafter_of(info, OWN), tmp_path_factory.mktemp("drafters"), 3, torch.float32, info, 1, 1, None, None))


@pytest.fixture
def build(info, tmp_path):
    def build(**sections):
        (tmp_path / "train.jsonl").write_text(json.dumps({"id": "a", "conversations": [{"role": "user", "content": "a"}]}) + "\n")
        return configs.build({"name": "r", "run_root": str(tmp_path / "runs"), "target": {"model": info.path, "dtype": "float32"},
                              "data": {"train": [str(tmp_path / "train.jsonl")]}, "dashboard": {"enabled": False},
                              "serve": {"replicas": 0}} | sections, "test")
    return build


def save(config, info, layers, **extra):
    """A checkpoint of a run with this config."""
    drafter = drafter_of(info, layers)
    return checkpoint.save(config.run_dir / "checkpoints", 5, drafter.config, drafter, [torch.optim.AdamW(drafter.parameters())], {},
                           extra, {}, 3)


def test_all_who_capture_take_the_layers_of_the_drafter_to_start_from(build, info, folder):
    config = settled(build(drafter={"init_from": folder}), info)
    assert info.default_layer_ids() == (1, 2, 3) and config.capture.layer_ids == list(OWN)
    assert TargetWorker("t", config, info, [], []).layer_ids == OWN
    assert capture_settings(config, "replica", info, 1.0).layer_ids == OWN
    assert settled(config, info) == config


def test_a_fresh_drafter_reads_what_is_asked_for(build, info):
    for asked, ids in ((None, (1, 2, 3)), ([0, 1], (0, 1))):
        config = build(capture={"layer_ids": asked})
        assert settled(config, info) == config and layer_ids(config, info) == ids


def test_a_drafter_of_other_layers_than_asked_for_is_refused(build, info, folder):
    with pytest.raises(UserError, match=r"capture.layer_ids is \[1, 2, 3\], but drafter.init_from .*v000003 reads the streams "
                                        r"entering layers \[0, 2, 3\]; set capture.layer_ids=\[0, 2, 3\]"):
        settled(build(drafter={"init_from": folder}, capture={"layer_ids": [1, 2, 3]}), info)
    same = build(drafter={"init_from": folder}, capture={"layer_ids": list(OWN)})
    assert settled(same, info) == same


def test_a_resumed_run_takes_its_checkpoints_layers(build, info, folder, tmp_path):
    config = build(drafter={"draft_vocab_size": 256})
    path = save(config, info, (0, 1, 3))
    assert settled(config, info).capture.layer_ids == [0, 1, 3]
    # Not those of what it once started from, which may be gone.
    assert settled(build(drafter={"init_from": str(tmp_path / "gone")}), info).capture.layer_ids == [0, 1, 3]
    with pytest.raises(UserError, match=r"layer_ids is \[1, 2, 3\], but the drafter of checkpoint .*step_000005 reads .*\[0, 1, 3\]"):
        settled(build(drafter={"draft_vocab_size": 256}, capture={"layer_ids": [1, 2, 3]}), info)
    (path / "state.json").unlink()
    assert settled(config, info) == config  # a broken one, which the trainers go past


@pytest.mark.parametrize("asked, was, remedy", [
    ({"fc_norm": False}, "true", "drafter.fc_norm=true"), ({"norm_output": False}, "true", "drafter.norm_output=true"),
    ({"intermediate_size": 64}, "128", "drafter.intermediate_size=128"),
    ({"draft_vocab_size": 128}, "256", "drafter.draft_vocab_size=256"), ({"draft_vocab_size": None}, "256", "drafter.draft_vocab_size=256")])
def test_a_resumed_run_whose_config_asks_for_another_drafter_is_refused(build, info, asked, was, remedy, folder):
    config = build(drafter={"draft_vocab_size": 256} | asked)
    save(config, info, (1, 2, 3))
    with pytest.raises(UserError, match=f"step_000005 has {was}, the config asks for .*; set {remedy}, or"):
        settled(config, info)
    # A drafter from a folder has the folder's shape.
    assert settled(build(drafter=asked | {"init_from": folder}), info).capture.layer_ids == [1, 2, 3]
    assert settled(build(drafter={"draft_vocab_size": 256, "intermediate_size": 128}), info).capture.layer_ids == [1, 2, 3]


def test_a_resume_on_another_target_is_refused(build, info):
    config = build(drafter={"draft_vocab_size": 256})
    save(config, info, (1, 2, 3), target="another@0123")
    with pytest.raises(UserError, match=f"trained on target another@0123, but target.model is {info.fingerprint} now; .*init_from"):
        settled(config, info)


def test_the_driver_settles_it_before_anything_starts(build, info, folder, monkeypatch):
    started = []

    class Started(Exception):
        pass

    @contextmanager
    def session(options, plan):
        started.append(plan)
        yield []

    async def story(run):
        started.append(run.config)
        raise Started

    monkeypatch.setattr(runs, "session", session)
    monkeypatch.setattr(runs, "story", story)
    config = build(drafter={"init_from": folder})
    with pytest.raises(Started):
        runs.train(config, resume=False, quiet=True)
    plan, running = started
    assert plan.layer_ids == OWN and running.capture.layer_ids == list(OWN)
    assert configs.load(config.run_dir / "config.yaml").capture.layer_ids == list(OWN)
    values, _ = dry_run(config)
    assert tuple(values["layer_ids"]) == OWN
    with pytest.raises(UserError, match="capture.layer_ids"):
        dry_run(build(drafter={"init_from": folder}, capture={"layer_ids": [1, 2, 3]}))


def test_code_of_the_target_is_fetched_only_where_it_is_trusted(build, monkeypatch):
    asked = []

    def resolve(name, trust_remote_code):
        asked.append((name, trust_remote_code))
        raise UserError("enough")

    for module, command in ((runs, lambda config: runs.train(config, False, True)), (dry_runs, dry_run),
                            (serving, lambda config: serving.serve(config, False))):
        monkeypatch.setattr(module, "resolve_target", resolve)
        for trusted in (False, True):
            with pytest.raises(UserError, match="enough"):
                command(build(target={"model": "org/model", "trust_remote_code": trusted}, serve={"replicas": 1}))
    assert asked == [("org/model", False), ("org/model", True)] * 3
