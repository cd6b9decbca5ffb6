"""Engines of others that are restarted while a run goes on. A small server plays vLLM's, over real HTTP; the real one is in
test_external.py."""

import asyncio
import contextlib
import json
import logging
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from cluster import external
from cluster.external import Engine, ExternalPool
from cluster.judge import Judge
from cluster.pool import ReplicaGone
from torchspec_lite.config import build
from torchspec_lite.errors import UserError
from torchspec_lite.target import TargetInfo
from workers.target_address import ReceiverAddress

INFO = TargetInfo("x", "x", "x@0", 64, 128, 8, 2, 1, 32, 512, 1e-5, 1e4, {}, 512)
UNASKED = "rank 0: TypeError: 'NoneType' object is not subscriptable"


class Process:
    """What one `vllm serve` process knows: its counters, and what the extension in its worker was told."""

    def __init__(self, started=None, drafts=0, positions=(0, 0), generated=0):
        self.started, self.drafts, self.positions, self.generated = started, drafts, positions, generated
        self.calls, self.drafting, self.receivers = [], "start-up", None
        self.staged = self.on_keep = None
        self.described = False
        self.status, self.hangs = {}, None

    def metrics(self) -> str:
        counters = {"generation_tokens": {"": self.generated}, "spec_decode_num_drafts": {"": self.drafts},
                    "spec_decode_num_accepted_tokens": {"": sum(self.positions)}, "spec_decode_num_accepted_tokens_per_pos": {
                        f',position="{place}"': count for place, count in enumerate(self.positions)}}
        lines = []
        for name, values in counters.items():
            lines += [f"# TYPE vllm:{name}_total counter"]
            lines += [f'vllm:{name}_total{{engine="0"{label}}} {value}' for label, value in values.items()]
        if self.started is not None:
            lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {self.started}"]
        return "\n".join([*lines, ""])

    def call(self, method, args):
        self.calls.append(method)
        if self.hangs is not None:
            self.hangs.wait()
        if method == "capture_stats":
            return self.receivers and {"receivers": self.receivers}
        if method == "capture_on":
            self.receivers = [endpoint for endpoint, _ in args[1]]
        elif method == "swap_describe":
            self.described = True
        elif method == "swap_prepare":
            error = UNASKED if not self.described else None if Path(args[0]).is_dir() else f"rank 0: {args[0]} is gone"
            self.staged = Path(args[0]).name
            return {"ok": error is None, "error": error, "value": None}
        elif method == "swap_keep":
            self.drafting = self.staged
            if self.on_keep is not None:
                self.on_keep()
        return {"ok": True, "value": "f" * 16}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(self.path, lambda process: process.metrics().encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            self.answer(self.path, lambda process: json.dumps({"results": [process.call(body["method"], body["args"])]}).encode())
        else:
            self.answer(self.path, lambda process: b"{}")

    def answer(self, path, content):
        process = self.server.process
        status = process.status.get(path, 200)
        content = content(process) if status == 200 else b"no"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # one that was given up
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """`server.process` is the one that answers at `server.url`: another in its place is a restart."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.process = Process()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    """Of a version."""
    def make(version):
        path = tmp_path / f"v{version:06d}"
        path.mkdir(exist_ok=True)
        return str(path)
    return make


@pytest.fixture
def tell(server, tmp_path, folder):
    """Run a story over a pool that drafts with version 1."""
    def run(story, process):
        async def told():
            pool = ExternalPool(build({"target": {"model": "x"}, "serve": {"external": [server.url]},
                                       "drafter": {"init_from": "x"}, "traffic": {"fraction": 0.5}}, "test"), INFO, str(tmp_path))
            server.process = process
            try:
                await pool.connect(folder(1))
                await story(pool)
            finally:
                await pool.close()
        asyncio.run(told())
    return run


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
        engine = Engine("http://engine", None)
        await engine.client.aclose()
        engine.client = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(serve))
        (_, first), (_, second) = await asyncio.gather(engine.counters(), engine.counters())
        assert (first.rounds, second.rounds, engine.restarts) == (10, 12, 0)
        await engine.client.aclose()

    asyncio.run(story())
