"""Closing an end of the stream ends, though ZeroMQ may not."""

import logging
import threading

import pytest
import torch

from torchspec_lite import peer
from torchspec_lite.sample import Expectation
from torchspec_lite.stream import Receiver, Sender

EXPECT = Expectation("t@0", (0, 1, 2), torch.float32, 8, 16)


@pytest.fixture
def receiver():
    return Receiver("127.0.0.1", 1 << 20, 4, EXPECT)


@pytest.mark.parametrize("end", ["receiver", "sender"])
def test_an_end_whose_sockets_do_not_close_is_left_behind(receiver, end, monkeypatch, caplog):
    sender = Sender(receiver.endpoint, "s", 1 << 20)
    stuck, method = {"receiver": (receiver, "destroy"), "sender": (sender, "term")}[end]
    other = sender if stuck is receiver else receiver
    free, plain = threading.Event(), getattr(stuck._context, method)

    class Context:
        def __getattr__(self, name):
            return free.wait if name == method else getattr(real, name)

    real, stuck._context = stuck._context, Context()
    monkeypatch.setattr(free, "wait", lambda *_, wait=free.wait, **__: wait())
    monkeypatch.setattr(peer, "CLOSE_S", 0.1)
    with caplog.at_level(logging.WARNING, "torchspec_lite.peer"):
        stuck.close()
    assert f"{stuck._thread.name} was waited for 0.1 s" in caplog.text and stuck._thread.is_alive()
    free.set()
    stuck._thread.join(10)
    assert not stuck._thread.is_alive()
    plain()
    monkeypatch.setattr(peer, "CLOSE_S", 10.0)
    other.close()
    assert not other._thread.is_alive()
