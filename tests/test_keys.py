"""Who gets into an encrypted stream: the run's senders, and nobody else."""

import stat
from dataclasses import replace

import pytest
import zmq

from tests.stream_peers import EXPECT, make_sample, same
from torchspec_lite import control
from torchspec_lite.errors import UserError
from torchspec_lite.keys import (ReceiverKeys, SenderKeys, check_bind_host, is_loopback, load_keys, make_pair,
                                 save_keys, zap_reply)
from torchspec_lite.stream import Receiver, Sender, StreamError, StreamTimeout
from torchspec_lite.wire import VERSION

LIMIT_S = 60


@pytest.fixture
def pairs():
    return make_pair(), make_pair()


@pytest.fixture
def receiver(pairs):
    server, client = pairs
    made = Receiver("127.0.0.1", 2**22, 16, EXPECT, keys=ReceiverKeys(server, frozenset([client.public])))
    yield made
    made.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_sender_of_the_run_gets_in(pairs, receiver, shared):
    server, client = pairs
    sender = Sender(receiver.endpoint, "t", 2**22, keys=SenderKeys(client, server.public), shared_memory=shared)
    sender.send(make_sample(1))
    sample = receiver.get(LIMIT_S)
    assert same(sample, make_sample(1))
    receiver.release(sample)
    sender.close()


def test_who_knows_only_the_servers_public_key_is_refused(pairs, receiver):
    server, _ = pairs
    outsider = Sender(receiver.endpoint, "outsider", 2**22, keys=SenderKeys(make_pair(), server.public),
                      wait_s=LIMIT_S)
    with pytest.raises(StreamError, match="refused outsider: its key is not one of this run's"):
        outsider.send(make_sample(1))
    outsider.close()
    assert not receiver.stats().senders and not receiver.events()


def test_who_has_no_key_is_refused(pairs, receiver):
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    monitor = plain.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    plain.connect(receiver.endpoint)
    plain.send(control.pack(control.Hello(VERSION, "plain", "s", 1, "", 0, 0, 0, "")))
    assert monitor.poll(LIMIT_S * 1000)
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event == zmq.EVENT_DISCONNECTED
    assert not receiver.stats().senders
    plain.disable_monitor()
    context.destroy(linger=0)


def test_a_sender_does_not_talk_to_an_impostor(pairs, receiver):
    _, client = pairs
    fooled = Sender(receiver.endpoint, "t", 2**22, keys=SenderKeys(client, make_pair().public), wait_s=1.0)
    with pytest.raises(StreamTimeout, match="t waits for tcp://"):
        fooled.send(make_sample(1))
    fooled.close()


@pytest.mark.parametrize("change", [{0: b"2.0"}, {5: b"NULL"}, {5: b"PLAIN"}, {6: b"\0" * 32}, {6: b"short"}])
def test_zap_refuses_everything_but_a_listed_key(pairs, change):
    client = pairs[1]
    request = [b"1.0", b"7", b"torchspec-lite", b"127.0.0.1", b"", b"CURVE", zmq.utils.z85.decode(client.public)]
    assert zap_reply(request, frozenset([client.public]))[:3] == [b"1.0", b"7", b"200"]
    for place, value in change.items():
        request[place] = value
    assert zap_reply(request, frozenset([client.public]))[:3] == [b"1.0", b"7", b"400"]
    assert zap_reply(request[:3], frozenset([client.public]))[2] == b"400"
    assert zap_reply([], frozenset())[2] == b"400"


def test_key_files_are_private_and_come_back(pairs, tmp_path):
    server, client = pairs
    for keys in (ReceiverKeys(server, frozenset([client.public])), SenderKeys(client, server.public)):
        path = tmp_path / type(keys).__name__
        save_keys(path, keys)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert load_keys(path) == keys
        with pytest.raises(UserError, match="there already"):
            save_keys(path, keys)
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        load_keys(path)


def test_bad_key_files_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_keys(tmp_path / "none")
    (tmp_path / "bad").write_text('{"public": 1}')
    with pytest.raises(UserError, match="not a key file"):
        load_keys(tmp_path / "bad")


def test_secrets_are_not_printed(pairs):
    server, client = pairs
    for keys in (ReceiverKeys(server, frozenset([client.public])), SenderKeys(client, server.public)):
        assert keys.own.secret not in repr(keys) and keys.own.secret not in str(replace(keys))
    assert make_pair() != make_pair()


@pytest.mark.parametrize("endpoint, answer", [("tcp://127.0.0.1:5", True), ("tcp://127.8.8.8:5", True),
                                              ("tcp://[::1]:5", True), ("tcp://10.0.0.3:5", False),
                                              ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("lo", True),
                                              ("localhost", True), ("eth0", False), ("10.0.0.3", False), ("", False),
                                              ("0.0.0.0", False), ("127.0.0.1.example", False), ("localhost.", False)])
def test_loopback_is_recognised(endpoint, answer):
    assert is_loopback(endpoint) is answer


def test_named_hosts_pass():
    for host in ("127.0.0.1", "eth0", "10.1.2.3"):
        check_bind_host(host)


def test_a_host_that_is_not_loopback_needs_keys(monkeypatch):
    monkeypatch.setattr("torchspec_lite.router.is_loopback", lambda endpoint: False)
    with pytest.raises(UserError, match="leave stream.encrypt at auto"):
        Receiver("127.0.0.1", 2**20, 16, EXPECT)
    Receiver("127.0.0.1", 2**20, 16, EXPECT, unencrypted=True).close()
