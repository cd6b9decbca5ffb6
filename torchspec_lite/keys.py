"""CURVE keys of one run: made per run, kept in memory or in private files, and the list of who may connect."""

import json
import os
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import zmq
from zmq.utils import z85

from torchspec_lite.errors import UserError

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True)
class KeyPair:
    """A CURVE25519 key pair, Z85 text. The secret half is never shown."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class ReceiverKeys:
    """What a receiver needs: its own pair and the public keys of the senders it lets in."""

    own: KeyPair
    allowed: frozenset[str]


@dataclass(frozen=True)
class SenderKeys:
    """What a sender needs: its own pair and the receiver's public key."""

    own: KeyPair
    receiver_public: str


def make_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def save_keys(path: Path, keys: ReceiverKeys | SenderKeys) -> None:
    """Write keys to a new file that only its owner reads (0600). Raises UserError if it is there already."""
    values = {"public": keys.own.public, "secret": keys.own.secret}
    if isinstance(keys, ReceiverKeys):
        values["allowed"] = sorted(keys.allowed)
    else:
        values["receiver_public"] = keys.receiver_public
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UserError(f"key file {path} is there already; keys are made anew for each run, so delete it") from error
    with os.fdopen(file, "w") as stream:
        json.dump(values, stream)


def load_keys(path: Path) -> ReceiverKeys | SenderKeys:
    """Read a key file. Raises UserError when it is missing, not a key file, or readable by others."""
    try:
        with open(path) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            values = json.load(stream)
        own = KeyPair(values["public"], values["secret"])
        keys = (ReceiverKeys(own, frozenset(values["allowed"])) if "allowed" in values
                else SenderKeys(own, values["receiver_public"]))
    except OSError as error:
        raise UserError(f"key file {path}: {error.strerror}; the run's coordinator writes it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"key file {path} is not a key file of torchspec-lite") from error
    if mode & 0o077:
        raise UserError(f"key file {path} can be read by others; run: chmod 600 {path}")
    return keys


def check_bind_host(host: str) -> None:
    """Raises UserError for addresses that mean every interface."""
    if host in ("", "*", "0.0.0.0", "::", "[::]"):
        raise UserError(f"stream.host {host!r} would listen on every interface; name one, by address or like eth0")


def host_of(endpoint: str) -> str:
    """The address in `tcp://address:port`."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(place: str) -> bool:
    """Whether a host (name, address or interface) or a bound endpoint `tcp://address:port` is this machine's alone.

    A name other than `localhost` and `lo` is not: nobody knows yet where it leads.
    """
    host = host_of(place) if place.startswith("tcp://") else place
    if host in ("localhost", "lo"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def zap_reply(request: list[bytes], allowed: frozenset[str]) -> list[bytes]:
    """Answer a ZAP 1.0 request (ZeroMQ RFC 27): 200 for a CURVE client on the list, 400 for everyone else."""
    version, sequence, mechanism = (request + [b""] * 6)[0], (request + [b""] * 6)[1], (request + [b""] * 6)[5]
    key = request[6] if len(request) == 7 and len(request[6]) == 32 else b""
    text = z85.encode(key).decode() if key else ""
    if version == b"1.0" and mechanism == b"CURVE" and text in allowed:
        return [b"1.0", sequence, b"200", b"OK", text.encode(), b""]
    return [b"1.0", sequence, b"400", b"this key is not one of the run's", b"", b""]
