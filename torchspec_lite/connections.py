"""A receiver's TCP connections, watched: how much came by each since its last whole message.

ZeroMQ collects a multipart message whole before it hands it over and counts messages, not parts, so a peer that is let
in could fill the memory with one message that never ends. The kernel's count of a connection's bytes (TCP_INFO) shows
it, and the connection is cut.
"""

import socket as sockets
import struct
from collections.abc import Callable

import zmq

from torchspec_lite.peer import connection_events

WATCH_S = 0.1  # between two looks; what a peer can send in that time comes on top of what it may
MAY_COME = 2 * 2**20  # bytes of control messages that may wait, beside the samples a sender has credit for
BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info, linux/tcp.h


class Connections:
    """All connections that a bound socket accepted, by file descriptor. For the thread that owns the socket."""

    def __init__(self, socket: zmq.Socket):
        self.monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._known: dict[int, tuple[tuple | None, int]] = {}  # descriptor: far end, bytes at its last whole message
        self._spoke: set[int] = set()

    def __len__(self) -> int:
        return len(self._known)

    def accept(self) -> None:
        """Take in which connections began and ended."""
        for event in connection_events(self.monitor, limit=4096):
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._known[event["value"]] = remote_of(event["value"]), 0
            else:
                self._known.pop(event["value"], None)

    def spoke(self, number: int) -> None:
        """A whole message came by this connection."""
        self._spoke.add(number)

    def endless(self, credit: dict[int, int]) -> list[int]:
        """Connections that sent more than may come, and than the `credit` of their sender, without ending a message."""
        self.accept()
        found = []
        for number, (remote, before) in self._known.items():
            received = bytes_received(number, remote)
            if number in self._spoke:
                self._known[number] = remote, received
            elif received - before > MAY_COME + credit.get(number, 0):
                found.append(number)
        self._spoke.clear()
        return found


def descriptor(frame: zmq.Frame) -> int:
    """The file descriptor of the connection that a frame came by, -1 if unknown."""
    try:
        return int(frame.get("__fd"))
    except zmq.ZMQError:
        return -1


def remote_of(number: int) -> tuple | None:
    """The far end of the connection that has this file descriptor now, which may be another's by then."""
    return _ask(number, lambda connection: connection.getpeername())


def bytes_received(number: int, remote: tuple | None) -> int:
    """Bytes that came by this connection so far; 0 when its descriptor is another's by now."""
    def ask(connection: sockets.socket) -> int:
        if connection.getpeername() != remote:
            return 0
        info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, BYTES_RECEIVED + 8)
        return struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]

    return _ask(number, ask) or 0


def shut_down(number: int) -> None:
    """End the connection with this file descriptor; ZeroMQ notices and closes it."""
    _ask(number, lambda connection: connection.shutdown(sockets.SHUT_RDWR))


def throw_away(number: int) -> None:
    """Have the kernel forget what waits in this connection once it is closed, and reset it: a peer that does not stop
    sending would keep it for a minute."""
    _ask(number, lambda connection: connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0)))


def _ask(number: int, question: Callable):
    """The answer of a connection that ZeroMQ owns and may close at any time; None when it is gone already."""
    try:
        with sockets.fromfd(number, sockets.AF_INET, sockets.SOCK_STREAM) as connection:
            return question(connection)
    except OSError:
        return None
