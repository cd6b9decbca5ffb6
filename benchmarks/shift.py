"""Traffic that changes its kind: what a drafter that learns from it wins over one that does not, on the real target.

Requests of kind A (conversation, writing, school maths), then of kind B (code), then A again are sent to a run that learns
from what it serves (`traffic.fraction: 1`), starting from a drafter trained on A. Beside it stand that drafter, left as it
was, and one trained on as many prompts of B. All acceptance lengths that ratios are made of come from vLLM, on the same two sets of
prompts that nobody trained on:

* `recovered`: of the way from the A drafter to the B drafter on B's prompts, how much the version that served
  --recover-tokens after the shift had gone;
* `forgotten`: how much shorter A's prompts are drafted by the version that served when A came back than by the A drafter;
* `recovered_of_same` (with --same-prompts): as `recovered`, but against a drafter trained on so many prompts of B, say as many as
  users send until then: what those can teach at all, learned at leisure.

`curve` is the live acceptance length of users' requests. Without --pause the users keep the engine busy all the time; with
it there is time to spare, which second answers use. Takes about 20 minutes on 2 cores, and 15 more to train the drafters it
compares with, unless --drafters names them; --keep leaves the runs' folders.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.machine import machine
from torchspec_lite.chat import load_tokenizer, render_prompt
from torchspec_lite.config import build
from torchspec_lite.conversations import Dataset, resolve_files
from torchspec_lite.export import versions
from torchspec_lite.snapshot import read_snapshot
from torchspec_lite.target import describe
from torchspec_lite.target_folder import cache_dir, resolve_target
from workers.engine import engine_env

KINDS = {"A": ("maths", "write", "hand", "text"), "B": ("stdlib", "code", "task", "topic")}
HELD_OUT = 32
"""Prompts of each kind that drafters are compared on."""
START_LIMIT_S = 600
ROOT = Path(__file__).parents[1]
CONFIG, ONLINE = ROOT / "configs" / "demo.yaml", ROOT / "configs" / "closed-loop.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--train-prompts", type=int, default=330, help="that the A and the B drafter each learn from")
    parser.add_argument("--same-prompts", type=int, default=0, help="that one more B drafter learns from; 0: there is none")
    parser.add_argument("--before-tokens", type=int, default=4000, help="served tokens of A before the shift")
    parser.add_argument("--recover-tokens", type=int, default=20000, help="served tokens of B")
    parser.add_argument("--after-tokens", type=int, default=4000, help="served tokens of A after it")
    parser.add_argument("--users", type=int, default=6, help="requests at once")
    parser.add_argument("--pause", type=float, default=0.0, help="mean seconds between an answer and its user's next request")
    parser.add_argument("--drafters", nargs=2, metavar=("A", "B"), help="drafter folders to use instead of training them")
    parser.add_argument("--keep", type=Path, help="folder for the runs, left there")
    parser.add_argument("set", nargs="*", help="further config overrides of the online run")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="torchspec-lite-shift-"))
    folder.mkdir(parents=True, exist_ok=True)
    standard_output = os.dup(1)
    os.dup2(2, 1)
    try:
        result = measure(options, folder.absolute()) | {"machine": machine()}
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    os.dup2(standard_output, 1)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in {**result["ratios"], **result["figures"]}.items():
            print(f"{name:36} {value}")


def measure(options: argparse.Namespace, folder: Path) -> dict:
    target = resolve_target("smollm2")
    prompts = {kind: split(kind, folder) for kind in KINDS}
    if options.drafters:
        drafters = dict(zip(KINDS, map(Path, options.drafters)))
    else:
        drafters = {kind: train(kind, kind, folder, options.train_prompts) for kind in KINDS}
    if options.same_prompts:
        drafters["same"] = train("same", "B", folder, options.same_prompts)
    curve, served = asyncio.run(Shift(options, folder, target, prompts, drafters["A"]).run())
    tested = {name.lower(): drafter for name, drafter in drafters.items()} | {"recovered": served["B"], "last": served["A again"]}
    lengths = asyncio.run(compare(target, folder, tested))
    start, reached = lengths["a"]["B"], lengths["recovered"]["B"]
    ratios = {"recovered": (reached - start) / (lengths["b"]["B"] - start),
              "forgotten": 1 - lengths["recovered"]["A"] / lengths["a"]["A"]}
    if "same" in lengths:
        ratios["recovered_of_same"] = (reached - start) / (lengths["same"]["B"] - start)
    return {
        "ratios": ratios,
        "figures": {f"acceptance_length_{name}_on_{kind}": round(length, 3)
                    for name, found in lengths.items() for kind, length in found.items()} | {
            "versions": {name: path.name for name, path in served.items()}, "phases": phases(curve), "curve": curve},
    }


def phases(curve: list[dict]) -> dict[str, dict]:
    """What users got in each phase: seconds, answered tokens, median tokens/s of a request; second answers meanwhile."""
    found, before = {}, {"at_s": 0.0, "tokens": 0, "second_answers": 0}
    for phase in dict.fromkeys(point["phase"] for point in curve):
        points = [point for point in curve if point["phase"] == phase]
        found[phase] = {"s": points[-1]["at_s"] - before["at_s"], "tokens": points[-1]["tokens"] - before["tokens"],
                        "tokens_per_s_of_a_request": statistics.median(point["tokens_per_s"] for point in points),
                        "second_answers": points[-1]["second_answers"] - before["second_answers"]}
        before = points[-1]
    return found


def split(kind: str, folder: Path) -> list[str]:
    """Write the kind's training and held-out files; texts of users' requests, which are in neither."""
    rows = [json.loads(line) for line in resolve_files(["demo"], "train", cache_dir())[0].read_text().splitlines()]
    rows = [row for row in rows if row["id"].startswith(KINDS[kind]) and len(row["conversations"]) == 1]
    random.Random(kind).shuffle(rows)
    users = rows[HELD_OUT:HELD_OUT + len(rows) // 2]
    parts = {"held": rows[:HELD_OUT], "train": rows[HELD_OUT + len(rows) // 2:]}
    for name, part in parts.items():
        (folder / f"{kind}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return [row["conversations"][0]["content"] for row in users]


def command(folder: Path, name: str, *overrides: str, config: Path = CONFIG) -> list[str]:
    return [sys.executable, "-m", "torchspec_lite.cli", "train", str(config), f"name={name}", f"run_root={folder}",
            "dashboard.enabled=false", "--json", *overrides]


def train(name: str, kind: str, folder: Path, prompts: int) -> Path:
    """A drafter for one kind of prompts, trained as the demo does but for the serving pool."""
    subprocess.run(command(folder, name, f"data.train=[{folder}/{kind}-train.jsonl]", f"data.held_out=[{folder}/{kind}-held.jsonl]",
                           "serve.replicas=0", f"data.max_prompts={prompts}", "trainer.max_minutes=60"),
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = versions(folder / name / "drafters")
    return found[max(found)]


@dataclass
class Shift:
    """The online run and the users who send it requests."""

    options: argparse.Namespace
    folder: Path
    target: Path
    prompts: dict[str, list[str]]
    drafter: Path

    def __post_init__(self):
        self.answered = 0
        self.texts = {kind: itertools.cycle(texts) for kind, texts in self.prompts.items()}  # none twice if there are enough

    async def run(self) -> tuple[list[dict], dict[str, Path]]:
        """The curve, and a copy of the version that served at the end of each phase."""
        process = subprocess.Popen(command(
            self.folder, "online", f"data.train=[{self.folder}/A-train.jsonl]", f"data.held_out=[{self.folder}/A-held.jsonl]",
            f"drafter.init_from={self.drafter}", "data.max_prompts=80", "trainer.max_minutes=60", "traffic.prefer_low_acceptance=0",
            "serve.port=0", "rollout.min_rounds=150", *self.options.set, "dashboard.enabled=true", config=ONLINE),
            cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            url = await self._endpoint(process)
            curve, served, tokens = [], {}, 0
            self.started = time.monotonic()
            async with httpx.AsyncClient(base_url=url, timeout=300) as client:
                for phase, kind, length in (("A", "A", self.options.before_tokens), ("B", "B", self.options.recover_tokens),
                                            ("A again", "A", self.options.after_tokens)):
                    tokens += length
                    await self._phase(client, phase, kind, tokens, curve)
                    served[phase] = self._serving_now(phase)
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.wait, 300)
            return curve, served
        finally:
            process.kill()

    async def _endpoint(self, process) -> str:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if (self.folder / "online" / "status.json").exists():
                snapshot = read_snapshot(self.folder / "online")
                if "endpoint" in (snapshot.links or {}) and snapshot.step > 0:
                    return snapshot.links["endpoint"]
            await asyncio.sleep(1.0)
        raise SystemExit(f"the online run did not serve within {START_LIMIT_S} s (exit code {process.poll()})")

    async def _phase(self, client, phase: str, kind: str, until: int, curve: list[dict]) -> None:
        """Users send requests of a kind until so many tokens were served in all phases."""
        texts = self.texts[kind]
        done = asyncio.Event()

        async def user(pauses: random.Random):
            while not done.is_set():
                if self.options.pause:
                    await asyncio.sleep(pauses.expovariate(1 / self.options.pause))
                asked = time.monotonic()
                answer = await client.post("/v1/chat/completions", json={
                    "model": describe(self.target).name, "max_tokens": 128, "temperature": 0,
                    "messages": [{"role": "user", "content": next(texts)}]})
                answer.raise_for_status()
                took, length = time.monotonic() - asked, answer.json()["usage"]["completion_tokens"]
                self.answered += length
                drafts, accepted = await counters(client)
                seen = read_snapshot(self.folder / "online")
                curve.append({"phase": phase, "tokens": self.answered, "drafts": drafts, "accepted": accepted,
                              "version": seen.serving_version, "at_s": round(time.monotonic() - self.started, 1),
                              "tokens_per_s": round(length / took, 2),
                              "second_answers": seen.traffic.second_answers if seen.traffic else 0})
                if self.answered >= until:
                    done.set()

        await asyncio.gather(*(user(random.Random(f"{phase} {n}")) for n in range(self.options.users)))

    def _serving_now(self, phase: str) -> Path:
        version = read_snapshot(self.folder / "online").serving_version
        kept = self.folder / "kept" / phase.replace(" ", "-") / f"v{version:06d}"
        return Path(shutil.copytree(self.folder / "online" / "drafters" / kept.name, kept))


async def counters(client) -> tuple[int, int]:
    """Draft rounds and accepted drafts since the replica started, all versions, from its own metrics."""
    totals = {"torchspec_lite_serve_drafts_total": 0, "torchspec_lite_serve_accepted_tokens_total": 0}
    for line in (await client.get("/metrics")).text.splitlines():
        name = line.partition("{")[0]
        if name in totals:
            totals[name] += float(line.rpartition(" ")[2])
    return tuple(int(total) for total in totals.values())


async def compare(target: Path, folder: Path, drafters: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Acceptance length of each drafter on the held-out prompts of both kinds, in one engine, by vLLM's count."""
    os.environ.update(engine_env(1, 0))
    from workers.server import Replica
    tokenizer = load_tokenizer(target)
    prompts = {kind: [render_prompt(tokenizer, dataset.get(id), 400) for dataset in [Dataset([folder / f"{kind}-held.jsonl"])]
                      for id in dataset.ids] for kind in KINDS}
    config = build({"target": {"model": str(target), "max_model_len": 1024}, "serve": {"port": 0, "max_num_seqs": 8}}, "benchmark")
    replica = await Replica.start(config, str(target), str(next(iter(drafters.values()))), "compare")
    found = {}
    try:
        for name, drafter in drafters.items():
            await replica.swap(str(drafter))
            found[name] = {}
            for kind in KINDS:
                counts = await replica.shadow(prompts[kind], 128)
                found[name][kind] = 1 + sum(one["accepted"] for one in counts) / sum(one["drafts"] for one in counts)
    finally:
        replica.close()
    return found


if __name__ == "__main__":
    main()
