"""kill -9 of every kind of process of a real run, one after the other, while it works; then the account must balance.

`CHAOS_ROUNDS` kills each kind that often (default 1; `make chaos` uses more), at moments drawn from `CHAOS_SEED`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.tiny import make_tiny_target
from torchspec_lite.ledger import Ledger

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
KINDS = {
    "target worker": "ray::TargetProcess", "target's engine": "VLLM::EngineCore", "trainer": "ray::TrainerProcess",
    "coordinator": "ray::Coordinator", "serving replica": "ray::ServeReplica"}
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
PROMPTS = 5000 * ROUNDS
"""More than a run gets through before every kind was killed; it is then stopped by hand."""
RECOVER_S = 300


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    make_tiny_target(folder / "target")
    for name, number in (("train", PROMPTS), ("held", 3)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(
            {"id": f"{name}-{i}", "conversations": [{"role": "user", "content": f"number {i} of {name}"}]}) + "\n"
            for i in range(number)))
    (folder / "config.yaml").write_text(yaml.safe_dump({
        "name": "chaos", "run_root": str(folder / "runs"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "max_model_len": 256},
        "data": {"train": [str(folder / "train.jsonl")], "held_out": [str(folder / "held.jsonl")], "max_length": 128,
                 "max_answer_tokens": 64, "held_out_prompts": 3},
        "capture": {"kv_cache_mib": 64, "cpus": 0.5, "max_num_seqs": 4},
        "stream": {"heartbeat_s": 1.0},
        "drafter": {"draft_vocab_size": 256, "vocab_samples": 8},
        "trainer": {"batch_tokens": 512, "reuse": 2, "export_every": 10, "cpus": 0.5, "dtype": "float32", "compile": False,
                    "ttt_steps": 3, "warmup_steps": 2},
        "serve": {"kv_cache_mib": 64, "cpus": 0.5, "port": 0}, "rollout": {"shadow_tokens": 16, "min_rounds": 10},
        "dashboard": {"enabled": False}}))
    return folder


def command(process: psutil.Process) -> str:
    """Its command line; empty for one that is gone or a zombie."""
    try:
        return " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return ""


class Watched:
    """A run in a process of its own, and what its ledger says."""

    def __init__(self, folder: Path):
        self.run_dir = folder / "runs" / "chaos"
        self.log = (folder / "screen.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchspec_lite.cli", "train", "config.yaml", "--json"], cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=self.log, text=True)

    def told(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()[-4000:]

    def settled(self) -> int:
        """Samples that are trained, durable or rejected."""
        try:
            ledger = Ledger(self.run_dir / "ledger.sqlite", reuse=1, read_only=True)
        except Exception:
            return 0
        try:
            account = ledger.account()
            return account["trained"] + account["durable"] + account["rejected"]
        finally:
            ledger.close()

    def pids(self, kind: str) -> list[int]:
        return [process.pid for process in psutil.Process(self.process.pid).children(recursive=True)
                if KINDS[kind] in command(process)]

    def wait(self, condition, what: str) -> float:
        """Seconds until the condition holds; other processes' state shows only by looking."""
        begin = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                return time.monotonic() - begin  # the run is over: the account will tell
            assert time.monotonic() - begin < RECOVER_S, f"waited {RECOVER_S} s for {what}\n{self.told()}"
            time.sleep(0.1)
        return time.monotonic() - begin


def test_kill_every_kind_of_process(place):
    chance = random.Random(SEED)
    run = Watched(place)
    print(f"\nseed {SEED}, {ROUNDS} rounds, {PROMPTS} prompts")
    rows = []
    try:
        run.wait(lambda: run.settled() > 20 and run.pids("serving replica"), "the run to be under way")
        for round in range(ROUNDS):
            for kind in chance.sample(list(KINDS), len(KINDS)):
                found = run.pids(kind)
                if run.process.poll() is not None or not found:
                    continue
                before = run.settled()
                victim = chance.choice(found)
                os.kill(victim, signal.SIGKILL)
                # Recovered: another process of the kind is there, and samples are being trained again.
                took = run.wait(lambda: [pid for pid in run.pids(kind) if pid != victim] and run.settled() > before,
                                f"the {kind} to come back and samples to be trained")
                rows.append((kind, took))
                print(f"{kind:<18} recovered in {took:5.1f} s")
        children = psutil.Process(run.process.pid).children(recursive=True)
        run.process.send_signal(signal.SIGINT)
        output, _ = run.process.communicate(timeout=900)
        orphans = [process for process in children if process.is_running() and command(process)]
    finally:
        if run.process.poll() is None:
            run.process.kill()
    assert run.process.returncode == 0, run.told()
    result = json.loads(output)
    samples = result["samples"]
    assert samples["durable"] + samples["rejected"] + samples["queued"] == samples["all"] == PROMPTS, (samples, run.told())
    assert samples["durable"] > 20
    ledger = Ledger(run.run_dir / "ledger.sqlite", reuse=1, read_only=True)
    passes = dict(ledger._db.execute("SELECT id, COUNT(*) FROM passes GROUP BY id"))
    twice = [row.id for row in ledger.rows("durable") if row.purpose == "train" and passes[row.id] != 2]
    ledger.close()
    assert twice == []
    assert len(rows) == ROUNDS * len(KINDS), f"only {rows} were killed before the run ended; raise PROMPTS"
    assert orphans == []
