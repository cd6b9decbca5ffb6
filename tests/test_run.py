"""Whole runs with real processes on the tiny target: Ray, vLLM capture and serving, ZeroMQ, trainer, rollout."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.tiny import make_tiny_target
from torchspec_lite.export import verify, versions
from torchspec_lite.ledger import Ledger
from torchspec_lite.snapshot import read_snapshot

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "torchspec_lite.cli"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny target, 60 prompts (one of them unusable) and a config."""
    folder = tmp_path_factory.mktemp("run")
    make_tiny_target(folder / "target")
    for name, number in (("train", 59), ("held", 4)):
        lines = [{"id": f"{name}-{i}", "conversations": [{"role": "user", "content": f"number {i} of {name}"}]}
                 for i in range(number)]
        if name == "train":
            lines.append({"id": "long", "conversations": [{"role": "user", "content": "word " * 400}]})
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "config.yaml").write_text(yaml.safe_dump({
        "name": "tiny", "run_root": str(folder / "runs"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "max_model_len": 256},
        "data": {"train": [str(folder / "train.jsonl")], "held_out": [str(folder / "held.jsonl")], "max_length": 96,
                 "max_answer_tokens": 40, "held_out_prompts": 4},
        "capture": {"kv_cache_mib": 64, "cpus": 0.5, "max_num_seqs": 8},
        "drafter": {"draft_vocab_size": 256, "vocab_samples": 16},
        "trainer": {"batch_tokens": 512, "reuse": 2, "export_every": 4, "cpus": 0.5, "dtype": "float32", "compile": False,
                    "ttt_steps": 3, "warmup_steps": 2},
        "serve": {"kv_cache_mib": 64, "cpus": 0.5, "port": 0}, "rollout": {"shadow_tokens": 32, "min_rounds": 20},
        "dashboard": {"port": 0}}))
    return folder


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def run(place, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], cwd=place, env=environment(), capture_output=True, text=True, timeout=600)


def test_a_whole_run(place):
    done = run(place, "train", "config.yaml", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)  # one object and nothing else
    samples = result["samples"]
    assert samples["durable"] + samples["rejected"] + samples["queued"] == samples["all"] == 60
    assert samples["rejected"] >= 1 and result["rejected"]["too_long"] == 1 and samples["queued"] == 0
    assert result["state"] == "finished" and result["balanced"]

    run_dir = place / "runs" / "tiny"
    found = versions(run_dir / "drafters")
    newest = max(found)
    manifest = verify(found[newest], None)
    assert manifest.step == result["drafter"]["step"] and newest == result["drafter"]["version"]
    assert manifest.samples == samples["durable"]

    acceptance = result["acceptance"]
    # Both are AL on the same held-out prompts: vLLM's count, and the walk that predicts it.
    assert acceptance["served_after"] == pytest.approx(acceptance["predicted"], abs=0.1)
    assert 1.0 <= acceptance["served_after"] <= 4.0

    ledger = Ledger(run_dir / "ledger.sqlite", reuse=1, read_only=True)
    history = ledger.history()
    parity = [event["text"] for event in history if event["kind"] == "parity"]
    states = {row["version"]: row["state"] for row in ledger.versions()}
    ledger.close()
    assert parity, "no version went through the parity check"
    for text in parity:  # fp32: every drafted token
        equal, _, compared = text.split()[:3]
        assert equal == compared and int(compared) > 20
    assert "promoted" in states.values()


def test_status_and_rollout_of_a_finished_run(place):
    status = json.loads(run(place, "status", "runs/tiny", "--json").stdout)
    assert set(status["samples"]) == {"queued", "leased", "streamed", "trained", "durable", "rejected"}
    assert status["state"] == "finished" and status["acceptance"]["served_after"] >= 1.0
    assert status["drafter"]["version"] == max(versions(place / "runs" / "tiny" / "drafters"))
    assert "promoted" in run(place, "rollout", "runs/tiny", "status").stdout
    told = run(place, "rollout", "runs/tiny", "pause")
    assert told.returncode == 2 and "finished" in told.stderr


def test_a_run_directory_is_not_started_over(place):
    again = run(place, "train", "config.yaml")
    assert again.returncode == 2 and "--resume" in again.stderr
    nothing = run(place, "train", "config.yaml", "name=other", "--resume")
    assert nothing.returncode == 2 and "nothing to resume" in nothing.stderr


def wait_for(condition, process, limit_s, what):
    """Ask once a moment; another process's files can tell only when looked at."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, f"the run ended with {process.returncode} before {what}: {process.stderr.read()[-3000:]}"
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.05)


def durable(run_dir) -> int:
    if not (run_dir / "ledger.sqlite").exists() or not (run_dir / "checkpoints").exists():
        return 0
    ledger = Ledger(run_dir / "ledger.sqlite", reuse=1, read_only=True)
    try:
        return ledger.account()["durable"]
    finally:
        ledger.close()


def test_a_killed_run_resumes_and_serves_while_it_goes_on(place):
    """The driver is killed after a checkpoint; the resumed run loses nothing and trains nothing twice. Meanwhile its
    endpoint answers, each answer the target's own."""
    overrides = ["name=killed", "trainer.reuse=3", "trainer.export_every=3"]
    process = subprocess.Popen([*COMMAND, "train", "config.yaml", *overrides], cwd=place, env=environment(),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    run_dir = place / "runs" / "killed"
    try:
        wait_for(lambda: durable(run_dir) > 0, process, 400, "a durable sample")
    finally:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    before = durable(run_dir)

    done = run(place, "train", "config.yaml", *overrides, "--resume", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    samples = json.loads(done.stdout)["samples"]
    assert samples["durable"] + samples["rejected"] == samples["all"] == 60 and samples["durable"] >= before
    ledger = Ledger(run_dir / "ledger.sqlite", reuse=1, read_only=True)
    passes = dict(ledger._db.execute("SELECT id, COUNT(*) FROM passes GROUP BY id"))
    kept = [row.id for row in ledger.rows("durable") if row.purpose == "train"]
    ledger.close()
    assert kept and all(passes[id] == 3 for id in kept)  # each pass once, over both attempts together
    assert read_snapshot(run_dir).state == "finished"


def test_the_drafter_serves_with_the_openai_protocol(place):
    server = subprocess.Popen([*COMMAND, "serve", "config.yaml", "--json"], cwd=place, env=environment(),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        started = json.loads(server.stdout.readline())
        answer = httpx.post(f"{started['url']}/chat/completions", timeout=60, json={
            "model": started["model"], "messages": [{"role": "user", "content": "number 7"}], "max_tokens": 8,
            "temperature": 0}).json()
        assert answer["usage"]["completion_tokens"] >= 1
        card = httpx.get(f"{started['url']}/models", timeout=60).json()["data"][0]
        assert card["drafter"]["version"] == Path(started["drafter"]).name
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, server.stderr.read()[-2000:]
    finally:
        server.kill()


def test_the_loop_closes_on_served_traffic(place):
    """Users' requests alone keep the trainer going: their states are trained on, versions follow, nothing is queued."""
    process = subprocess.Popen(
        [*COMMAND, "train", "config.yaml", "name=closed", "traffic.fraction=1", "traffic.prefer_low_acceptance=0",
         "traffic.export_margin=0", "traffic.window=8", "data.max_prompts=20", "--json"],
        cwd=place, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_dir = place / "runs" / "closed"

    def served():
        if not (run_dir / "status.json").exists():
            return None
        snapshot = read_snapshot(run_dir)
        return snapshot.traffic if snapshot.links and "endpoint" in snapshot.links else None

    try:
        wait_for(lambda: served() is not None, process, 300, "the endpoint")
        url = read_snapshot(run_dir).links["endpoint"]
        asked = iter(range(10**6))

        def learned():
            number = next(asked)
            answer = httpx.post(f"{url}/v1/chat/completions", timeout=60, json={
                "model": "target", "max_tokens": 30, "messages": [{"role": "user", "content": f"request {number}"}]},
                headers={"X-Torchspec-Lite-Capture": "no"} if number % 5 == 0 else {})
            assert answer.status_code == 200, answer.text
            return (served().samples or {}).get("durable", 0) >= 20

        wait_for(learned, process, 300, "served requests to become durable")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    result = json.loads(out)
    traffic = result["traffic"]
    assert result["state"] == "stopped" and result["balanced"]
    assert traffic["durable"] >= 20 and traffic["durable"] + traffic["rejected"] == traffic["all"]
    assert traffic["queued"] == traffic["leased"] == 0
    seen = read_snapshot(run_dir).traffic
    assert seen.excluded > 0 and seen.sampled <= seen.requests - seen.excluded
    # No text and no states of a request are on the disk: neither its words, nor tensors beyond weights and optimizer.
    for path in run_dir.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".sqlite", ".sqlite-wal", ".tail", ".parquet", ".yaml"):
            assert b"request 1" not in path.read_bytes(), path
