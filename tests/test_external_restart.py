"""Engines of others that are restarted while a run goes on. A small server plays vLLM's, over real HTTP; the real one is in
test_external.py."""

import asyncio
import logging
import shutil
import threading

import httpx
import pytest

from cluster import external
from cluster.external import Engine
from cluster.judge import Judge
from cluster.pool import ReplicaGone
from tests.external_rig import INFO, Process, folder, server, tell  # noqa: F401 (fixtures)
from torchspec_lite.errors import UserError
from workers.target_address import ReceiverAddress


def counts(stats) -> dict:
    return {version["version"]: (version["drafts"], version["per_position"]) for version in stats["versions"]}


RESTARTS = {
    "fewer rounds": ((None, 100, (50, 20), 300), (None, 60, (50, 20), 300)),
    "fewer at a position": ((None, 100, (50, 20), 300), (None, 100, (55, 19), 301)),
    "fewer tokens, never a round": ((None, 0, (0, 0), 300), (None, 0, (0, 0), 299)),
    "another start, counters already past the old": ((1000.25, 100, (50, 20), 300), (1050.75, 160, (90, 60), 900)),
}


@pytest.mark.parametrize("kind", RESTARTS)
def test_a_restarted_engine_gets_the_promoted_version_before_it_is_listed_again(server, tell, folder, kind, monkeypatch):
    monkeypatch.setattr(external, "JOIN_AGAIN_S", 0.0)  # as where taking it lasts longer than that
    old, new = (Process(*values) for values in RESTARTS[kind])

    async def story(pool):
        assert await pool.replicas() == [server.url]
        await pool.swap(server.url, folder(2))
        pool.promote(folder(2))
        server.process = new
        (stats,), at_once = await asyncio.gather(pool.stats(), pool.stats())
        assert at_once == [stats] and stats["replica"] == f"{server.url}#2" and stats["version"] == new.drafting == "v000002"
        assert new.calls.count("swap_describe") == new.calls.count("swap_keep") == 1
        at_start = new.drafts, [*new.positions]
        assert counts(stats) == {"v000000": at_start, "v000002": (0, [0, 0])}
        new.drafts, new.positions = new.drafts + 40, (new.positions[0] + 30, new.positions[1] + 8)
        (stats,) = await pool.stats()
        assert counts(stats) == {"v000000": at_start, "v000002": (40, [30, 8])}
        await pool.swap(stats["replica"], folder(3))
        assert new.drafting == "v000003" and (await pool.replicas()) == [f"{server.url}#2"]

    tell(story, old)


def test_the_name_of_the_process_before_reaches_nothing_not_even_before_a_look(server, tell, folder):
    async def story(pool):
        server.process = new = Process(2000, 0, (0, 0), 0)
        for ask in (lambda: pool.swap(server.url, folder(2)), lambda: pool.shadow(server.url, [[1]], 4),
                    lambda: pool.capture(server.url, [])):
            with pytest.raises(ReplicaGone, match="restarted"):
                await ask()
        assert await pool.traffic() == [] and new.calls == []
        assert await pool.replicas() == [f"{server.url}#2"] and new.drafting == "v000001"
        server.process = Process(3000, 0, (0, 0), 0)
        assert await pool.traffic() == []

    tell(story, Process(1000, 100, (50, 20), 300))


def test_a_version_promoted_while_a_restarted_engine_takes_the_one_before_is_taken_too(server, tell, folder):
    async def story(pool):
        server.process = new = Process(2000)
        new.on_keep = lambda: pool.promote(folder(2))
        (stats,) = await pool.stats()
        assert stats["version"] == new.drafting == "v000002"

    tell(story, Process(1000))


def test_one_that_cannot_take_it_stays_unlisted_and_says_why_once(server, tell, folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cluster.external")

    async def story(pool):
        shutil.rmtree(folder(1))
        server.process = new = Process(2000)
        assert [await pool.stats() for _ in range(3)] == [[]] * 3
        assert new.calls.count("swap_prepare") == 1  # not at every look: each try reads a drafter
        monkeypatch.setattr(external, "JOIN_AGAIN_S", 0.0)
        pool.engines[server.url].join_at = 0.0
        assert [await pool.stats() for _ in range(3)] == [[]] * 3
        assert new.calls.count("swap_prepare") == 4
        folder(1)
        assert await pool.replicas() == [f"{server.url}#2"] == await pool.replicas()

    tell(story, Process(1000))
    restarted, refused, again = [record.getMessage() for record in caplog.records]
    assert "restarted" in restarted and "not counted" in refused and "v000001 is gone" in refused and "works again" in again


def test_a_server_whose_engine_failed_is_gone_for_now_and_not_restarted(server, tell, folder):
    async def story(pool):
        one = server.process
        one.status = {"/collective_rpc": 500, "/v1/completions": 500}
        assert await pool.traffic() == []
        for ask in (lambda: pool.swap(server.url, folder(2)), lambda: pool.capture(server.url, [])):
            with pytest.raises(ReplicaGone, match="status 500"):
                await ask()
        one.status = {"/v1/completions": 500}
        with pytest.raises(ReplicaGone, match="a prompt with status 500"):
            await pool.shadow(server.url, [[1]], 4)
        one.status = {"/metrics": 503}
        assert await pool.stats() == []
        one.status = {}
        assert await pool.replicas() == [server.url] and one.calls.count("swap_describe") == 1
        one.status = {"/collective_rpc": 404, "/v1/completions": 400}
        with pytest.raises(UserError, match="status 404; start it as"):
            await pool.swap(server.url, folder(2))
        one.status = {"/v1/completions": 400}
        with pytest.raises(httpx.HTTPStatusError):
            await pool.shadow(server.url, [[1]], 4)

    tell(story, Process(1000, 100, (50, 20), 300))


def test_a_call_that_a_dead_engine_leaves_open_is_given_up(server, tell, monkeypatch):
    async def story(pool):
        monkeypatch.setattr(external, "STATS_WAIT_S", 0.2)
        server.process.hangs = threading.Event()
        try:
            assert await asyncio.wait_for(pool.traffic(), 20) == []
        finally:
            server.process.hangs.set()

    tell(story, Process())


def test_an_engine_not_started_for_capture_says_so_once(server, tell, caplog):
    async def story(pool):
        server.process.status = {"/collective_rpc": 500}
        for _ in range(3):
            with pytest.raises(ReplicaGone):
                await pool.capture(server.url, [])
            await pool.stats()

    tell(story, Process())
    assert ["capture_on with status 500" in record.getMessage() for record in caplog.records] == [True]


class Deaf:
    """An actor each of whose methods may be called, and answers nothing."""

    def __getattr__(self, method):
        async def remote(*_):
            return None
        return type("Method", (), {"remote": staticmethod(remote)})


def test_served_traffic_is_captured_anew_at_the_report_that_finds_the_restart(server, tell):
    async def story(pool):
        trainers = [ReceiverAddress("tcp://127.0.0.1:7001"), ReceiverAddress("tcp://127.0.0.1:7002")]
        judge = Judge(pool.config, INFO, Deaf(), None, lambda: trainers)
        judge.pool = pool
        for process in (server.process, Process(2000), Process(3000)):
            server.process = process
            await judge.report()
            await judge.report()
            assert process.receivers == ["tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"]
            assert process.calls.count("capture_on") == 1 and process.drafting == "v000001"

    tell(story, Process(1000))


def test_a_page_of_counters_that_another_overtook_is_no_restart():
    pages = iter([Process(None, 10, (4, 2), 20), Process(None, 12, (5, 2), 24)])

    async def serve(request):
        page = next(pages)
        for _ in range(20 if page.drafts == 10 else 0):  # turns of the loop: the older page comes last if it can
            await asyncio.sleep(0)
        return httpx.Response(200, text=page.metrics())

    async def story():
        engine = Engine("http://engine", None, 1)
        await engine.client.aclose()
        engine.client = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(serve))
        (_, first), (_, second) = await asyncio.gather(engine.counters(), engine.counters())
        assert (first.rounds, second.rounds, engine.restarts) == (10, 12, 0)
        await engine.client.aclose()

    asyncio.run(story())
