"""A sample as frames, and back: a small header, then the tensors as they lie in memory. Never pickle.

Four frames: header; prelude with token ids and mask; aux; last. The frames after the header, joined, are an Arrow IPC
stream of one record batch with n - 1 rows and the columns token, mask, aux, last (states are `fixed_shape_tensor`,
bf16 stored as uint16), so any Arrow reader reads a recorded stream. This decoder itself does not read the Arrow
metadata: every length follows from the header, which is checked first, so hostile flatbuffers reach no parser and
nothing is allocated for what a header claims. The n-th token, which has no states, is in the header.
"""

import io
import json
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import torch
import xxhash

from torchspec_lite.sample import (
    DTYPES, MAX_COUNT, MAX_LAYERS, MAX_ORDINAL, Sample, SampleError, check_labels, check_sample, check_values,
)

VERSION = 1
MAGIC = b"TSLS"
PREFIX = struct.Struct("<4sHHQ")  # magic, schema version, bytes of JSON, checksum
MAX_HEADER = 8192
MAX_PRELUDE = 65536
MAX_TOKENS = 2**21
MAX_HIDDEN = 2**17
FRAMES = 4
CHUNK = 2 * 2**20  # bytes hashed, copied or scanned at once, so that the second pass finds them in the cache
LIMITS = {"attempt": (0, MAX_COUNT), "ordinal": (0, MAX_ORDINAL), "tokens": (2, MAX_TOKENS), "hidden": (1, MAX_HIDDEN),
          "prelude": (0, MAX_PRELUDE), "final_token": (0, MAX_COUNT), "final_mask": (0, 1)}
FROM_JSON, TO_JSON = json.JSONDecoder(), json.JSONEncoder(separators=(",", ":"))
LAYER_CONVENTION = "entering_layer"
LAST_NORM = "pre"
ARROW_TYPES = {"bfloat16": pa.uint16(), "float16": pa.float16(), "float32": pa.float32()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


class WireError(SampleError):
    """Frames that are not a sample of this version; `kind` names the fault."""


@dataclass(frozen=True)
class Header:
    id: str
    attempt: int
    ordinal: int
    purpose: str
    fingerprint: str
    layer_ids: tuple[int, ...]
    layer_convention: str
    last_norm: str
    dtype: str
    tokens: int
    hidden: int
    prelude: int  # bytes of Arrow metadata before the token ids
    final_token: int
    final_mask: int

    def lengths(self) -> tuple[int, int, int]:
        """Bytes of the three frames after the header."""
        rows, size = self.tokens - 1, DTYPES[self.dtype].itemsize
        small = self.prelude + _padded(4 * rows) + _padded(rows)
        return small, rows * len(self.layer_ids) * self.hidden * size, rows * self.hidden * size


@dataclass
class Encoded:
    """A sample's frames before or after its checksum was set; aux and last share the sample's memory."""

    frames: list  # bytearray header, bytes small, memoryview aux, memoryview last
    nbytes: int  # of all frames

    def seal(self) -> None:
        """Compute the checksum and write it into the header."""
        digest = xxhash.xxh3_64(self.frames[0][PREFIX.size:])
        for frame in self.frames[1:]:
            digest.update(frame)
        self._set_checksum(digest)

    def copy_into(self, views: list[memoryview]) -> None:
        """Copy the frames into memory of the same lengths and seal the copy, each byte read from memory once."""
        digest = xxhash.xxh3_64(self.frames[0][PREFIX.size:])
        for frame, view in zip(self.frames[1:], views[1:], strict=True):
            source, target = np.frombuffer(frame, np.uint8), np.frombuffer(view, np.uint8)
            for start in range(0, len(source), CHUNK):
                chunk = source[start : start + CHUNK]
                digest.update(chunk)
                np.copyto(target[start : start + CHUNK], chunk)
        self._set_checksum(digest)
        views[0][:] = self.frames[0]

    def _set_checksum(self, digest) -> None:
        header = self.frames[0]
        PREFIX.pack_into(header, 0, MAGIC, VERSION, len(header) - PREFIX.size, digest.intdigest())


def encode(sample: Sample) -> Encoded:
    """Lay a sample out as frames, without copying its states. Raises SampleError when the sample is not sound."""
    check_sample(sample)
    if sample.tokens > MAX_TOKENS or sample.last.shape[-1] > MAX_HIDDEN:
        raise SampleError("too_long", f"{sample.tokens} tokens of {sample.last.shape[-1]} states")
    dtype = NAMES[sample.aux.dtype]
    rows, hidden = sample.last.shape
    token_ids, mask = sample.token_ids.numpy(), sample.mask.numpy()
    prelude = _prelude(rows, tuple(sample.layer_ids), hidden, dtype)
    header = Header(sample.id, sample.attempt, sample.ordinal, sample.purpose, sample.fingerprint,
                    tuple(sample.layer_ids), LAYER_CONVENTION, LAST_NORM, dtype, sample.tokens, hidden, len(prelude),
                    int(token_ids[-1]), int(mask[-1]))
    text = TO_JSON.encode(vars(header)).encode()
    small = b"".join((prelude, token_ids[:-1], bytes(-4 * rows % 8), mask[:-1], bytes(-rows % 8)))
    frames = [bytearray(PREFIX.size) + text, memoryview(small), _bytes_of(sample.aux), _bytes_of(sample.last)]
    return Encoded(frames, sum(len(frame) for frame in frames))


def decode(frames: list[memoryview], into: list[memoryview] | None = None) -> Sample:
    """Check frames and give the sample that shares their memory (writable, so that torch takes it).

    With `into`, views of the frames' lengths, the states are copied there, and the sample shares that memory.

    Raises WireError, kind one of `frames`, `version`, `header`, `length`, `checksum`, or SampleError for a sample
    that is not sound (`shape`, `mask`, `token`, `no_supervision`, `not_finite`, …).
    """
    if len(frames) != FRAMES:
        raise WireError("frames", f"{len(frames)} frames, expected {FRAMES}")
    header = read_header(frames[0])
    lengths = tuple(frame.nbytes for frame in frames[1:])
    if lengths != header.lengths():
        raise WireError("length", f"frames of {lengths} bytes, the header says {header.lengths()}")
    rows, layers, dtype = header.tokens - 1, len(header.layer_ids), DTYPES[header.dtype]
    frames = _verify(frames, dtype, into or frames)
    small = np.frombuffer(frames[1], np.uint8)
    start, middle = header.prelude, header.prelude + _padded(4 * rows)
    token_ids, mask = np.empty(header.tokens, np.int32), np.empty(header.tokens, np.uint8)
    token_ids[:-1], token_ids[-1] = small[start : start + 4 * rows].view(np.int32), header.final_token
    mask[:-1], mask[-1] = small[middle : middle + rows], header.final_mask
    sample = Sample(
        header.id, header.attempt, header.ordinal, header.purpose, header.fingerprint, header.layer_ids,
        torch.from_numpy(token_ids), torch.from_numpy(mask),
        torch.frombuffer(frames[2], dtype=dtype).view(rows, layers, header.hidden),
        torch.frombuffer(frames[3], dtype=dtype).view(rows, header.hidden),
    )
    check_labels(sample)
    check_values(sample)  # shapes and types are right by their making
    return sample


def read_header(frame: memoryview) -> Header:
    """Parse and check a header frame. Raises WireError, kind `header` or `version`."""
    if not PREFIX.size <= frame.nbytes <= PREFIX.size + MAX_HEADER:
        raise WireError("header", f"{frame.nbytes} bytes")
    magic, version, length, _ = PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise WireError("header", "not a sample of torchspec-lite")
    if version != VERSION:
        age = "newer" if version > VERSION else "older"
        raise WireError("version", f"sample of wire version {version}, {age} than this program's {VERSION}; "
                                   "run the same release on every node")
    if length != frame.nbytes - PREFIX.size:
        raise WireError("header", "its length does not match its frame")
    try:
        values = FROM_JSON.decode(str(frame[PREFIX.size :], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError("header", "not valid JSON") from error
    return _header(values)


def _header(values) -> Header:
    if not isinstance(values, dict) or values.keys() != Header.__dataclass_fields__.keys():
        raise WireError("header", "fields differ from this version's")
    for name in ("id", "purpose", "fingerprint", "layer_convention", "last_norm", "dtype"):
        if type(values[name]) is not str:
            raise WireError("header", f"{name} is not text")
    for name, (low, high) in LIMITS.items():
        if type(values[name]) is not int or not low <= values[name] <= high:
            raise WireError("header", f"{name} is not an integer from {low} to {high}")
    ids = values["layer_ids"]
    if type(ids) is not list or not 0 < len(ids) <= MAX_LAYERS or any(type(i) is not int for i in ids):
        raise WireError("header", f"layer_ids is not a list of 1 to {MAX_LAYERS} integers")
    if values["dtype"] not in DTYPES:
        raise WireError("header", f"dtype is none of {', '.join(DTYPES)}")
    if (values["layer_convention"], values["last_norm"]) != (LAYER_CONVENTION, LAST_NORM):
        raise WireError("header", f"states must be named by {LAYER_CONVENTION!r} with last_norm {LAST_NORM!r}")
    if values["prelude"] % 8:
        raise WireError("header", "prelude is not a multiple of 8 bytes")
    return Header(**(values | {"layer_ids": tuple(ids)}))


def _verify(frames: list[memoryview], dtype: torch.dtype, into: list[memoryview]) -> list[memoryview]:
    """Compare the checksum and look for NaN and infinity, copying the states if they lie elsewhere, in one pass.

    Returns the frames to use, their states where `into` says.
    """
    expected = PREFIX.unpack_from(frames[0])[3]
    digest = xxhash.xxh3_64(frames[0][PREFIX.size :])
    digest.update(frames[1])
    finite = True
    for frame, view in zip(frames[2:], into[2:], strict=True):
        source, target = np.frombuffer(frame, np.uint8), np.frombuffer(view, np.uint8)
        for start in range(0, len(source), CHUNK):
            chunk = target[start : start + CHUNK]
            if view is not frame:  # what was copied is checked
                np.copyto(chunk, source[start : start + CHUNK])
            digest.update(chunk)
            finite = finite and _finite(chunk, dtype)
    if digest.intdigest() != expected:
        raise WireError("checksum", "the bytes differ from those that were sent")
    if not finite:
        raise SampleError("not_finite", "the states hold NaN or infinity")
    return [*frames[:2], *into[2:]]


def _finite(chunk: np.ndarray, dtype: torch.dtype) -> bool:
    """No value has all exponent bits set; the bits of a float ascend with its size, so two maxima tell."""
    exponent, bits = EXPONENTS[dtype], 8 * dtype.itemsize
    signed, unsigned = chunk.view(f"i{dtype.itemsize}"), chunk.view(f"u{dtype.itemsize}")
    return np.maximum.reduce(signed) < exponent and np.maximum.reduce(unsigned) < exponent + 2 ** (bits - 1)


@lru_cache(maxsize=4096)
def _prelude(rows: int, layer_ids: tuple[int, ...], hidden: int, dtype: str) -> bytes:
    """Arrow's schema message and record batch metadata for this shape: all of the stream but the buffers."""
    kind, layers = ARROW_TYPES[dtype], len(layer_ids)
    schema = pa.schema(
        [pa.field("token", pa.int32(), False), pa.field("mask", pa.uint8(), False),
         pa.field("aux", pa.fixed_shape_tensor(kind, [layers, hidden]), False),
         pa.field("last", pa.fixed_shape_tensor(kind, [hidden]), False)],
        {"torchspec_lite": str(VERSION), "dtype": dtype, "layer_ids": json.dumps(layer_ids),
         "layer_convention": LAYER_CONVENTION, "last_norm": LAST_NORM})
    size = DTYPES[dtype].itemsize
    # Arrow takes the buffers' addresses and lengths only; what the sink is given of them is thrown away unread.
    lengths = [4 * rows, rows, rows * layers * hidden * size, rows * hidden * size]
    untouched = pa.py_buffer(np.empty(max(lengths), np.uint8))
    arrays = []
    for field, length, width in zip(schema, lengths, (None, None, layers * hidden, hidden), strict=True):
        values = pa.Array.from_buffers(kind if width else field.type, rows * (width or 1),
                                       [None, untouched.slice(0, length)])
        if width:
            storage = pa.FixedSizeListArray.from_arrays(values, type=field.type.storage_type)
            values = pa.ExtensionArray.from_storage(field.type, storage)
        arrays.append(values)
    sink = _Head()
    with pa.PythonFile(sink, mode="w") as file, pa.ipc.new_stream(file, schema) as writer:
        batch = pa.record_batch(arrays, schema=schema)
        writer.write_batch(batch)
        end = schema.serialize().size + pa.ipc.get_record_batch_size(batch)
    body = sum(_padded(length) for length in lengths)
    return sink.head.getvalue()[: end - body]


class _Head(io.RawIOBase):
    """A sink that keeps only the first bytes written to it."""

    def __init__(self):
        self.head = io.BytesIO()
        self.total = 0

    def writable(self):
        return True

    def write(self, data):
        view = memoryview(data)
        self.head.write(view[: max(0, MAX_PRELUDE - self.total)])
        self.total += view.nbytes
        return view.nbytes


def _padded(length: int) -> int:
    return length + -length % 8


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")
