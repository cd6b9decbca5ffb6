"""A run as a Ray job on two nodes: placed by labels, streamed over a real interface, stopped with a checkpoint, gone on with."""

import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.test_run import COMMAND, ROOT, environment, place, wait_for  # noqa: F401  (place is a fixture)
from torchspec_lite import checkpoint
from torchspec_lite.keys import is_loopback
from torchspec_lite.ledger import Ledger
from torchspec_lite.snapshot import read_snapshot

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
RAY = Path(sys.executable).with_name("ray")
OWN_PORTS = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port", "runtime-env-agent-port")
HEAD_PORTS = ("port", "dashboard-port", "ray-client-server-port")


@dataclass
class Cluster:
    """Two nodes, labelled role=serve (the head) and role=train, as `ray start` makes them, with Ray's token."""

    env: dict[str, str]  # of those who may use it
    head: subprocess.Popen
    gcs: str
    page: str


@pytest.fixture
def cluster():
    env = environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    names = (*HEAD_PORTS, *OWN_PORTS, *OWN_PORTS)
    ports = free_ports(len(names))
    own = [f"--{name}={port}" for name, port in zip(names, ports)]
    gcs, page = f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    head, started = ["--head", *own[:7]], []
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        try:
            for role, options in (("serve", [*head, f"--temp-dir={folder}"]), ("train", [f"--address={gcs}", *own[7:]])):
                started.append(start_node(Path(folder) / f"{role}.log", role, options, env))
            yield Cluster(env, started[0], gcs, page)
        finally:
            for node in reversed(started):
                node.send_signal(signal.SIGTERM)  # it ends what it started
                node.wait(60)


def start_node(log: Path, role: str, options: list[str], env) -> subprocess.Popen:
    node = subprocess.Popen(
        [RAY, "start", "--block", "--num-cpus=2", f"--labels=role={role}", "--node-ip-address=127.0.0.1", "--min-worker-port=0",
         "--max-worker-port=0", f"--object-store-memory={100 << 20}", *options],
        env=env, stdout=log.open("w"), stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: "Ray runtime started" in log.read_text(), node, 90, f"Ray's {role} node")
    return node


def free_ports(number: int) -> list[int]:
    """Ports that nobody has; held together, so that they differ."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def interface() -> tuple[str, str]:
    """(name, IPv4 address) of an interface that is up and not loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if name in up and one.family.name == "AF_INET" and not is_loopback(one.address):
                return name, one.address
    raise AssertionError("this test needs a network interface beside loopback, as every machine with a network has")


def job(cluster, action: str, *arguments) -> str:
    done = subprocess.run([RAY, "job", action, "--address", cluster.page, *arguments], env=cluster.env, capture_output=True,
                          text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def submit(cluster, *options) -> str:
    *options, train = options
    return job(cluster, "submit", *options, "--runtime-env", str(ROOT / "deploy" / "ray-job.yaml"), "--working-dir", str(ROOT),
               "--", *COMMAND, "train", *train)


def account(run_dir: Path) -> dict[str, int]:
    ledger = Ledger(run_dir / "ledger.sqlite", reuse=1, read_only=True)
    try:
        return ledger.account()
    finally:
        ledger.close()


def place_of(run_dir: Path, role: str) -> str:
    """What a role's log says of its node: its id, and behind it the receiver's address."""
    lines = [json.loads(line)["message"] for line in (run_dir / "logs" / f"{role}-0.jsonl").read_text().splitlines()]
    return next(line for line in lines if line.startswith("on node ")).removeprefix("on node ")


def test_a_job_on_two_nodes_is_stopped_and_goes_on(place, cluster):  # noqa: F811
    name, address = interface()
    train = [str(place / "config.yaml"), "name=job", "data.epochs=100", "trainer.reuse=1", f"stream.host={name}",
             "stream.shared_memory=false", "capture.node={role: serve}", "serve.node={role: serve}",
             "trainer.node={role: train}"]
    run_dir = place / "runs" / "job"

    plan = subprocess.run([*COMMAND, "train", *train, f"ray.address={cluster.gcs}", "trainer.gpus=1", "--dry-run"],
                          env=cluster.env, capture_output=True, text=True, timeout=120)
    assert "WARNING         one trainer needs 1 GPUs on one node" in plan.stdout, plan.stdout + plan.stderr[-2000:]

    # No export after the first version, so that the next checkpoint is the stop's.
    submit(cluster, "--submission-id=first", "--no-wait", [*train, "serve.replicas=0", "trainer.export_every=100000"])
    wait_for(lambda: (run_dir / "status.json").exists() and read_snapshot(run_dir).step > 9, cluster.head, 300, "step 10")
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == ["step_000000"]
    job(cluster, "stop", "first")
    snapshot = read_snapshot(run_dir)
    assert (snapshot.state, snapshot.reason) == ("stopped", "stopped by hand")
    saved, stopped = checkpoint.newest(run_dir / "checkpoints"), account(run_dir)
    assert saved.name == f"step_{snapshot.step:06d}" and snapshot.step > 9
    assert stopped["durable"] > 0 and stopped["queued"] > 0
    assert stopped["durable"] + stopped["rejected"] + stopped["queued"] == stopped["all"] == 6000
    assert "stopping: a checkpoint" in job(cluster, "logs", "first")  # readable where Ray shows logs

    last = snapshot.step + 5
    assert "succeeded" in submit(cluster, "--submission-id=second", [*train, f"trainer.max_steps={last}", "--resume"])
    again, ended = read_snapshot(run_dir), account(run_dir)
    assert again.state == "finished" and again.step == last and again.served >= 1.0
    assert ended["durable"] + ended["rejected"] + ended["queued"] == 6000 and ended["durable"] > stopped["durable"]
    target, trainer = place_of(run_dir, "target"), place_of(run_dir, "trainer")
    assert target.split(",")[0] != trainer.split(",")[0]
    assert re.search(rf"receiving at tcp://{re.escape(address)}:\d+, encrypted", trainer)
