"""The stream over connections that break and between processes that die: nothing lost, nothing doubled."""

import os
import signal
import threading
import time

import pytest

from tests.stream_peers import (
    LIMIT_S, Notices, Proxy, make_sample, receiver_of, receiving_process, same, sender_of, sending_process, start, take,
    until_empty,
)
from torchspec_lite.stream import Receiver, StreamTimeout


@pytest.mark.parametrize("cuts", [[3000, 30000, 5, 100000, 100], [1] * 4])
def test_nothing_is_lost_or_doubled_over_a_cut_connection(closing, shared, cuts):
    receiver = receiver_of(closing, shared, budget=2**18)
    proxy = closing(Proxy(receiver.endpoint, cut_after=[cut // 20 if shared else cut for cut in cuts]))
    sender = sender_of(closing, proxy.endpoint, shared, budget=2**19)
    thread = threading.Thread(target=lambda: [sender.send(make_sample(i)) for i in range(60)])
    thread.start()
    numbers = take(receiver, 40)
    proxy.cut()
    numbers += take(receiver, 20)
    thread.join(LIMIT_S)
    sender.flush(LIMIT_S)
    assert sorted(numbers) == list(range(60))
    assert sender.stats().sent_samples == 60 and proxy.connections > 4
    until_empty(sender)
    assert receiver.stats().held_bytes == 0


def test_peer_that_goes_dumb_is_found_by_both_ends(closing):
    notices = Notices()
    receiver = receiver_of(closing, heartbeat_s=0.2, on_event=notices)
    proxy = closing(Proxy(receiver.endpoint))
    sender = sender_of(closing, proxy.endpoint, heartbeat_s=0.2)
    sender.send(make_sample(0))
    sender.flush(LIMIT_S)
    started = time.monotonic()
    proxy.frozen.set()
    notices.wait("lost")
    assert time.monotonic() - started < 10
    proxy.frozen.clear()
    sender.send(make_sample(1))
    assert take(receiver, 2) == [0, 1]


@pytest.mark.chaos
def test_killed_sender_loses_nothing_that_was_acknowledged(closing, shared):
    notices = Notices()
    receiver = receiver_of(closing, shared, budget=2**18, heartbeat_s=0.3, on_event=notices)
    process, pipe = start(sending_process, receiver.endpoint, range(1000), 0, shared, 0.3)
    held = [receiver.get(LIMIT_S) for _ in range(3)]
    numbers = take(receiver, 15)
    os.kill(process.pid, signal.SIGKILL)
    process.join(LIMIT_S)
    notices.wait("lost")
    while True:  # what had arrived before
        try:
            numbers += take_one(receiver)
        except StreamTimeout:
            break
    assert numbers == list(range(3, 3 + len(numbers)))
    assert all(same(sample, make_sample(i)) for i, sample in enumerate(held))  # the dead sender's memory is still there
    for sample in held:
        receiver.release(sample)
    assert (receiver.stats().held_bytes, receiver.stats().granted_bytes) == (0, 0)
    assert not receiver.stats().senders
    rest = range(3 + len(numbers), 3 + len(numbers) + 10)
    process, pipe = start(sending_process, receiver.endpoint, rest, 1, shared, 0.3)
    assert take(receiver, 10) == list(rest)
    pipe.send("leave")
    process.join(LIMIT_S)


def take_one(receiver: Receiver) -> list[int]:
    sample = receiver.get(0.5)
    assert same(sample, make_sample(sample.ordinal))
    receiver.release(sample)
    return [sample.ordinal]


@pytest.mark.chaos
def test_killed_receiver_gets_the_rest_after_its_restart(closing, shared):
    process, pipe = start(receiving_process, 0, shared)
    assert pipe.poll(LIMIT_S)
    endpoint = pipe.recv()
    sender = sender_of(closing, endpoint, shared, budget=2**19, heartbeat_s=0.3)
    total = 80
    thread = threading.Thread(target=lambda: [sender.send(make_sample(i)) for i in range(total)])
    thread.start()
    for _ in range(20):
        assert pipe.poll(LIMIT_S)
        pipe.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join(LIMIT_S)
    receiver = receiver_of(closing, shared, port=int(endpoint.rpartition(":")[2]), heartbeat_s=0.3)
    first = receiver.get(LIMIT_S)
    receiver.release(first)
    acknowledged_before = first.ordinal  # samples go in order, so all before this one had been acknowledged
    assert acknowledged_before > 0
    assert take(receiver, total - acknowledged_before - 1) == list(range(acknowledged_before + 1, total))
    thread.join(LIMIT_S)
    sender.flush(LIMIT_S)
    assert sender.stats().sent_samples == total


@pytest.mark.chaos
def test_stopped_sender_comes_back_and_nothing_is_doubled(closing, shared):
    notices = Notices()
    receiver = receiver_of(closing, shared, budget=2**17, heartbeat_s=0.2, on_event=notices)
    process, pipe = start(sending_process, receiver.endpoint, range(60), 0, shared, 0.2)
    numbers = take(receiver, 10)
    os.kill(process.pid, signal.SIGSTOP)
    notices.wait("lost")
    os.kill(process.pid, signal.SIGCONT)
    numbers += take(receiver, 50)
    assert numbers == list(range(60))
    pipe.send("leave")
    process.join(LIMIT_S)
