"""A whole run on two Ray nodes: target and trainer apart, the stream encrypted over a real interface."""

import json
import re
import subprocess

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.test_run import COMMAND, environment, place  # noqa: F401  (a fixture)
from torchspec_lite.keys import is_loopback

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def interface() -> tuple[str, str]:
    """(name, IPv4 address) of an interface that is up and not loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if name in up and one.family.name == "AF_INET" and not is_loopback(one.address):
                return name, one.address
    raise AssertionError("this test needs a network interface beside loopback, as every machine with a network has")


@pytest.fixture
def cluster():
    common = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=common | {"labels": {"role": "serve"}})
    cluster.add_node(**common | {"labels": {"role": "train"}})
    yield cluster
    cluster.shutdown()


def said(run_dir, role: str) -> str:
    """Where a role's log says that it runs."""
    lines = [json.loads(line)["message"] for line in (run_dir / "logs" / f"{role}-0.jsonl").read_text().splitlines()]
    return next(line for line in lines if line.startswith("on node "))


def test_target_and_trainer_on_different_nodes(place, cluster):  # noqa: F811
    name, address = interface()
    overrides = ["name=apart", f"ray.address={cluster.address}", f"stream.host={name}", "stream.shared_memory=false",
                 "capture.node={role: serve}", "serve.node={role: serve}", "trainer.node={role: train}",
                 "data.max_prompts=24", "trainer.reuse=1", "trainer.export_every=100"]
    plan = subprocess.run([*COMMAND, "train", "config.yaml", *overrides, "capture.gpus=1", "--dry-run"], cwd=place,
                          env=environment(), capture_output=True, text=True, timeout=120)
    assert "WARNING         one target worker needs 1 GPUs on one node" in plan.stdout, plan.stdout + plan.stderr[-2000:]
    done = subprocess.run([*COMMAND, "train", "config.yaml", *overrides, "--json"], cwd=place, env=environment(),
                          capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    samples = result["samples"]
    assert result["balanced"] and samples["durable"] + samples["rejected"] == samples["all"] == 24
    assert samples["durable"] > 0 and result["acceptance"]["served_after"] >= 1.0
    run_dir = place / "runs" / "apart"
    target, trainer = said(run_dir, "target"), said(run_dir, "trainer")
    assert target.split()[2].strip(",") != trainer.split()[2].strip(",")
    assert re.search(rf"receiving at tcp://{re.escape(address)}:\d+, encrypted", trainer)
