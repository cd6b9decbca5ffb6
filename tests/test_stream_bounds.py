"""What peers can fill by hand on an open stream: one session a connection, 4,096 requests a sender, and no more."""

from random import Random

import pytest

from tests.stream_peers import LIMIT_S, Notices, make_sample, receiver_of, sender_of, take
from tests.test_stream import Stranger
from torchspec_lite import control
from torchspec_lite.credits import Credits
from torchspec_lite.wire import VERSION


@pytest.mark.parametrize("other", ["new", "neighbour"])
def test_a_second_session_on_a_connection_bans_its_peer_and_its_credit_returns(closing, other):
    notices = Notices()
    receiver = receiver_of(closing, samples=1, heartbeat_s=LIMIT_S, on_event=notices)
    closing(Stranger(receiver.endpoint)).hello(name="neighbour", session="neighbour")
    greedy = closing(Stranger(receiver.endpoint))
    greedy.hello(name="greedy", session="greedy")
    greedy.say(control.Want(1, "s9", 0, 9, 1000))
    assert greedy.hear(control.Grant).seqs == (1,)  # all the credit there is
    greedy.say(control.Hello(VERSION, "other", other, 2, "", 0, 0, 0, ""))
    assert greedy.is_cut()
    banned = notices.wait("banned")
    assert (banned.sender, banned.reason) == ("greedy", "control: greedy began a second session on its connection")
    assert [sender.name for sender in receiver.stats().senders] == ["neighbour"]
    assert receiver.stats().granted_bytes == 0
    sender_of(closing, receiver.endpoint, heartbeat_s=LIMIT_S).send(make_sample(5))
    assert take(receiver, 1) == [5]


def test_who_says_hello_again_and_again_leaves_no_requests_behind(closing, monkeypatch):
    monkeypatch.setattr("torchspec_lite.credits.MAX_WANTS", 5)
    receiver = receiver_of(closing, samples=1, heartbeat_s=LIMIT_S)
    holder, again = closing(Stranger(receiver.endpoint)), closing(Stranger(receiver.endpoint))
    holder.hello(session="holder")
    holder.say(control.Want(1, "s9", 0, 9, 1000))
    holder.hear(control.Grant)  # from here on every request waits
    for epoch in (1, 2, 3):
        assert isinstance(again.hello(session="again", epoch=epoch), control.Welcome)
        for seq in range(6):
            again.say(control.Want(seq, f"s{seq}", 0, seq, 1000))
        assert again.hear(control.Refuse) == control.Refuse(5, "flood: more than 5 requests at once")
    assert len(receiver._credits._queue) == 5


@pytest.mark.parametrize("seed", range(20))
def test_credit_is_given_as_a_sorted_list_would_give_it(seed):
    """Also after senders left and came back with the same sequence numbers, at other places in the order."""
    random = Random(seed)
    credits = Credits(100, 6)
    waiting, granted, held = {}, {}, []  # (peer, seq): (ordinal, arrival, bytes); (peer, seq): bytes; bytes

    def room(nbytes: int) -> bool:
        return sum(granted.values()) + sum(held) + nbytes <= 100 and len(granted) + len(held) < 6

    for arrival in range(300):
        peer, seq, ordinal, nbytes = random.choice("abc"), random.randrange(12), random.randrange(50), random.randint(1, 60)
        match random.choices(["want", "grant", "take", "release", "forget"], [12, 4, 4, 4, 1])[0]:
            case "want":
                assert credits.want(peer, seq, ordinal, nbytes) is None
                if (peer, seq) not in waiting | granted:
                    waiting[peer, seq] = ordinal, arrival, nbytes
            case "grant":
                given = {}
                for peer, seq in sorted(waiting, key=waiting.get):
                    if not room(waiting[peer, seq][2]):
                        break
                    granted[peer, seq] = waiting.pop((peer, seq))[2]
                    given.setdefault(peer, []).append(seq)
                assert credits.grant() == given
            case "take":
                nbytes = granted.pop((peer, seq), None)
                assert credits.take(peer, seq) == nbytes
                held += [nbytes] if nbytes else []
            case "release" if held:
                credits.release(held.pop())
            case "forget":
                credits.forget(peer)
                waiting = {key: want for key, want in waiting.items() if key[0] != peer}
                granted = {key: nbytes for key, nbytes in granted.items() if key[0] != peer}
        assert (credits.granted_bytes, credits.held_bytes) == (sum(granted.values()), sum(held))
        assert len(credits._queue) == len(waiting)
