"""A TCP proxy that treats whole connections badly: drops, cuts, truncates, delays and reorders them, from a seed."""

import random
import socket
import struct
import threading
from collections import Counter

FATES = ("cut", "truncated", "dropped", "delayed", "late")
"""cut: reset after some bytes, both ways. truncated: ended in order after some bytes of a message. dropped: accepted,
answered by nothing. delayed: each piece comes later, then cut. late: its last bytes arrive after the next connection
was made and answered."""
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by RST


class UnkindProxy:
    """Passes connections on to `endpoint`. The first ones get a fate each, each fate `each` times in random order; those
    after them pass unharmed."""

    def __init__(self, endpoint: str, seed: int, each: int, most_bytes: int):
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._chance = random.Random(seed)
        self._coming, self._most_bytes = list(FATES) * each, most_bytes
        self._chance.shuffle(self._coming)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.fates: Counter[str] = Counter()
        self._answered = threading.Condition()
        self._newest_answered = 0
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        number = 0
        while not self._closed.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            number += 1
            fate = self._coming.pop() if self._coming else "kept"
            limit = self._chance.randint(1, self._most_bytes)
            self.fates[fate] += 1
            threading.Thread(target=self._serve, args=(client, number, fate, limit), daemon=True).start()

    def _serve(self, client: socket.socket, number: int, fate: str, limit: int) -> None:
        if fate == "dropped":
            with client:
                while client.recv(65536):
                    pass
            return
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        back = threading.Thread(target=self._answer, args=(server, client, number), daemon=True)
        back.start()
        held = self._forward(client, server, fate, limit)
        if fate == "late":
            _end(client, reset=True)
            with self._answered:
                self._answered.wait_for(lambda: self._newest_answered > number, timeout=10)
            try:
                server.sendall(held)
            except OSError:
                pass
        _end(client, reset=fate != "truncated")
        _end(server, reset=fate in ("cut", "delayed"))

    def _forward(self, client: socket.socket, server: socket.socket, fate: str, limit: int) -> bytes:
        """Sender to receiver, until the connection's limit; what was read beyond it."""
        passed = 0
        try:
            while data := client.recv(16384):
                if fate == "delayed":
                    self._closed.wait(0.02)  # the delay itself
                if fate != "kept" and passed + len(data) > limit:
                    server.sendall(data[: limit - passed])
                    return data[limit - passed :]
                server.sendall(data)
                passed += len(data)
        except OSError:
            pass
        return b""

    def _answer(self, server: socket.socket, client: socket.socket, number: int) -> None:
        """Receiver to sender, for as long as both are there. The first pieces are the handshake's."""
        passed = 0
        try:
            while data := server.recv(16384):
                passed += len(data)
                client.sendall(data)
                if passed > 200:  # a Welcome came by
                    with self._answered:
                        self._newest_answered = max(self._newest_answered, number)
                        self._answered.notify_all()
        except OSError:
            pass
        _end(client, reset=False)


def _end(connection: socket.socket, reset: bool) -> None:
    """Wake whoever reads it, then close."""
    try:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        else:
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    except OSError:
        pass
