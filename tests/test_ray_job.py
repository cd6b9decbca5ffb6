"""`ray job submit` and `ray job stop`, against a cluster with Ray's token: the stop leaves a checkpoint to go on from."""

import json
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_run import ROOT, environment, place, wait_for  # noqa: F401  (a fixture)
from torchspec_lite import checkpoint
from torchspec_lite.ledger import Ledger
from torchspec_lite.snapshot import read_snapshot

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
RAY = Path(sys.executable).with_name("ray")
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port",
         "runtime-env-agent-port", "ray-client-server-port")


def free_ports(number: int) -> list[int]:
    """Ports that nobody has; held together, so that they differ."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@dataclass
class Cluster:
    head: subprocess.Popen
    address: str
    env: dict[str, str]  # of those who may use it


@pytest.fixture
def cluster():
    """A cluster as `ray start --head` makes it, beside any other on this machine."""
    env = environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ports = dict(zip(PORTS, free_ports(len(PORTS))))
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--num-cpus=3", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}",
             f"--object-store-memory={100 << 20}", "--min-worker-port=0", "--max-worker-port=0",
             *(f"--{name}={port}" for name, port in ports.items())],
            env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            wait_for(lambda: listens(ports["dashboard-port"]), head, 90, "Ray's page")
            yield Cluster(head, f"http://127.0.0.1:{ports['dashboard-port']}", env)
        finally:
            head.send_signal(signal.SIGTERM)  # it ends what it started
            head.wait(60)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def job(cluster, action: str, *arguments) -> str:
    done = subprocess.run([RAY, "job", action, "--address", cluster.address, *arguments], env=cluster.env,
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def submit(cluster, name: str, *arguments, wait: bool) -> str:
    return job(cluster, "submit", "--submission-id", name, *([] if wait else ["--no-wait"]),
               "--runtime-env", str(ROOT / "deploy" / "ray-job.yaml"), "--working-dir", str(ROOT), "--",
               sys.executable, "-m", "torchspec_lite.cli", "train", *arguments)


def test_a_stopped_job_leaves_a_checkpoint_to_go_on_from(place, cluster):  # noqa: F811
    # No export after the first version, so that the next checkpoint is the stop's.
    arguments = [str(place / "config.yaml"), "name=job", "serve.replicas=0", "trainer.export_every=100000", "data.epochs=40"]
    submit(cluster, "first", *arguments, wait=False)
    run_dir = place / "runs" / "job"
    wait_for(lambda: (run_dir / "status.json").exists() and read_snapshot(run_dir).step > 5, cluster.head, 200, "step 6")
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == ["step_000000"]
    job(cluster, "stop", "first")
    snapshot = read_snapshot(run_dir)
    assert snapshot.state == "stopped" and "stopped by hand" in snapshot.reason
    ledger = Ledger(run_dir / "ledger.sqlite", reuse=2, read_only=True)
    account, step = ledger.account(), max(row["step"] for row in ledger.versions())
    ledger.close()
    assert checkpoint.newest(run_dir / "checkpoints").name == f"step_{step:06d}"
    assert account["durable"] > 0 and account["queued"] > 0 and step > 5
    assert account["durable"] + account["rejected"] + account["queued"] == account["all"]
    assert "stopping: a checkpoint" in job(cluster, "logs", "first")  # readable where Ray shows logs

    shown = submit(cluster, "second", *arguments, "--resume", f"trainer.max_steps={step + 2}", wait=True)
    assert "succeeded" in shown
    again = read_snapshot(run_dir)
    assert again.state == "finished" and again.step == step + 2
    assert json.loads((run_dir / "status.json").read_text())["samples"]["durable"] >= account["durable"]
