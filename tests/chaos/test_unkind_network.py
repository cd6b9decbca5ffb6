"""Whole streams between real processes over a network that drops, cuts, truncates, delays and reorders connections."""

import os
import time

import pytest

from tests.chaos.unkind_proxy import FATES, UnkindProxy
from tests.stream_peers import LIMIT_S, receiving_process, sending_process, start

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SEED = int(os.environ.get("CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
EACH_FATE = 3 * ROUNDS
SAMPLES = 200 * ROUNDS
HEARTBEAT_S = 0.2


def test_every_sample_comes_once(closing, shared, table):
    print(f"seed {SEED}")
    receiver, received = start(receiving_process, 0, shared)
    assert received.poll(LIMIT_S)
    # Handles are some hundred bytes, samples 20 kB.
    proxy = closing(UnkindProxy(received.recv(), SEED, EACH_FATE, most_bytes=1200 if shared else 200_000))
    sender, sent = start(sending_process, proxy.endpoint, range(SAMPLES), 0, shared, HEARTBEAT_S)
    began = last = time.monotonic()
    numbers, waits, told = [], [], []
    for _ in range(SAMPLES):
        assert received.poll(LIMIT_S), f"seed {SEED}: {len(numbers)} of {SAMPLES} came; connections: {proxy.fates}"
        numbers.append(received.recv())
        while sent.poll(0):  # unread, they would stop it
            told.append(sent.recv())
        waits.append(time.monotonic() - last)
        last = time.monotonic()
    while told[-1:] != ["flushed"]:
        assert sent.poll(LIMIT_S), "the sender was not told that all arrived"
        told.append(sent.recv())
    name = f"connections broken ({'shared memory' if shared else 'frames'})"
    for wait in sorted(waits)[-sum(proxy.fates[fate] for fate in FATES):]:
        table.add(name, wait)
    table.end([name], SAMPLES - len(set(numbers)), len(numbers) - len(set(numbers)))
    assert sorted(numbers) == list(range(SAMPLES)), f"seed {SEED}"
    assert not received.poll(2 * HEARTBEAT_S), "more samples came than were sent"
    assert all(proxy.fates[fate] == EACH_FATE for fate in FATES), f"not all happened: {proxy.fates}"
    assert time.monotonic() - began < 120
    sent.send("leave")
    for process in (sender, receiver):
        process.join(0 if process is receiver else LIMIT_S)
        process.kill()
