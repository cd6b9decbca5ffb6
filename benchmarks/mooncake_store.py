"""Mooncake's store over TCP as a way to hand samples over: put under a key, the key told, got, removed.

Needs `pip install mooncake-transfer-engine-non-cuda` and the system's `libibverbs1`. (The package without `-non-cuda`
asks for libcuda and does not load without it.)
"""

import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import zmq

LIMIT_S = 60.0
WINDOW = 8  # samples in the store at once; ZeroMQ's high-water marks, 4 at each end, give the other ways as many


class Consumer:
    """Starts Mooncake's own server; `address` is for the producer."""

    def __init__(self, nbytes: int, budget: int):
        import mooncake
        meta, rpc, metrics = (_free_port() for _ in range(3))
        self.master = subprocess.Popen(
            [Path(mooncake.__path__[0]) / "mooncake_master", "-enable_http_metadata_server=true",
             f"-http_metadata_server_port={meta}", f"-rpc_port={rpc}", f"-metrics_port={metrics}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for port in (meta, rpc):
            _wait_for(port)
        self.data = np.empty(nbytes, np.uint8)
        self.store = _store(meta, rpc, budget, self.data)
        self.pair = zmq.Context.instance().socket(zmq.PAIR)
        self.pair.bind("tcp://127.0.0.1:0")
        self.address = self.pair.last_endpoint.decode(), meta, rpc

    def receive(self) -> np.ndarray:
        """The next sample's bytes, valid until the next call."""
        key = self.pair.recv_string()
        got = self.store.get_into(key, self.data.ctypes.data, self.data.nbytes)
        if got != self.data.nbytes:
            raise RuntimeError(f"Mooncake gave {got} for {key}")
        self.store.remove(key, True)  # though it was read just now
        self.pair.send(b"")
        return self.data

    def close(self) -> None:
        self.store.close()
        self.master.kill()
        self.master.wait()


class Producer:
    """Puts the same bytes again and again, at most WINDOW of them ahead."""

    def __init__(self, parts: list, budget: int, address: tuple):
        endpoint, meta, rpc = address
        self.data = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
        self.store = _store(meta, rpc, budget, self.data)
        self.pair = zmq.Context.instance().socket(zmq.PAIR)
        self.pair.connect(endpoint)

    def send(self, number: int) -> None:
        if number >= WINDOW:
            self.pair.recv()
        if code := self.store.put_from(f"sample-{number}", self.data.ctypes.data, self.data.nbytes):
            raise RuntimeError(f"Mooncake does not take sample {number}: {code}")
        self.pair.send_string(f"sample-{number}")

    def close(self) -> None:
        self.store.close()


def _store(meta: int, rpc: int, budget: int, data: np.ndarray):
    """A client over TCP that offers `budget` bytes to the store, with `data` registered for transfers."""
    from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", f"http://127.0.0.1:{meta}/metadata", budget, budget, "tcp", "", f"127.0.0.1:{rpc}")
    if code:
        raise RuntimeError(f"Mooncake's store does not start: {code}")
    store.register_buffer(data.ctypes.data, data.nbytes)
    return store


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
