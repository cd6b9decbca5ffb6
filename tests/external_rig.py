"""What the tests of engines of others share: a small server that plays vLLM's, over real HTTP, and a pool over it."""

import asyncio
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cluster.external import ExternalPool
from torchspec_lite.config import build
from torchspec_lite.target import TargetInfo

INFO = TargetInfo("x", "x", "x@0", 64, 128, 8, 2, 1, 32, 512, 1e-5, 1e4, {}, 512)
UNASKED = "rank 0: TypeError: 'NoneType' object is not subscriptable"


class Process:
    """What one `vllm serve` process knows: its counters, and what the extension in its worker was told."""

    def __init__(self, started=None, drafts=0, positions=(0, 0), generated=0):
        self.started, self.drafts, self.positions, self.generated = started, drafts, positions, generated
        self.calls, self.drafting, self.receivers = [], "start-up", None
        self.staged = self.on_keep = None
        self.described = False
        self.status, self.hangs, self.refuses = {}, None, {}
        self.settings, self.prompts = None, []

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
        if method in self.refuses:
            return {"ok": False, "error": f"rank 0: RuntimeError: {self.refuses[method]}"}
        if method == "capture_stats":
            return {"ok": True, "value": self.receivers and {"receivers": self.receivers}}
        if method == "draft_log_take":
            return {"ok": True, "value": []}
        if method == "capture_on":
            self.settings, self.receivers = args[0], [endpoint for endpoint, _ in args[1]]
        elif method == "capture_off":
            self.receivers = None
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

    def complete(self, body) -> bytes:
        self.prompts.append(body)
        return json.dumps({"choices": [{"token_ids": [7, 8]}]}).encode()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(self.path, lambda process: process.metrics().encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            self.answer(self.path, lambda process: json.dumps({"results": [process.call(body["method"], body["args"])]}).encode())
        else:
            self.answer(self.path, lambda process: process.complete(body))

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
