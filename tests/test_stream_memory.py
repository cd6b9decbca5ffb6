"""Where samples lie at both ends, and that their memory goes back to the system when they leave."""

import ctypes
import os
from pathlib import Path

import numpy as np
import zmq

from tests.stream_peers import LIMIT_S, make_sample, receiver_of, sender_of, take, until_empty
from torchspec_lite import control
from torchspec_lite.freed_memory import FreedMemory
from torchspec_lite.sender import BUSY_SAMPLES
from torchspec_lite.shared_slots import private_slots
from torchspec_lite.wire import encode


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_holes_between_what_stays_go_back_to_the_system():
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size, count = 100_000, 400  # below the size that glibc gets from the system by itself
    blocks = [c.malloc(ctypes.c_size_t(size)) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[::2]:
        c.free(block)
    before = resident()
    freed = FreedMemory(enough=2**20)
    freed.add(2**20 - 1)
    assert not freed.give_back()
    assert resident() > before - 2**20
    freed.add(1)
    assert freed.give_back()
    assert resident() < before - 0.9 * size * count // 2
    freed.add(2**20)
    assert not freed.give_back()  # so soon
    for block in blocks[1::2]:
        c.free(block)


def test_a_sender_gives_back_the_frames_that_it_kept(closing, shared, monkeypatch):
    added = []
    monkeypatch.setattr(FreedMemory, "add", lambda self, nbytes: added.append(nbytes))
    receiver = receiver_of(closing, shared)
    sender = sender_of(closing, receiver.endpoint, shared)
    for i in range(3):
        sender.send(make_sample(i))
    assert take(receiver, 3) == [0, 1, 2]
    until_empty(sender)
    one = sum(-(-len(frame) // 64) * 64 for frame in encode(make_sample(0)).frames)
    assert added == ([] if shared else [one] * 3)


def test_a_receivers_own_slots_are_its_own_memory():
    anonymous, mapped = status("RssAnon"), status("RssShmem")
    slots = private_slots(2**25)
    view, = slots.views(slots.allocate(2**25), (2**25,))
    np.frombuffer(view, np.uint8)[:] = 1
    assert status("RssAnon") - anonymous > 0.9 * 2**25
    assert status("RssShmem") - mapped < 2**20


def test_only_a_thirty_second_of_the_budget_stays_where_it_was_received(closing):
    budget, one = 2**20, encode(make_sample(0)).nbytes
    receiver = receiver_of(closing, budget=budget)
    sender = sender_of(closing, receiver.endpoint)
    outside = budget // 32 // one  # a sixteenth is for what is on its way, half of it for these
    assert outside == 1
    total = receiver._pool.free_bytes()
    for i in range(4):
        sender.send(make_sample(i))
    samples = [receiver.get(LIMIT_S) for _ in range(4)]
    slot = sum(-(-len(frame) // 64) * 64 for frame in encode(make_sample(0)).frames)
    assert total - receiver._pool.free_bytes() == (4 - outside) * slot
    assert receiver.stats().held_bytes == sum(encode(make_sample(i)).nbytes for i in range(4))
    receiver.release(samples[0])
    sender.send(make_sample(4))  # the place outside is free again
    samples.append(receiver.get(LIMIT_S))
    assert total - receiver._pool.free_bytes() == (4 - outside) * slot
    for sample in samples[1:]:
        receiver.release(sample)
    assert (receiver._pool.free_bytes(), receiver.stats().held_bytes) == (total, 0)


def test_a_receiver_that_says_nothing_hears_of_every_sample(closing):
    """While many are underway a new one waits for the receiver's next word, but not for long."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvtimeo = 0, LIMIT_S * 1000
        router.bind("tcp://127.0.0.1:0")
        sender = sender_of(closing, router.last_endpoint.decode(), heartbeat_s=4 * LIMIT_S)
        address, _ = router.recv_multipart()
        router.send_multipart([address, control.pack(control.Welcome("session", False, ()))])
        told = []
        for i in range(3 * BUSY_SAMPLES):
            sender.send(make_sample(i))
        while len(told) < 3 * BUSY_SAMPLES:
            message = control.unpack(router.recv_multipart()[1])
            if isinstance(message, control.Want):
                told.append(message.ordinal)
        assert told == list(range(3 * BUSY_SAMPLES))
