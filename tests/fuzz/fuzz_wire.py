"""Coverage-guided fuzzing of what strangers can send: sample frames and control messages.

`python -m tests.fuzz.fuzz_wire -runs=1000000 -max_len=4096` (libFuzzer's options; `-max_total_time=60` for a minute).
Needs the package `atheris`. Ends with an error if anything but a named refusal comes out, or if memory grows past
libFuzzer's `-rss_limit_mb`, 2,048 unless told.
"""

import json
import struct
import sys

import atheris

with atheris.instrument_imports(include=["torchspec_lite", "json"]):
    from torchspec_lite import control, wire

import torch
import xxhash

from torchspec_lite.keys import zap_reply
from torchspec_lite.sample import Sample, SampleError
from torchspec_lite.shared_slots import layout


def sound_frames() -> list[bytes]:
    sample = Sample("s", 0, 0, "train", "t@0", (1, 2), torch.arange(5, dtype=torch.int32),
                    torch.ones(5, dtype=torch.uint8), torch.ones(4, 2, 8, dtype=torch.bfloat16),
                    torch.ones(4, 8, dtype=torch.bfloat16))
    encoded = wire.encode(sample)
    encoded.seal()
    return [bytes(frame) for frame in encoded.frames]


FRAMES = sound_frames()
HEADER = json.loads(FRAMES[0][wire.PREFIX.size :])
FIELDS = sorted(HEADER)
VERSION = bytes([control.VERSION])
MEMORY = memoryview(bytearray(4096))


def decode(frames: list[bytes]) -> None:
    try:
        wire.decode([memoryview(bytearray(frame)) for frame in frames])
    except SampleError as error:
        if not error.kind or not error.detail:
            raise AssertionError("a refusal without its reason") from error


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    match provider.ConsumeIntInRange(0, 5):
        case 0:  # any frames
            decode([provider.ConsumeBytes(provider.ConsumeIntInRange(0, 300)) for _ in range(4)])
        case 1:  # a sound sample with one frame replaced
            place = provider.ConsumeIntInRange(0, 3)
            decode([provider.ConsumeBytes(300) if i == place else frame for i, frame in enumerate(FRAMES)])
        case 2:  # a header of any text, its checksum right, so that the fuzzer gets past it
            text = provider.ConsumeBytes(provider.remaining_bytes())
            decode([_prefixed(text, FRAMES[1:]), *FRAMES[1:]])
        case 3:  # sound JSON with some values replaced
            values = dict(HEADER)
            for _ in range(provider.ConsumeIntInRange(1, 4)):
                values[provider.PickValueInList(FIELDS)] = _value(provider)
            text = json.dumps(values).encode()
            body = [provider.ConsumeBytes(len(frame)).ljust(len(frame), b"\0") for frame in FRAMES[1:]]
            decode([_prefixed(text, body), *body])
        case 4:  # control messages
            kind = provider.PickValueInList(sorted(control.KINDS))
            try:
                message = control.unpack(kind + VERSION + provider.ConsumeBytes(provider.remaining_bytes()))
            except wire.WireError:
                return
            if control.unpack(control.pack(message)) != message:
                raise AssertionError(f"{message} does not survive")
        case 5:  # handles and requests for admission
            lengths = [provider.ConsumeInt(8) for _ in range(provider.ConsumeIntInRange(0, 4))]
            try:
                views = layout(MEMORY, provider.ConsumeIntInRange(0, 2**48), [abs(length) for length in lengths])
                if [view.nbytes for view in views] != [abs(length) for length in lengths]:
                    raise AssertionError("a view of another length")
            except ValueError:
                pass
            parts = [provider.ConsumeBytes(40) for _ in range(provider.ConsumeIntInRange(0, 8))]
            if zap_reply(parts, frozenset())[2] != b"400":
                raise AssertionError("let in without a key")


def _prefixed(text: bytes, body: list[bytes]) -> bytes:
    digest = xxhash.xxh3_64_intdigest(text + b"".join(body))
    return struct.pack("<4sHHQ", b"TSLS", 1, len(text) % 65536, digest) + text


def _value(provider):
    match provider.ConsumeIntInRange(0, 5):
        case 0:
            return provider.ConsumeInt(8)
        case 1:
            return provider.ConsumeUnicodeNoSurrogates(20)
        case 2:
            return [provider.ConsumeIntInRange(-1, 70) for _ in range(provider.ConsumeIntInRange(0, 4))]
        case 3:
            return provider.ConsumeBool()
        case 4:
            return provider.ConsumeFloat()
    return provider.PickValueInList([None, "float32", "float16", {}, 2**21, 2, 8, 16])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
