"""The stream between real sockets: bounded, complete, and closed to whoever breaks its rules."""

import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq

from tests.stream_peers import (
    EXPECT, LIMIT_S, Notices, make_sample, receiver_of, room_for, same, sender_of, take, until_empty,
)
from torchspec_lite import control
from torchspec_lite.errors import UserError
from torchspec_lite.shared_slots import SharedSlots, host_identity
from torchspec_lite.stream import Receiver, SampleError, StreamError, StreamTimeout
from torchspec_lite.wire import VERSION, encode


def test_samples_arrive_whole_and_in_order(closing, shared):
    receiver = receiver_of(closing, shared)
    sender = sender_of(closing, receiver.endpoint, shared)
    for i in range(20):
        sender.send(make_sample(i, 10 + i))
    for i in range(20):
        sample = receiver.get(LIMIT_S)
        assert same(sample, make_sample(i, 10 + i))
        receiver.release(sample)
    sender.flush(LIMIT_S)
    stats = sender.stats()
    assert (stats.sent_samples, stats.resent_samples, stats.shared_memory) == (20, 0, shared)
    assert receiver.stats().held_samples == 0


def test_sender_is_held_back_by_a_trainer_that_takes_nothing(closing, shared):
    one = encode(make_sample(0)).nbytes
    receiver = receiver_of(closing, shared, budget=room_for(3))
    sender = sender_of(closing, receiver.endpoint, shared, budget=2 * one + 2000, wait_s=0.3)
    with pytest.raises(StreamTimeout, match="target-0 waits for credit from tcp://127.0.0.1.*holds its whole budget"
                       if not shared else "target-0 .*trainer"):
        for i in range(10):
            sender.send(make_sample(i))
    sent = i
    assert sent == (2 if shared else 5)  # shared memory counts until released; else 3 there and 2 here
    assert receiver.stats().held_bytes + receiver.stats().granted_bytes <= 3 * one + 100
    assert take(receiver, sent) == list(range(sent))  # nothing was dropped
    sender.send(make_sample(sent))
    assert take(receiver, 1) == [sent]


def test_blocked_sender_goes_on_when_credit_returns(closing, shared):
    one = encode(make_sample(0)).nbytes
    receiver = receiver_of(closing, shared, budget=room_for(2), samples=2)
    sender = sender_of(closing, receiver.endpoint, shared, budget=2 * one + 2000)
    thread = threading.Thread(target=lambda: [sender.send(make_sample(i)) for i in range(30)])
    thread.start()
    assert take(receiver, 30) == list(range(30))
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_max_samples_bounds_what_waits(closing):
    receiver = receiver_of(closing, samples=2)
    sender = sender_of(closing, receiver.endpoint)
    for i in range(6):
        sender.send(make_sample(i))
    held = [receiver.get(LIMIT_S), receiver.get(LIMIT_S)]
    with pytest.raises(StreamTimeout, match="trainer to release some of the 2 it holds"):
        receiver.get(0.2)
    receiver.release(held[0])
    receiver.get(LIMIT_S)


def test_empty_wait_says_who_waits_for_whom(closing):
    receiver = receiver_of(closing)
    with pytest.raises(StreamTimeout, match="waited 0.05 s for a sample: no target is connected to tcp://"):
        receiver.get(0.05)
    sender = sender_of(closing, "tcp://127.0.0.1:9", wait_s=0.05)
    with pytest.raises(StreamTimeout, match="target-0 waits for tcp://127.0.0.1:9 to answer"):
        sender.send(make_sample())


def test_releasing_twice_is_an_error(closing):
    receiver = receiver_of(closing)
    sender_of(closing, receiver.endpoint).send(make_sample())
    sample = receiver.get(LIMIT_S)
    receiver.release(sample)
    with pytest.raises(KeyError):
        receiver.release(sample)


@pytest.mark.parametrize("bad, reason", [
    (replace(make_sample(7), fingerprint="other@1"), "mismatch: target is other@1, this receiver takes tiny@0"),
    (replace(make_sample(7), layer_ids=(2, 5, 8)), "mismatch: layer ids is"),
    (make_sample(7, dtype=torch.float32), "mismatch: dtype is"),
    (make_sample(7, tokens=4097), "too_long"),
    (make_sample(7, tokens=9000), "too_long"),
    (replace(make_sample(7), last=torch.full((39, 64), float("nan"), dtype=torch.bfloat16)), "not_finite:"),
])
def test_refusals_reach_both_ends(closing, shared, bad, reason):
    notices = Notices()
    receiver = receiver_of(closing, shared, on_event=notices)
    sender = sender_of(closing, receiver.endpoint, shared)
    sender.send(bad)
    sender.send(make_sample(1))
    assert take(receiver, 1) == [1]
    sender.flush(LIMIT_S)
    refusal = sender.refusals.popleft()
    event = notices.wait("rejected")
    assert (refusal.id, event.id, event.attempt) == ("s7", "s7", 0)
    assert refusal.reason == event.reason and refusal.reason.startswith(reason)
    assert [event.kind for event in receiver.events()] == ["joined", "rejected"]
    assert receiver.stats().held_samples == 0
    until_empty(sender)


def test_same_attempt_from_another_sender_is_a_duplicate(closing, shared):
    notices = Notices()
    receiver = receiver_of(closing, shared, on_event=notices)
    first, second = sender_of(closing, receiver.endpoint, shared), sender_of(closing, receiver.endpoint, shared)
    first.send(make_sample(1))
    first.flush(LIMIT_S)
    second.send(make_sample(1))
    second.send(replace(make_sample(1), attempt=1))  # another attempt is another sample
    second.flush(LIMIT_S)
    assert [receiver.get(LIMIT_S).attempt for _ in range(2)] == [0, 1]
    assert notices.wait("duplicate").id == "s1"
    assert second.refusals.popleft().reason.startswith("duplicate")


def test_sample_larger_than_a_budget_is_an_error_not_a_hang(closing):
    receiver = receiver_of(closing, budget=1000)
    with pytest.raises(UserError, match="sender_budget_mib"):
        sender_of(closing, receiver.endpoint, budget=1000).send(make_sample())
    sender = sender_of(closing, receiver.endpoint)
    sender.send(make_sample())
    sender.flush(LIMIT_S)
    assert "too_large" in sender.refusals.popleft().reason


def test_unsound_sample_stops_at_the_sender(closing):
    receiver = receiver_of(closing)
    with pytest.raises(SampleError, match="no_supervision"):
        sender_of(closing, receiver.endpoint).send(
            replace(make_sample(), mask=torch.zeros(40, dtype=torch.uint8)))


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "", "::", "[::]"])
def test_receiver_does_not_bind_to_every_interface(host):
    with pytest.raises(UserError, match="every interface"):
        Receiver(host, 2**20, 8, EXPECT)


def test_unknown_host_is_a_user_error():
    with pytest.raises(UserError, match="give an address or the name of an interface"):
        Receiver("no-such-interface", 2**20, 8, EXPECT)


def test_closed_receiver_ends_waits(closing):
    receiver = receiver_of(closing)
    thread = threading.Timer(0.05, receiver.close)
    thread.start()
    with pytest.raises(StreamError, match="closed"):
        receiver.get(LIMIT_S)
    thread.join()


# Peers that break the rules


class Stranger:
    """A DEALER that speaks the protocol by hand."""

    def __init__(self, endpoint: str):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = LIMIT_S * 1000
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(endpoint)

    def say(self, message, frames=()):
        self.socket.send_multipart([control.pack(message), *frames])

    def hello(self, **change):
        self.say(replace(control.Hello(VERSION, "stranger", "session", 1, "", 0, 0, 0, ""), **change))
        return self.hear(control.Welcome, control.Banned)

    def hear(self, *kinds):
        while True:
            message = control.unpack(self.socket.recv())
            if isinstance(message, kinds):
                return message

    def is_cut(self) -> bool:
        return bool(self.monitor.poll(LIMIT_S * 1000))

    def close(self):
        self.socket.disable_monitor()
        self.context.destroy(linger=0)


def frames_of(sample) -> list:
    encoded = encode(sample)
    encoded.seal()
    return encoded.frames


@pytest.mark.parametrize("version, age", [(VERSION + 1, "newer"), (VERSION - 1, "older")])
def test_peer_of_another_version_is_refused_by_name(closing, version, age):
    receiver = receiver_of(closing)
    answer = closing(Stranger(receiver.endpoint)).hello(version=version)
    assert isinstance(answer, control.Banned) and f"version {version}, {age} than" in answer.reason
    assert receiver.events()[0].kind == "banned"


@pytest.mark.parametrize("frame, words", [
    (b'h{"version":1}', "version 1, older than"), (b"h\x01{}", "version 1, older than"),
    (b"p" + bytes([control.VERSION + 1]) + b"{}", f"version {control.VERSION + 1}, newer than")])
def test_control_messages_of_another_version_are_refused_by_name(closing, frame, words):
    notices = Notices()
    receiver = receiver_of(closing, on_event=notices)
    stranger = closing(Stranger(receiver.endpoint))
    stranger.socket.send(frame)
    assert stranger.is_cut()
    reason = notices.wait("banned").reason
    assert reason.startswith(f"version: control message of {words} this program's {control.VERSION};")


def test_a_sender_names_a_receiver_of_another_version(closing):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvtimeo = 0, LIMIT_S * 1000
        router.bind("tcp://127.0.0.1:0")
        sender = sender_of(closing, router.last_endpoint.decode())
        address, _ = router.recv_multipart()
        router.send_multipart([address, b'W{"session":"s","shared":false,"held":[]}'])
        with pytest.raises(StreamError, match="target-0 and tcp://.*do not understand.*version 1, older"):
            sender.send(make_sample())


def test_sample_without_credit_cuts_its_sender_off(closing):
    notices = Notices()
    receiver = receiver_of(closing, on_event=notices)
    stranger = closing(Stranger(receiver.endpoint))
    stranger.hello()
    stranger.say(control.Data(1), frames_of(make_sample()))
    assert stranger.is_cut()
    assert notices.wait("banned").sender == "stranger"
    again = closing(Stranger(receiver.endpoint))
    assert "without credit" in again.hello(epoch=2).reason  # it may hear it only now, and gets no further
    sender_of(closing, receiver.endpoint).send(make_sample(5))  # others are not disturbed
    assert take(receiver, 1) == [5]


def test_sample_before_hello_is_cut_off(closing):
    receiver = receiver_of(closing)
    stranger = closing(Stranger(receiver.endpoint))
    stranger.say(control.Data(1), frames_of(make_sample()))
    assert stranger.is_cut()
    assert receiver.stats().held_bytes == 0


@pytest.mark.parametrize("junk", [b"", b"\x80\x04N.", b"z\2{}", b"w\2{}", b"h\2[]", b'w\2{"seq":-1}', b"G\2{\"seqs\":[1]}"])
def test_junk_cuts_its_sender_off(closing, junk):
    receiver = receiver_of(closing)
    stranger = closing(Stranger(receiver.endpoint))
    stranger.hello()
    stranger.socket.send(junk)
    assert stranger.is_cut()
    assert closing(Stranger(receiver.endpoint)).hello(epoch=2).reason.startswith("control: ")


def test_asking_twice_for_one_sample_cuts_its_sender_off(closing):
    receiver = receiver_of(closing, budget=room_for(1))
    stranger = closing(Stranger(receiver.endpoint))
    stranger.hello()
    for i in range(2):
        stranger.say(control.Want(1, f"s{i}", 0, 3, 2**30 if i else 1000))
    assert stranger.is_cut()
    assert receiver.stats().granted_bytes == 0


@pytest.mark.parametrize("pid, offset", [(0, 64), (os.getpid(), 2**20), (os.getpid(), 65), (os.getpid(), 0)])
def test_a_place_outside_the_shared_memory_is_not_read(closing, pid, offset):
    receiver = receiver_of(closing, shared=True)
    slots = closing(SharedSlots(2**16))
    stranger = closing(Stranger(receiver.endpoint))
    welcome = stranger.hello(host=host_identity(), pid=pid, fd=slots.fd, size=slots.size, nonce=slots.nonce.hex())
    assert welcome.shared == (pid != 0)
    stranger.say(control.Want(1, "s1", 0, 1, 1000, offset, (1000,)))
    if welcome.shared:
        assert "outside the shared memory" in stranger.hear(control.Refuse).reason
    else:
        assert stranger.is_cut()
    sender_of(closing, receiver.endpoint).send(make_sample(5))
    assert take(receiver, 1) == [5]
    assert receiver.stats().held_bytes + receiver.stats().granted_bytes == 0


def test_frame_beyond_the_limit_is_cut_off_before_it_is_read(closing):
    receiver = receiver_of(closing)
    stranger = closing(Stranger(receiver.endpoint))
    stranger.hello()
    stranger.say(control.Data(1), [bytes(EXPECT.max_sample_bytes() + 1)])
    assert stranger.is_cut()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)  # ZMTP 3.1, RFC 37
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.mark.parametrize("part, admitted", [(b"\x01\x00", True), (b"\x01\x00", False),
                                            (b"\x03" + (4096).to_bytes(8) + bytes(4096), True)])
def test_a_message_without_an_end_is_cut_off_before_it_fills_the_memory(closing, part, admitted):
    """ZeroMQ's own sender would not begin to send it, so this one speaks ZMTP by hand: parts, each with a next one."""
    notices = Notices()
    receiver = receiver_of(closing, on_event=notices)
    host, port = receiver.endpoint.removeprefix("tcp://").split(":")
    connection = closing(socket.create_connection((host, int(port)), LIMIT_S))
    hello = control.pack(control.Hello(VERSION, "endless", "session", 1, "", 0, 0, 0, ""))
    connection.sendall(GREETING + READY)
    answer = b""
    while b"READY" not in answer:
        answer += connection.recv(4096)
    if admitted:
        connection.sendall(b"\x00" + bytes([len(hello)]) + hello)
        notices.wait("joined")
    before, parts, sent = resident(), part * (2**18 // len(part)), 0
    with pytest.raises(ConnectionError):
        while sent < 2**31:
            sent += connection.send(parts)
    assert notices.wait("banned").reason == "flood: a message without an end"
    assert sent >= 2**21
    assert resident() - before < 2**29  # 64 bytes for each part of 2 MiB, and of what comes in a tenth of a second
    sender_of(closing, receiver.endpoint).send(make_sample(5))
    assert take(receiver, 1) == [5]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_damaged_bytes_are_refused_and_their_credit_returns(closing):
    receiver = receiver_of(closing)
    stranger = closing(Stranger(receiver.endpoint))
    stranger.hello()
    frames = frames_of(make_sample(3))
    stranger.say(control.Want(1, "s3", 0, 3, sum(len(frame) for frame in frames)))
    stranger.hear(control.Grant)
    damaged = bytearray(frames[2])
    damaged[10] ^= 4
    stranger.say(control.Data(1), [frames[0], frames[1], damaged, frames[3]])
    assert stranger.hear(control.Refuse).reason.startswith("checksum")
    assert (receiver.stats().held_bytes, receiver.stats().granted_bytes) == (0, 0)


def test_another_sample_than_announced_is_refused(closing):
    receiver = receiver_of(closing)
    stranger = closing(Stranger(receiver.endpoint))
    stranger.hello()
    frames = frames_of(make_sample(3))
    stranger.say(control.Want(1, "s4", 0, 3, sum(len(frame) for frame in frames)))
    stranger.hear(control.Grant)
    stranger.say(control.Data(1), frames)
    assert "another sample came" in stranger.hear(control.Refuse).reason


def test_credit_of_a_silent_peer_returns(closing):
    notices = Notices()
    one = encode(make_sample(0)).nbytes
    receiver = receiver_of(closing, budget=room_for(1), heartbeat_s=0.2, on_event=notices)
    stranger = closing(Stranger(receiver.endpoint))
    stranger.hello()
    stranger.say(control.Want(1, "s9", 0, 9, one))
    stranger.hear(control.Grant)  # it has all the credit, and says no more
    started = time.monotonic()
    sender = sender_of(closing, receiver.endpoint, heartbeat_s=0.2)
    sender.send(make_sample(0))
    assert take(receiver, 1) == [0]
    assert "silent" in notices.wait("lost").reason
    assert time.monotonic() - started < 10
    stranger.say(control.Ping())
    stranger.hear(control.Resync)  # it may come back
