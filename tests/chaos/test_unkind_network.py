"""Whole streams between real processes over a network that drops, cuts, truncates, delays and reorders connections."""

import os
import time

import pytest

from tests.chaos.unkind_proxy import FATES, UnkindProxy
from tests.stream_peers import LIMIT_S, receiving_process, sending_process, start

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SEED = int(os.environ.get("CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
UNKIND = 15 * ROUNDS
SAMPLES = 200 * ROUNDS
HEARTBEAT_S = 0.2


def test_every_sample_comes_once(closing, shared, table):
    print(f"seed {SEED}")
    receiver, received = start(receiving_process, 0, shared)
    assert received.poll(LIMIT_S)
    # Handles are some hundred bytes, samples 20 kB.
    proxy = closing(UnkindProxy(received.recv(), SEED, UNKIND, most_bytes=3000 if shared else 400_000))
    sender, sent = start(sending_process, proxy.endpoint, range(SAMPLES), 0, shared, HEARTBEAT_S)
    began = last = time.monotonic()
    numbers, waits = [], []
    for _ in range(SAMPLES):
        assert received.poll(LIMIT_S), f"seed {SEED}: {len(numbers)} of {SAMPLES} came; connections: {proxy.fates}"
        numbers.append(received.recv())
        while sent.poll(0):  # it tells of each; unread, they would stop it
            sent.recv()
        waits.append(time.monotonic() - last)
        last = time.monotonic()
    while not sent.poll(0) or sent.recv() != "flushed":
        assert sent.poll(LIMIT_S), "the sender was not told that all arrived"
    name = f"connections broken ({'shared memory' if shared else 'frames'})"
    for wait in sorted(waits)[-sum(proxy.fates[fate] for fate in FATES):]:
        table.add(name, wait)
    table.end([name], SAMPLES - len(set(numbers)), len(numbers) - len(set(numbers)))
    assert sorted(numbers) == list(range(SAMPLES)), f"seed {SEED}"
    assert not received.poll(2 * HEARTBEAT_S), "more samples came than were sent"
    assert sum(proxy.fates[fate] for fate in FATES) > 10 and len(proxy.fates) >= 5, proxy.fates
    assert time.monotonic() - began < 120
    sent.send("leave")
    for process in (sender, receiver):
        process.join(0 if process is receiver else LIMIT_S)
        process.kill()
