"""The command line: where words may stand, and the plan of a run."""

import json

import pytest
import yaml

from tests.tiny import make_tiny_target
from torchspec_lite.cli import main, parse


def test_overrides_may_follow_flags():
    options = parse(["train", "my.yaml", "name=a", "--resume", "trainer.ranks=2", "seed=3"])
    assert parse(["rollout", "runs/a", "promote", "0"]).version == 0
    assert options.overrides == ["name=a", "trainer.ranks=2", "seed=3"] and options.resume
    for wrong in (["train", "my.yaml", "--resum3"], ["status", "runs/a", "seed=3"],
                  ["rollout", "runs/a", "promote", "-1"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_a_dry_run_says_what_this_machine_lacks_and_starts_nothing(tmp_path, capfd):
    make_tiny_target(tmp_path / "target")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({
        "run_root": str(tmp_path / "runs"), "target": {"model": str(tmp_path / "target"), "dtype": "float32"},
        "data": {"train": ["demo"], "held_out": ["demo"]}, "stream": {"host": "eth0", "link_gbit": 1},
        "capture": {"tokens_per_s": 200_000, "gpus": 99, "node": {"role": "a"}}}))
    assert main(["train", str(tmp_path / "my.yaml"), "--dry-run", "--json", "trainer.ranks=2"]) == 0
    plan = json.loads(capfd.readouterr().out)
    roles = {role["name"]: role for role in plan["roles"]}
    # 4 states of 64 fp32 channels, id and mask: 1,029 bytes a token, 200,000 of them a second for two trainers.
    assert plan["bytes_per_token"] == 1029 and roles["trainer"]["stream"] == 1029 * 100_000
    assert plan["encrypted"] and len(plan["doubts"]) == 3
    assert "0.21 GB/s" in plan["doubts"][0] and "1 Gbit/s carries 0.12" in plan["doubts"][1]
    assert "no node is labelled role=a" in plan["doubts"][2]
    assert not (tmp_path / "runs").exists()
    assert main(["train", str(tmp_path / "my.yaml"), "--dry-run", "capture.node={}"]) == 0
    assert "WARNING         one target worker needs 99 GPUs on one node" in capfd.readouterr().out
