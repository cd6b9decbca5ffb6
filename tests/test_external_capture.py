"""What engines of others are asked for: states of their requests, and answers of our own beside their users'. A small server
plays vLLM's."""

import asyncio
import logging
import threading

import httpx
import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from cluster import external
from cluster.external import Engine, ExternalPool
from cluster.pool import ReplicaGone
from tests.external_rig import INFO, Process, folder, server, tell  # noqa: F401 (fixtures)
from torchspec_lite.config import build
from workers.target_address import ReceiverAddress

TRAINERS = [ReceiverAddress("tcp://127.0.0.1:7001")]


def test_samples_bear_the_fingerprint_of_the_target_that_the_run_trains_for(server, tell):  # noqa: F811
    async def story(pool):
        await pool.capture(server.url, TRAINERS)
        assert server.process.settings["fingerprint"] == INFO.fingerprint
        assert server.process.settings["max_age_s"] == pool.config.traffic.max_age_s

    tell(story, Process())


def test_a_refusal_is_said_once_and_not_asked_for_at_every_report(server, tell, caplog):  # noqa: F811
    caplog.set_level(logging.INFO, "cluster.external")

    async def story(pool):
        server.process.refuses["capture_on"] = "started without it"
        for _ in range(3):
            await pool.capture(server.url, TRAINERS)
        assert server.process.calls.count("capture_on") == 1
        pool.engines[server.url].capture_at = 0.0  # later
        await pool.capture(server.url, TRAINERS)
        assert server.process.calls.count("capture_on") == 2
        assert [stats["replica"] for stats in await pool.stats()] == [server.url]  # it serves all the same
        server.process = Process(2000)  # a restart may have mended it
        await pool.stats()
        await pool.capture(f"{server.url}#2", TRAINERS)
        assert server.process.receivers == ["tcp://127.0.0.1:7001"]

    tell(story, Process(1000))
    said = [record.getMessage() for record in caplog.records if "capture" in record.getMessage()]
    assert len(said) == 2 and "refuses to capture: rank 0: RuntimeError: started without it" in said[0]
    assert "capture works again" in said[1]


def test_an_engine_that_cannot_log_its_drafts_is_gone_for_the_rollout(server, tell):  # noqa: F811
    async def story(pool):
        server.process.refuses["draft_log_start"] = "no drafter"
        with pytest.raises(ReplicaGone, match="fails at draft_log_start: rank 0: RuntimeError: no drafter"):
            await pool.probe(server.url, [[1, 2]], 4)
        server.process.refuses = {"capture_stats": "no"}
        assert await pool.traffic() == []

    tell(story, Process())


def test_no_prompt_of_ours_shares_cached_blocks_with_any_other(server, tell):  # noqa: F811
    async def story(pool):
        await pool.probe(server.url, [[1, 2, 3]] * 2, 4)
        await pool.shadow(server.url, [[1, 2, 3]], 4)
        asked = [CompletionRequest(**body) for body in server.process.prompts]
        assert [request.prompt for request in asked] == [[1, 2, 3]] * 3
        salts = [request.cache_salt for request in asked]
        assert None not in salts and len(set(salts)) == 3

    tell(story, Process())


def test_prompts_of_ours_leave_half_of_the_seats_to_users():
    running, most = set(), 0

    async def serve(request):
        nonlocal most
        if request.url.path == "/collective_rpc":
            return httpx.Response(200, json={"results": [{"ok": True, "value": []}]})
        running.add(request)
        most = max(most, len(running))
        for _ in range(20):  # turns of the loop: as many come in beside it as may
            await asyncio.sleep(0)
        running.remove(request)
        return httpx.Response(200, json={"choices": [{"token_ids": [7]}]})

    async def story(max_num_seqs):
        pool = ExternalPool(build({"target": {"model": "x"}, "serve": {"external": ["http://engine"], "max_num_seqs": max_num_seqs}},
                                  "test"), INFO, "nowhere")
        (engine,) = pool.engines.values()
        await engine.client.aclose()
        engine.client = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(serve))
        found = await engine.logged("x", [[token] for token in range(9)], 4)
        assert [one["token_ids"] for one in found] == [[token, 7] for token in range(9)]
        await pool.close()

    for max_num_seqs, expected in ((8, 4), (3, 1), (1, 1)):
        most = 0
        asyncio.run(story(max_num_seqs))
        assert most == expected


def test_at_the_end_of_a_run_its_engines_stop_capturing_for_good(server, tell):  # noqa: F811
    async def story(pool):
        await pool.capture(server.url, TRAINERS)
        await pool.leave()
        assert server.process.receivers is None
        await pool.capture(server.url, TRAINERS)  # a report that was under way
        assert server.process.receivers is None

    tell(story, Process())


def test_leaving_waits_for_no_engine_and_fails_for_none(server, tell, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(external, "LEAVE_S", 0.2)

    async def story(pool):
        hangs = server.process.hangs = threading.Event()
        pool.engines["gone"] = Engine("http://127.0.0.1:1", None, 1)
        try:
            await asyncio.wait_for(pool.leave(), 20)
        finally:
            hangs.set()
        server.process = Process()
        server.process.refuses["capture_off"] = "no"
        await pool.leave()
        server.process.status = {"/collective_rpc": 500}
        await pool.leave()

    tell(story, Process())
    said = [record.getMessage() for record in caplog.records if "was not told to stop" in record.getMessage()]
    assert len([text for text in said if server.url in text]) == 3
