"""The rollout with real engines: two replicas under steady traffic, a coordinator with its ledger, good and bad versions.

One pool for the whole file. Every answer must be the target's own (fp32: token for token), whatever is tried.
"""

import asyncio
import json
import os
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.serving_rig import TinyTarget, rewrite
from tests.steady_load import SteadyLoad
from torchspec_lite.config import build
from torchspec_lite.ledger import Ledger
from torchspec_lite.parity import ParityProbe
from torchspec_lite.sample_order import read_order
from workers.reports import Export

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]
BACK_S = 180
STREAMS_OF_ONE = 8
"""As many requests as one replica takes at once."""


class Stage:
    """The pool, the coordinator and the rollout, and drafters of the tiny target: `learned[n]` are weights after n
    steps."""

    def __init__(self, folder: Path, target: TinyTarget):
        import ray

        from cluster import pool as serving
        from cluster.roles import start_coordinator
        from cluster.rollout import Rollout
        from workers.link import Awaited
        self.target, self.ray, self.serving = target, ray, serving
        drafter, self.learned, self.number = target.fresh_drafter(1), {}, 0
        torch.set_num_threads(1)  # several wait for each other while engines have the cores
        for steps in (0, 12, 24, 40):
            target.teach(drafter, steps - max(self.learned, default=0))
            self.learned[steps] = {name: value.clone() for name, value in drafter.state_dict().items()}
        for name in ("train", "held"):
            (folder / f"{name}.jsonl").write_text(json.dumps(
                {"id": name, "conversations": [{"role": "user", "content": name}]}) + "\n")
        values = target.config(replicas=2, cpus=0.5).model_dump(mode="json", exclude_unset=True)
        self.config = build(values | {
            "name": "stage", "run_root": str(folder / "runs"),
            "data": {"train": [str(folder / "train.jsonl")], "held_out": [str(folder / "held.jsonl")]},
            # More rounds than the shadow prompts give, so that users' requests decide.
            "rollout": {"min_rounds": 150, "canary_share": 0.5, "shadow_prompts": 6, "shadow_tokens": 32, "wait_s": 60},
        }, "test")
        read_order(self.config, folder).queue(self.config.run_dir / "ledger.sqlite", self.config.trainer.reuse)
        self.handle = start_coordinator(self.config, time.time())
        self.coordinator = Awaited(self.handle)
        first = self.export(self.after(0))
        asyncio.run(self.tell(first))
        self.pool = serving.start(self.config, str(target.path), first.directory, str(self.config.run_dir))
        self.rollout = Rollout(self.config, self.pool, self.coordinator, target.prompts, target.info.fingerprint, first)

    def after(self, steps: int):
        """The drafter after so many steps."""
        drafter = self.target.fresh_drafter(1)
        drafter.load_state_dict(self.learned[steps])
        return drafter

    def export(self, drafter) -> Export:
        """A new version as a trainer writes and reports it. It claims to be better than any, so that only what is
        served can tell."""
        self.number += 1
        directory = self.target.export(drafter, self.config.run_dir / "drafters", self.number)
        probes = [ParityProbe(len(prompt), text, self.target.drafts(drafter, text)[len(prompt) - 1:].tolist())
                  for prompt, text in zip(self.target.prompts[:3], self.target.texts)]
        return Export(self.number, 10 * self.number, self.number, self.number - 1 or None, directory, 3.9, 3.9, [], probes)

    async def tell(self, export: Export) -> None:
        await self.coordinator.exported(export)

    def introduce(self, export: Export) -> str:
        async def story():
            await self.tell(export)
            return await self.rollout.introduce(export)
        return asyncio.run(story())

    def versions(self) -> set[str]:
        """What the replicas run, once both are up."""
        deadline = time.monotonic() + BACK_S
        while len(stats := asyncio.run(self.pool.stats())) < 2:
            assert time.monotonic() < deadline, f"waited {BACK_S} s for two replicas; there is {stats}"
            time.sleep(0.5)  # Ray Serve tells nobody when a replica is up
        return {replica["version"] for replica in stats}

    def promoted(self) -> str:
        return Path(self.serving.promoted(str(self.config.run_dir))).name

    def events(self) -> list[dict]:
        ledger = Ledger(self.config.run_dir / "ledger.sqlite", reuse=1, read_only=True)
        try:
            return ledger.history()
        finally:
            ledger.close()

    def path(self, export: Export) -> list[tuple[str, str]]:
        """The states a version went through, each with its reason."""
        return [(event["kind"], event["text"]) for event in self.events() if event["version"] == export.version
                and event["kind"] in ("canary", "promoted", "rolled_back", "refused")]

    def traffic(self) -> SteadyLoad:
        return SteadyLoad(self.pool.url, "tiny", [
            (prompt, text[len(prompt):]) for prompt, text in zip(self.target.prompts, self.target.texts)])

    def close(self) -> None:
        self.serving.stop(self.config)
        self.ray.shutdown()


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    import ray
    target = TinyTarget(tmp_path_factory.mktemp("target"))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.getcwd()
    ray.init(address="local", num_cpus=3, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        stage = Stage(tmp_path_factory.mktemp("stage"), target)
        yield stage
    finally:
        stage.close() if "stage" in locals() else ray.shutdown()


def test_a_good_version_is_promoted_by_what_users_get(stage):
    good = stage.export(stage.after(24))
    with stage.traffic() as traffic:
        assert stage.introduce(good) == "promoted"
    name = Path(good.directory).name
    assert stage.versions() == {name} and stage.promoted() == name
    (first, where), (last, reason) = stage.path(good)
    assert (first, last) == ("canary", "promoted")
    assert where == "on 1 of 2 replicas" and "on users' requests" in reason
    parity, = [event["text"] for event in stage.events() if event["kind"] == "parity"]
    equal, _, compared = parity.split()[:3]
    assert equal == compared and int(compared) > 20
    assert traffic.failures == [] and traffic.broken == []


def random_weights(stage):
    return stage.export(stage.target.fresh_drafter(7))


def older_weights(stage):
    return stage.export(stage.after(12))


def truncated_file(stage):
    export = stage.export(stage.after(24))
    path = Path(export.directory) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return export


def wrong_map(stage):
    """The file's vocabulary map names other tokens than the trainer's, and the manifest agrees with the file."""
    export = stage.export(stage.after(24))

    def turn(tensors):
        places = torch.arange(len(tensors["d2t"]))
        tensors["d2t"] = (places + tensors["d2t"]).roll(1) - places
    rewrite(export.directory, turn)
    return export


def not_a_number(stage):
    export = stage.export(stage.after(24))
    rewrite(export.directory, lambda tensors: tensors["fc.weight"][0, 0].fill_(float("nan")))
    return export


def other_shape(stage):
    return stage.export(stage.target.fresh_drafter(1, draft_vocab_size=320))


@pytest.mark.parametrize("make, states, reason, alarm", [
    (random_weights, ["canary", "rolled_back"], "(alarm)", True),
    (older_weights, ["canary", "rolled_back"], "worse: acceptance length", False),
    (truncated_file, ["refused"], "SHA-256 differs", False),
    (wrong_map, ["canary", "rolled_back"], "train/serve parity", True),
    (not_a_number, ["refused"], "fc.weight", False),
    (other_shape, ["canary", "refused"], "swap refused at check", True),
], ids=lambda value: value.__name__ if callable(value) else "")
def test_a_bad_version_does_not_stay(stage, make, states, reason, alarm):
    serving, bad = stage.promoted(), make(stage)
    with stage.traffic() as traffic:
        assert stage.introduce(bad) == states[-1]
    path = stage.path(bad)
    assert [state for state, _ in path] == states and reason in path[-1][1]
    assert stage.versions() == {serving} and stage.promoted() == serving
    assert traffic.failures == [] and traffic.broken == []
    assert alarm == any(event["kind"] == "alarm" and event["text"].startswith(f"version {bad.version}:")
                        for event in stage.events())


def before_comparing(stage, act):
    """Have `act(canaries)` awaited when a canary runs its new version and is about to be compared."""
    compare = type(stage.rollout)._compare

    async def acted_first(export, canaries):
        del stage.rollout._compare
        await act(canaries)
        return await compare(stage.rollout, export, canaries)
    stage.rollout._compare = acted_first


def freeze_engine(replica: psutil.Process) -> psutil.Process:
    """Stop a replica's engine where it is, so that the requests it gets from now on get no byte."""
    engine, = [child for child in replica.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    engine.suspend()
    return engine


def test_a_replica_killed_while_it_is_the_canary(stage):
    serving, better = stage.promoted(), stage.export(stage.after(40))

    async def kill(canaries):
        pid, = [stats["pid"] for stats in await stage.pool.stats() if stats["replica"] == canaries[0]]
        freeze_engine(psutil.Process(pid))
        traffic.wait_for_stuck()
        psutil.Process(pid).kill()

    with stage.traffic() as traffic:
        before_comparing(stage, kill)
        assert stage.introduce(better) == "rolled_back"
        assert stage.versions() == {serving}
    (_, _), (last, reason) = stage.path(better)
    assert last == "rolled_back" and "a replica was lost" in reason
    # A request without an answer is asked of the other replica; only streams that had begun on the dead one end early.
    assert traffic.failures == [] and len(traffic.broken) <= STREAMS_OF_ONE


def test_an_engine_that_dies_takes_its_replica_with_it(stage):
    serving = stage.promoted()
    replica = psutil.Process(asyncio.run(stage.pool.stats())[0]["pid"])
    with stage.traffic() as traffic:
        engine = freeze_engine(replica)
        traffic.wait_for_stuck()
        engine.kill()
        assert psutil.wait_procs([replica], timeout=30)[1] == []
        assert stage.versions() == {serving}
    assert traffic.failures == [] and len(traffic.broken) <= STREAMS_OF_ONE


def test_a_coordinator_killed_while_a_version_is_compared(stage):
    better, before = stage.export(stage.after(40)), stage.events()

    async def kill(canaries):
        stage.ray.kill(stage.handle, no_restart=False)

    before_comparing(stage, kill)
    with stage.traffic() as traffic:
        assert stage.introduce(better) == "promoted"
    assert [state for state, _ in stage.path(better)] == ["canary", "promoted"]
    assert stage.events()[:len(before)] == before
    assert stage.versions() == {Path(better.directory).name} == {stage.promoted()}
    assert traffic.failures == [] and traffic.broken == []
