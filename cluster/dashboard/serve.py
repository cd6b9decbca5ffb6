"""Starting the live page: in this process for a person, or as a process of its own for the driver."""

import errno
import json
import os
import select
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from torchspec_lite.errors import UserError
from torchspec_lite.keys import is_loopback

STOP_S = 5.0


@dataclass
class DashboardHandle:
    """A dashboard in a process of its own. It ends with `close`, and with this process however that ends."""

    url: str
    process: subprocess.Popen
    log: Path

    def check(self) -> None:
        """Raises UserError when the process has ended; the run itself does not need it."""
        if self.process.poll() is not None:
            raise UserError(f"the dashboard ended with code {self.process.returncode}; its log: {self.log}")

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until pages are served. A browser may connect before: it is answered once the process is up."""
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not ready:
            raise UserError(f"the dashboard did not start within {timeout:.0f} s; its log: {self.log}")
        if not self.process.stdout.readline():
            self.process.wait(STOP_S)
            self.check()

    def close(self) -> None:
        self.process.stdin.close()  # the process ends when it sees this
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def start_dashboard(
    run_dir: Path, host: str = "127.0.0.1", port: int = 8090, token: str | None = None
) -> DashboardHandle:
    """Start the page as a process of its own and return at once; port 0 picks a free one.

    Raises UserError when the port is taken, or the host is not loopback and there is no token.
    """
    run_dir = Path(run_dir).absolute()
    log = run_dir / "logs" / "dashboard.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with bind(host, port, token) as listener, open(log, "ab") as output:
        url = address(host, listener)
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.dashboard", str(run_dir), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the driver, which closes this when it is done
        )
    process.stdin.write((token or "").encode() + b"\n")  # not by argument or variable: other processes can read those
    process.stdin.flush()
    return DashboardHandle(url, process, log)


def run_dashboard(run_dir: Path, host: str = "127.0.0.1", port: int = 8090, token: str | None = None,
                  as_json: bool = False) -> None:
    """Serve the page of a running or finished run until Ctrl-C. Raises UserError as `start_dashboard`, and when
    `run_dir` is not a run directory."""
    run_dir = Path(run_dir).absolute()
    if not any((run_dir / name).exists() for name in ("status.json", "ledger.sqlite", "config.yaml")):
        raise UserError(f"{run_dir}: no run there (no status.json, ledger.sqlite or config.yaml); give a run directory")
    with bind(host, port, token) as listener:
        if as_json:
            print(json.dumps({"url": address(host, listener)}), file=sys.__stdout__, flush=True)
        else:
            print(f"dashboard of {run_dir.name}: {address(host, listener)} (Ctrl-C ends it)", flush=True)
        try:
            serve(run_dir, listener, token)
        except KeyboardInterrupt:
            pass


def bind(host: str, port: int, token: str | None) -> socket.socket:
    """A listening socket. It is bound before anything starts, so that nobody can take the port in between."""
    if not is_loopback(host) and not token:
        raise UserError(f"dashboard.host {host}: others can reach it, so it needs dashboard.token (env:NAME reads one)")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        remedy = "choose another dashboard.port, or 0 for a free one" if taken else "check dashboard.host and .port"
        raise UserError(f"dashboard {host}:{port}: {error.strerror or error}; {remedy}") from error
    return listener


def address(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def serve(run_dir: Path, listener: socket.socket, token: str | None, parent: bool = False) -> None:
    """Serve until a signal, or with `parent` until standard input ends, which it does when the parent is gone."""
    import uvicorn
    from fastapi import FastAPI
    from nicegui import app, ui

    from cluster.dashboard.access import Access
    from cluster.dashboard.page import build

    build(run_dir)
    web = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ui.run_with(web, title="torchspec-lite", tailwind=False, dark=None, show_welcome_message=False)
    settings = uvicorn.Config(
        Access(web, token), log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="on"
    )
    server = uvicorn.Server(settings)
    if parent:
        app.on_startup(_say_ready)
        threading.Thread(target=_end_with_parent, args=[server], daemon=True).start()
    server.run(sockets=[listener])


def _say_ready() -> None:
    print("ready", flush=True)
    os.dup2(2, 1)  # nobody reads further; what is printed later goes to the log


def _end_with_parent(server) -> None:
    sys.stdin.buffer.read()
    server.should_exit = True
