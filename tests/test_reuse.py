"""The reuse buffer: every sample gets its passes, never twice in one step, and memory is bounded."""

from collections import Counter

import torch

from torchspec_lite.reuse import Entry, ReuseBuffer
from torchspec_lite.sample import Sample


def entry(number: int, tokens: int = 10, passes: int = 0) -> Entry:
    states = torch.zeros(tokens - 1, 1, 4)
    sample = Sample(id=f"s{number}", attempt=1, ordinal=number, purpose="train", fingerprint="t@0", layer_ids=(2,),
                    token_ids=torch.zeros(tokens, dtype=torch.int32), mask=torch.ones(tokens, dtype=torch.uint8),
                    aux=states, last=states[:, 0])
    return Entry(sample, None, passes)


def drain(buffer: ReuseBuffer, max_tokens: int) -> list[list[str]]:
    steps = []
    while len(buffer):
        drawn = buffer.draw(max_tokens)
        steps.append([e.sample.id for e in drawn])
        buffer.count_pass(drawn)
    return steps


def test_every_sample_gets_exactly_its_passes():
    buffer = ReuseBuffer(reuse=3, max_bytes=1 << 20, seed=1)
    for number in range(7):
        buffer.add(entry(number))
    steps = drain(buffer, 25)
    assert Counter(id for step in steps for id in step) == {f"s{n}": 3 for n in range(7)}
    assert all(len(set(step)) == len(step) == 2 for step in steps[:-1])  # 25 tokens hold two samples of 10
    assert buffer.nbytes == 0 and buffer.tokens == 0


def test_a_sample_that_had_passes_before_a_restart_gets_only_the_rest():
    buffer = ReuseBuffer(reuse=3, max_bytes=1 << 20, seed=1)
    buffer.add(entry(0, passes=2))
    assert drain(buffer, 100) == [["s0"]]


def test_least_used_samples_come_first():
    buffer = ReuseBuffer(reuse=5, max_bytes=1 << 20, seed=3)
    for number, passes in enumerate((4, 0, 2)):
        buffer.add(entry(number, passes=passes))
    assert [e.sample.id for e in buffer.draw(20)] == ["s1", "s2"]


def test_a_long_sample_is_drawn_alone_rather_than_never():
    buffer = ReuseBuffer(reuse=1, max_bytes=1 << 20, seed=0)
    buffer.add(entry(0, tokens=50))
    assert [e.sample.id for e in buffer.draw(20)] == ["s0"]


def test_the_order_is_shuffled_by_the_seed_and_repeats_with_it():
    def order(seed, ordered=False):
        buffer = ReuseBuffer(reuse=1, max_bytes=1 << 20, seed=seed, ordered=ordered)
        for number in (3, 1, 4, 0, 5, 9, 2, 6):
            buffer.add(entry(number))
        return [id for step in drain(buffer, 10) for id in step]

    assert order(7) == order(7)
    assert order(7) != order(8)
    assert order(7, ordered=True) == ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s9"]


def test_room_ends_at_the_bound_in_bytes():
    # One entry: 10 token ids of 4 bytes, 10 mask bytes, 9 rows of 4 floats twice (aux of one layer, and last).
    size = 10 * 4 + 10 + 2 * 9 * 4 * 4
    buffer = ReuseBuffer(reuse=1, max_bytes=2 * size, seed=0)
    buffer.add(entry(0))
    assert buffer.nbytes == size and buffer.has_room()
    buffer.add(entry(1))
    assert not buffer.has_room()
