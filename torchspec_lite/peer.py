"""What both ends of a stream share: errors, wake-ups, liveness and rates."""

import logging
import os
import threading
import time
from collections import deque

import zmq
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger(__name__)
NOBLOCK, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
CLOSE_S = 20.0
SILENT_HEARTBEATS = 3  # a peer unheard for so many heartbeats counts as gone


class StreamError(Exception):
    """The stream cannot go on: says between whom and why."""


class StreamTimeout(StreamError, TimeoutError):
    """A wait ran out: says who waited for whom, and for what."""


def joined(thread: threading.Thread) -> bool:
    """Wait for a thread that was told to end, and say whether it did. libzmq's closing of a context was seen to hang, rarely and
    under load (4.3.5); the thread is a daemon and keeps no process from ending."""
    thread.join(CLOSE_S)
    if thread.is_alive():
        log.warning("%s was waited for %g s and left behind: ZeroMQ does not let go of its sockets", thread.name, CLOSE_S)
    return not thread.is_alive()


class Wakeup:
    """Wakes a thread that polls `fd`, from any other thread; calls that it has not noticed yet cost nothing."""

    def __init__(self):
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._called = False

    def set(self) -> None:
        if not self._called:
            self._called = True
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Called before looking for what there is to do; a call after that wakes the thread again."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # nobody called since the last time
        self._called = False

    def close(self) -> None:
        os.close(self.fd)


class Rate:
    """Bytes per second over the last ten seconds."""

    def __init__(self):
        self._buckets: deque[list[int]] = deque(maxlen=10)  # [second, bytes]

    def add(self, nbytes: int) -> None:
        second = int(time.monotonic())
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append([second, 0])
        self._buckets[-1][1] += nbytes

    def per_second(self) -> float:
        now = int(time.monotonic())
        recent = [bucket for bucket in self._buckets if now - bucket[0] < 10]
        return sum(nbytes for _, nbytes in recent) / max(1, now - recent[0][0] + 1) if recent else 0.0


def limit_handshake(socket: zmq.Socket, heartbeat_s: float) -> None:
    """Give a handshake as long as any silence. ZeroMQ's own heartbeats stay off; both ends send pings of their own: in
    libzmq 4.3.5 the heartbeat of a connection that broke while it was held back aborts the process
    (`Assertion failed: !_io_error`)."""
    socket.handshake_ivl = max(1000, int(SILENT_HEARTBEATS * heartbeat_s * 1000))


def drain(socket: zmq.Socket, limit: int = 64):
    """Up to `limit` messages that are there already, each a list of frames."""
    for _ in range(limit):
        try:
            message = [socket.recv(NOBLOCK, copy=False)]
            while message[-1].more:  # recv_multipart asks the socket instead, which takes longer than to receive
                message.append(socket.recv(NOBLOCK, copy=False))
        except zmq.Again:
            return
        yield message


def connection_events(monitor: zmq.Socket, limit: int = 64):
    """What happened to the connections of the socket that `monitor` watches: dicts of `event`, `value` and `endpoint`."""
    for message in drain(monitor, limit):
        yield parse_monitor_message([frame.bytes for frame in message])


def send_now(socket: zmq.Socket, small: list[bytes], large: list = ()) -> None:
    """Send frames as one message without waiting, the large ones from where they are. Raises zmq.Again.

    As send_multipart does with copy=False, at half its cost: flags as numbers, and small frames copied.
    """
    left = len(small) + len(large)
    for copy, frames in (True, small), (False, large):
        for frame in frames:
            left -= 1
            socket.send(frame, MORE if left else NOBLOCK, copy)
