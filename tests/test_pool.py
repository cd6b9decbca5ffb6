"""The pool on Ray Serve: two replicas behind one address, swapped one by one, restarted with the promoted version."""

import asyncio
import os
import time

import httpx
import psutil
import pytest

from tests.serving_rig import TinyTarget
from torchspec_lite.errors import UserError
from workers.refusal import SwapRefused

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(420)]
RESTART_S = 180


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TinyTarget(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def pool(target, tmp_path_factory):
    import ray

    from cluster import pool as serving
    folder = tmp_path_factory.mktemp("pool")
    drafters = [target.export(target.fresh_drafter(seed), folder / "drafters", seed) for seed in (1, 2)]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.getcwd()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    config = target.config(replicas=2, cpus=0.5, api_key="sesame")
    try:
        pool = serving.start(config, str(target.path), drafters[0], str(folder / "run"))
        yield pool, drafters
    finally:
        serving.stop(config)
        ray.shutdown()


def answers(pool, target, count):
    """Completions sent together; the pool spreads them."""
    async def ask():
        key = {"Authorization": "Bearer sesame"}
        async with httpx.AsyncClient(base_url=pool.url, headers=key, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json={
                "model": "tiny", "prompt": target.prompts[i % 6], "max_tokens": 32, "temperature": 0,
                "return_token_ids": True}) for i in range(count)))
    return [(response.status_code, target.prompts[i % 6] + response.json()["choices"][0]["token_ids"])
            for i, response in enumerate(asyncio.run(ask()))]


def versions(pool):
    return {stats["replica"]: stats["version"] for stats in asyncio.run(pool.stats())}


def wait_for_other(pool, known):
    """The name of a replica that was not there before; Ray Serve tells nobody, so it is asked again and again."""
    deadline = time.monotonic() + RESTART_S
    while time.monotonic() < deadline:
        new = versions(pool).keys() - known
        if new:
            return new.pop()
        time.sleep(0.5)
    raise TimeoutError(f"no replica beside {known} within {RESTART_S} s")


def test_one_replica_is_swapped_and_a_dead_one_comes_back_promoted(pool, target, tmp_path, monkeypatch):
    from cluster import pool as serving
    from cluster import pool_owner
    from cluster.pool import ReplicaGone
    pool, (first, second) = pool
    here, there = asyncio.run(pool.replicas())
    assert answers(pool, target, 24) == [(200, text) for text in target.texts * 4]

    result = asyncio.run(pool.swap(here, second))
    assert result["version"] == "v000002"
    assert versions(pool) == {here: "v000002", there: "v000001"}
    assert answers(pool, target, 24) == [(200, text) for text in target.texts * 4]
    counted = {stats["replica"]: [version["drafts"] for version in stats["versions"]]
               for stats in asyncio.run(pool.stats())}
    assert len(counted[here]) == 2 and len(counted[there]) == 1
    assert all(sum(drafts) > 0 for drafts in counted.values())

    with pytest.raises(SwapRefused, match="check"):
        asyncio.run(pool.swap(there, first + "-nowhere"))
    with pytest.raises(ReplicaGone, match=here):
        asyncio.run(pool.swap("nobody", second))
    probe, = asyncio.run(pool.probe(there, target.prompts[:1], 8))
    assert probe["token_ids"] == target.texts[0][:len(probe["token_ids"])]

    config = target.config(replicas=1).model_copy(update={"name": "another"})
    with pytest.raises(UserError, match="serves torchspec-lite run .* already"):
        serving.start(config, str(target.path), first, str(tmp_path))
    serving.stop(config)  # has nothing to stop, and leaves Ray Serve to those who use it
    monkeypatch.setattr(pool_owner, "WAIT_S", 0.1)
    with pytest.raises(UserError, match="another command serves from it"):
        serving.start(target.config(replicas=1), str(target.path), second, pool.run_dir)
    assert serving.promoted(pool.run_dir) == first  # what a restarted replica begins with
    assert answers(pool, target, 12) == [(200, text) for text in target.texts * 2]

    pool.promote(second)
    victim = psutil.Process(next(stats["pid"] for stats in asyncio.run(pool.stats()) if stats["replica"] == there))
    engine = victim.children(recursive=True)
    victim.kill()
    restarted = wait_for_other(pool, {here, there})
    assert versions(pool) == {here: "v000002", restarted: "v000002"}
    assert psutil.wait_procs(engine, timeout=20)[1] == []
    assert answers(pool, target, 12) == [(200, text) for text in target.texts * 2]
