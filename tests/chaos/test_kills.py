"""Every kind of process of a real run is killed, and stopped for a while, one after the other, while it works; the
driver too, then the run is resumed. At the end the account must balance.

Each happens `CHAOS_ROUNDS` times (default 1; `make chaos` uses more), in an order drawn from `CHAOS_SEED`. The other
files of this folder need no engine and run with every test.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import yaml

from tests.tiny import make_tiny_target
from torchspec_lite.ledger import Ledger

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
KINDS = {
    "target worker": "ray::TargetProcess", "target's engine": "VLLM::EngineCore", "trainer": "ray::TrainerProcess",
    "coordinator": "ray::Coordinator", "serving replica": "ray::ServeReplica"}
SIGNALS = ("kill -9", "stopped a while")
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
PROMPTS = 10_000 * ROUNDS
"""More than a run gets through before every kind was killed; it is then stopped by hand."""
RECOVER_S = 400


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
        "trainer": {"ranks": 2, "batch_tokens": 512, "reuse": 2, "export_every": 10, "cpus": 0.5, "dtype": "float32", "compile": False,
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

    def __init__(self, folder: Path, *options: str):
        self.run_dir = folder / "runs" / "chaos"
        self.born: set[psutil.Process] = set()  # every process of the run that was seen
        self.log = (folder / "screen.txt").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchspec_lite.cli", "train", "config.yaml", "--json", *options], cwd=folder,
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

    def children(self) -> list[psutil.Process]:
        try:
            processes = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:  # the run is over
            return []
        self.born.update(processes)
        return processes

    def orphans(self) -> list[psutil.Process]:
        """Those of `born` that are still there: one whose parent was killed is nobody's child any more."""
        return [process for process in self.born if process.is_running() and command(process)]

    def pids(self, kind: str) -> list[int]:
        return [process.pid for process in self.children() if KINDS[kind] in command(process)]

    def until_trained(self, who: str) -> float:
        """Seconds until samples are trained; after a trainer's death some are taken back first."""
        lowest = self.settled()

        def trained() -> bool:
            nonlocal lowest
            now = self.settled()
            lowest = min(lowest, now)
            return now > lowest

        return self.wait(trained, f"samples to be trained after {who} came back")

    def wait(self, condition, what: str) -> float:
        """Seconds until the condition holds; other processes' state shows only by looking."""
        begin = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                return time.monotonic() - begin  # the run is over: the account will tell
            assert time.monotonic() - begin < RECOVER_S, f"waited {RECOVER_S} s for {what}\n{self.told()}"
            time.sleep(0.1)
        return time.monotonic() - begin


def test_kill_and_stop_every_kind_of_process(place, table):
    chance = random.Random(SEED)
    print(f"\nseed {SEED}, {ROUNDS} rounds, {PROMPTS} prompts")
    run, happened = Watched(place), []
    faults = [(kind, how) for kind in (*KINDS, "driver") for how in SIGNALS] * ROUNDS
    chance.shuffle(faults)
    try:
        run.wait(lambda: run.settled() > 20 and run.pids("serving replica"), "the run to be under way")
        for kind, how in faults:
            assert run.process.poll() is None, f"only {happened} hit the run\n{run.told()}"
            if kind == "driver":
                if how == "kill -9":
                    run, took = kill_driver(run, place)
                else:
                    took = stop(run, run.process.pid, chance)
            else:
                run.wait(lambda: run.pids(kind), f"a {kind} to be there")
                victim = chance.choice(run.pids(kind))
                took = stop(run, victim, chance) if how == "stopped a while" else kill(run, kind, victim)
            who = "one trainer of 2" if kind == "trainer" else kind
            happened.append(f"{who}: {how}")
            table.add(happened[-1], took)
            print(f"{happened[-1]:<36} recovered in {took:5.1f} s")
        run.children()
        run.process.send_signal(signal.SIGINT)
        output, _ = run.process.communicate(timeout=900)
        orphans = run.orphans()
    finally:
        if run.process.poll() is None:
            run.process.kill()
    assert run.process.returncode == 0, run.told()
    samples = json.loads(output)["samples"]
    with closing(Ledger(run.run_dir / "ledger.sqlite", reuse=1, read_only=True)) as ledger:
        passes = dict(ledger._db.execute("SELECT id, COUNT(*) FROM passes GROUP BY id"))
        twice = [row.id for row in ledger.rows("durable") if row.purpose == "train" and passes[row.id] != 2]
    lost = samples["all"] - samples["durable"] - samples["rejected"] - samples["queued"]
    table.end(happened, lost, len(twice))
    print(samples)
    assert samples["all"] == PROMPTS and lost == 0 and twice == [], (samples, twice)
    assert samples["durable"] > 20
    assert orphans == []
    assert not [name for name in os.listdir("/dev/shm") if "torchspec" in name]


def kill(run: Watched, kind: str, victim: int) -> float:
    """Seconds until another process of the kind is there and samples are trained again."""
    os.kill(victim, signal.SIGKILL)
    took = run.wait(lambda: [pid for pid in run.pids(kind) if pid != victim], f"another {kind}")
    return took + run.until_trained(kind)


def stop(run: Watched, victim: int, chance: random.Random) -> float:
    """Hold a process, for less or for more than its peers' patience; seconds until samples are trained after that."""
    os.kill(victim, signal.SIGSTOP)
    over = time.monotonic() + chance.uniform(0.5, 6.0)
    run.wait(lambda: time.monotonic() > over, "the end of a pause")
    os.kill(victim, signal.SIGCONT)
    return run.until_trained(f"process {victim}")


def kill_driver(run: Watched, place: Path) -> tuple[Watched, float]:
    """kill -9 of the driver; whatever it had started must go too, then the run is resumed."""
    run.children()
    run.process.kill()
    run.process.wait(30)
    deadline = time.monotonic() + RECOVER_S
    while left := run.orphans():
        assert time.monotonic() < deadline, f"still there after the driver's death: {[command(one) for one in left]}"
        time.sleep(0.1)
    resumed = Watched(place, "--resume")
    begin = time.monotonic()
    resumed.wait(lambda: resumed.pids("trainer"), "a resumed trainer")
    return resumed, time.monotonic() - begin + resumed.until_trained("the resumed run")
