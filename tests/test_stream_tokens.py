"""Token ids that the target does not have: an index past its embedding must not reach a trainer."""

from dataclasses import replace

import pytest

from tests.stream_peers import EXPECT, LIMIT_S, make_sample
from torchspec_lite.sample import SampleError
from torchspec_lite.stream import Receiver, Sender

VOCABULARY = 500


def with_token(i: int, token: int):
    sample = make_sample(i)
    sample.token_ids[7] = token
    return sample


def test_only_the_targets_own_tokens_are_taken():
    expect = replace(EXPECT, vocab_size=VOCABULARY)
    expect.check(with_token(0, VOCABULARY - 1))
    for token in (VOCABULARY, 2**31 - 1):
        with pytest.raises(SampleError, match=f"^token: token id {token} is outside the target's vocabulary of {VOCABULARY}$"):
            expect.check(with_token(0, token))
        EXPECT.check(with_token(0, token))  # a receiver that does not know the vocabulary


@pytest.mark.parametrize("shared", [False, True])
def test_a_receiver_refuses_them_by_name_and_takes_what_comes_after(shared):
    receiver = Receiver("127.0.0.1", 1 << 23, 8, replace(EXPECT, vocab_size=VOCABULARY), shared_memory=shared)
    sender = Sender(receiver.endpoint, "replica", 1 << 23, shared_memory=shared)
    try:
        sender.send(with_token(1, VOCABULARY))
        sender.send(make_sample(2))
        sample = receiver.get(LIMIT_S)
        assert sample.id == "s2"
        receiver.release(sample)
        sender.flush(LIMIT_S)
        (refusal,) = sender.refusals
        assert (refusal.id, refusal.reason.partition(":")[0]) == ("s1", "token")
        (event,) = [event for event in receiver.events() if event.kind == "rejected"]
        assert event.id == "s1" and event.reason == refusal.reason
    finally:
        sender.close()
        receiver.close()
