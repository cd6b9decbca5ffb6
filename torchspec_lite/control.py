"""The small messages between sender and receiver: one frame each, a kind byte, a version byte and strict JSON. Never
pickle. `VERSION` changes with any change of these messages, and a peer of another one is refused by name."""

from dataclasses import dataclass
from functools import cache
from typing import get_type_hints

from torchspec_lite.sample import MAX_COUNT, MAX_ORDINAL, MAX_TEXT
from torchspec_lite.wire import FROM_JSON, TO_JSON, WireError

VERSION = 2  # 1 had no version byte
MAX_CONTROL = 256 * 1024
MAX_BYTES = 2**48
MAX_LIST = 16384  # sequence numbers in one message


@dataclass(frozen=True)
class Hello:
    """First message of a connection. `session` names the sender's process life, `epoch` counts its connections.

    `host`, `pid`, `fd`, `size` and `nonce` offer shared memory; size 0 offers none.
    """

    version: int
    name: str
    session: str
    epoch: int
    host: str
    pid: int
    fd: int
    size: int
    nonce: str


@dataclass(frozen=True)
class Want:
    """Asks for credit for one sample.

    With `lengths`, its frames lie in the sender's shared memory at `offset`, one after the other, each aligned to 64
    bytes: the receiver reads them there once there is credit, without a Grant.
    """

    seq: int
    id: str
    attempt: int
    ordinal: int
    nbytes: int
    offset: int = 0
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Data:
    """The sample's frames follow in the same message."""

    seq: int


@dataclass(frozen=True)
class Ping:
    """I am alive."""


@dataclass(frozen=True)
class Bye:
    """I am leaving, for this reason."""

    reason: str


@dataclass(frozen=True)
class Welcome:
    """Answer to Hello. `held` are the sequence numbers whose shared memory the receiver still reads."""

    session: str
    shared: bool
    held: tuple[int, ...]


@dataclass(frozen=True)
class Grant:
    """Credit for these samples: send their frames."""

    seqs: tuple[int, ...]


@dataclass(frozen=True)
class Ack:
    """These samples arrived whole and were checked."""

    seqs: tuple[int, ...]


@dataclass(frozen=True)
class Free:
    """The shared memory of these samples may be used again."""

    seqs: tuple[int, ...]


@dataclass(frozen=True)
class Refuse:
    """This sample is not taken; do not send it again."""

    seq: int
    reason: str


@dataclass(frozen=True)
class Resync:
    """The receiver does not know this connection: say Hello again."""


@dataclass(frozen=True)
class Banned:
    """The receiver takes nothing more from this sender."""

    reason: str


KINDS = {b"h": Hello, b"w": Want, b"d": Data, b"p": Ping, b"b": Bye, b"W": Welcome, b"G": Grant,
         b"A": Ack, b"F": Free, b"R": Refuse, b"Y": Resync, b"X": Banned}
BYTES = {message: kind for kind, message in KINDS.items()}
LIMITS = {"attempt": MAX_COUNT, "ordinal": MAX_ORDINAL, "nbytes": MAX_BYTES, "offset": MAX_BYTES, "size": MAX_BYTES}


def pack(message) -> bytes:
    """One frame. Texts longer than the limit (reasons) are cut."""
    values = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in vars(message).items()}
    return BYTES[type(message)] + bytes([VERSION]) + TO_JSON.encode(values).encode()


def unpack(frame: bytes | memoryview):
    """The message of a frame, every field checked. Raises WireError, kind `control`, or `version`: another release's."""
    if not 0 < len(frame) <= MAX_CONTROL:
        raise WireError("control", f"{len(frame)} bytes")
    message = KINDS.get(bytes(frame[:1]))
    if message is None:
        raise WireError("control", "unknown kind of message")
    version = 1 if frame[1:2] == b"{" else int.from_bytes(frame[1:2])
    if version != VERSION:
        age = "newer" if version > VERSION else "older"
        raise WireError("version", f"control message of version {version}, {age} than this program's {VERSION}; "
                                   "run the same release on every node")
    try:
        values = FROM_JSON.decode(str(frame[2:], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError("control", f"{message.__name__} is not valid JSON") from error
    fields = _fields(message)
    if not isinstance(values, dict) or values.keys() != fields.keys():
        raise WireError("control", f"{message.__name__} has other fields than this version's")
    return message(**{name: _checked(message, name, kind, values[name]) for name, kind in fields.items()})


@cache
def _fields(message: type) -> dict:
    return get_type_hints(message)


def _checked(message, name: str, kind, value):
    limit = LIMITS.get(name, MAX_COUNT)
    if kind is int and _is_count(value, limit):
        return value
    if kind is bool and type(value) is bool:
        return value
    if kind is str and type(value) is str and len(value) <= MAX_TEXT:
        return value
    if kind == tuple[int, ...] and type(value) is list and len(value) <= MAX_LIST:
        if all(_is_count(item, MAX_BYTES) for item in value):
            return tuple(value)
    raise WireError("control", f"{message.__name__}.{name} is out of its limits")


def _is_count(value, limit: int) -> bool:
    return type(value) is int and 0 <= value <= limit
