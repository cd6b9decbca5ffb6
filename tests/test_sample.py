"""A sample's checks and its frames: what goes in comes out, and nothing else comes in."""

import json
import struct
import tracemalloc
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stream_peers import EXPECT, make_sample, same
from torchspec_lite import control
from torchspec_lite.sample import SampleError, check_sample
from torchspec_lite.wire import WireError, decode, encode

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def sealed(sample) -> list[memoryview]:
    encoded = encode(sample)
    encoded.seal()
    return [memoryview(bytearray(frame)) for frame in encoded.frames]


def reseal(frames: list[memoryview], text: bytes, version: int = 1) -> list[memoryview]:
    """The frames under another header text, with a checksum that fits, computed here from the format's description."""
    digest = xxhash.xxh3_64_intdigest(text + b"".join(frames[1:]))
    return [memoryview(bytearray(struct.pack("<4sHHQ", b"TSLS", version, len(text), digest) + text)), *frames[1:]]


def header_of(frames) -> dict:
    return json.loads(bytes(frames[0][16:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [2, 3, 8, 129])
def test_a_sample_survives_the_wire(tokens, dtype):
    sample = make_sample(3, tokens, dtype)
    assert same(decode(sealed(sample)), sample)


def test_received_tensors_share_the_frames_memory():
    frames = sealed(make_sample())
    sample = decode(frames)
    frames[2][:2] = b"\0\0"
    assert sample.aux[0, 0, 0] == 0
    assert sample.clone().aux.data_ptr() != sample.aux.data_ptr()


def test_frames_after_the_header_are_an_arrow_stream():
    sample = make_sample(1, 50)
    table = pa.ipc.open_stream(b"".join(sealed(sample)[1:])).read_all()
    table.validate(full=True)
    assert table["token"].to_pylist() == sample.token_ids[:-1].tolist()
    assert table["mask"].to_pylist() == sample.mask[:-1].tolist()
    aux = table["aux"].chunk(0).to_numpy_ndarray()
    assert torch.equal(torch.from_numpy(aux.copy()).view(torch.bfloat16), sample.aux)
    last = table["last"].chunk(0).to_numpy_ndarray()
    assert torch.equal(torch.from_numpy(last.copy()).view(torch.bfloat16), sample.last)
    assert table.schema.metadata[b"layer_convention"] == b"entering_layer"
    assert table.schema.metadata[b"last_norm"] == b"pre"


def test_header_says_what_the_states_are():
    header = header_of(sealed(make_sample(1, 50)))
    assert header["layer_ids"] == [2, 5, 7] and header["layer_convention"] == "entering_layer"
    assert header["last_norm"] == "pre" and header["dtype"] == "bfloat16" and header["tokens"] == 50


def test_frames_add_at_most_two_percent():
    sample = make_sample(0, 300)  # 150 KB; real samples are larger
    assert sum(len(frame) for frame in sealed(sample)) / sample.nbytes <= 1.02


@pytest.mark.parametrize("frame", range(4))
def test_any_changed_byte_is_found(frame):
    sample = make_sample()
    for place in range(0, len(sealed(sample)[frame]), 97):
        frames = sealed(sample)
        frames[frame][place] ^= 1
        with pytest.raises(WireError):
            decode(frames)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["aux", "last"])
def test_states_that_are_not_finite_are_refused(name, value, dtype):
    sample = make_sample(dtype=dtype)
    vars(sample)[name][-1, ..., -1] = value
    with pytest.raises(SampleError, match="not_finite"):
        decode(sealed(sample))


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_finite_states_are_taken(dtype):
    sample = make_sample(dtype=dtype)
    sample.aux[0, 0, :2] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min])
    assert same(decode(sealed(sample)), sample)


@pytest.mark.parametrize("version, age", [(0, "older"), (2, "newer")])
def test_another_version_is_refused_by_name(version, age):
    frames = sealed(make_sample())
    with pytest.raises(WireError, match=f"version {version}, {age} than this program's 1"):
        decode(reseal(frames, bytes(frames[0][16:]), version))


@pytest.mark.parametrize("change", [
    {"tokens": 2**21, "hidden": 2**17}, {"tokens": 10**13}, {"tokens": 1}, {"tokens": True}, {"hidden": 0},
    {"prelude": 2**40}, {"prelude": -8}, {"prelude": 4}, {"layer_ids": list(range(65))}, {"layer_ids": "2"},
    {"layer_ids": [7, 5, 2]}, {"layer_ids": [2, 2, 5]}, {"layer_ids": [1.0, 2, 3]}, {"dtype": "float64"},
    {"dtype": ["bfloat16"]}, {"id": ""}, {"id": "x" * 257}, {"id": "a\nb"}, {"id": 5}, {"attempt": -1},
    {"ordinal": 2**60}, {"purpose": "test"}, {"last_norm": "post"}, {"layer_convention": "leaving_layer"},
    {"final_mask": 2}, {"final_token": -1}, {"extra": 1},
])
def test_headers_out_of_limits_are_refused_without_allocation(change):
    frames = sealed(make_sample())
    frames = reseal(frames, json.dumps(header_of(frames) | change).encode())
    tracemalloc.start()
    with pytest.raises(SampleError):
        decode(frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_deep_json_is_refused():
    frames = sealed(make_sample())
    with pytest.raises(WireError, match="header"):
        decode(reseal(frames, b"[" * 8000))


@pytest.mark.parametrize("change, kind", [
    ({"token_ids": torch.zeros(1, dtype=torch.int32)}, "too_short"),
    ({"token_ids": torch.zeros(40, dtype=torch.int64)}, "dtype"),
    ({"token_ids": torch.full((40,), -1, dtype=torch.int32)}, "token"),
    ({"mask": torch.zeros(40, dtype=torch.uint8)}, "no_supervision"),
    ({"mask": torch.tensor([1] + [0] * 39, dtype=torch.uint8)}, "no_supervision"),
    ({"mask": torch.full((40,), 2, dtype=torch.uint8)}, "mask"),
    ({"mask": torch.ones(39, dtype=torch.uint8)}, "shape"),
    ({"aux": torch.zeros(40, 3, 64, dtype=torch.bfloat16)}, "shape"),
    ({"aux": torch.zeros(39, 64, 3, dtype=torch.bfloat16)}, "shape"),
    ({"aux": torch.zeros(39, 3, 64, dtype=torch.float32)}, "dtype"),
    ({"aux": torch.zeros(39, 64, 3, dtype=torch.bfloat16).transpose(1, 2)}, "layout"),
    ({"layer_ids": (2, 5)}, "shape"),
    ({"layer_ids": (5, 2, 7)}, "layers"),
    ({"purpose": "other"}, "label"),
    ({"id": "two\nlines"}, "label"),
    ({"attempt": True}, "label"),
])
def test_unsound_samples_are_named(change, kind):
    with pytest.raises(SampleError) as raised:
        check_sample(replace(make_sample(), **change))
    assert raised.value.kind == kind


@pytest.mark.parametrize("change, text", [
    ({"fingerprint": "other@1"}, "target is other@1"), ({"layer_ids": (2, 5, 8)}, "layer ids is"),
])
def test_expectation_names_what_differs(change, text):
    with pytest.raises(SampleError, match=text):
        EXPECT.check(replace(make_sample(), **change))
    with pytest.raises(SampleError, match="dtype is"):
        EXPECT.check(make_sample(dtype=torch.float32))
    with pytest.raises(SampleError, match="too_long"):
        EXPECT.check(make_sample(tokens=4097))
    EXPECT.check(make_sample())


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
                    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(header_of(sealed(make_sample())))), JSON))
def test_hostile_headers_only_raise_named_errors(change):
    frames = sealed(make_sample())
    try:
        decode(reseal(frames, json.dumps(header_of(frames) | change).encode()))
    except SampleError as error:
        assert error.kind


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6))
def test_hostile_frames_only_raise_named_errors(frames):
    with pytest.raises(WireError):
        decode([memoryview(bytearray(frame)) for frame in frames])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.tuples(st.sampled_from(sorted(control.KINDS)), JSON).map(
    lambda pair: pair[0] + bytes([control.VERSION]) + json.dumps(pair[1]).encode()))
def test_hostile_control_messages_only_raise_named_errors(data):
    try:
        message = control.unpack(data)
    except WireError as error:
        assert error.kind in ("control", "version")
    else:
        assert control.unpack(control.pack(message)) == message


COUNT = st.integers(0, 2**31 - 1)
LISTS = st.lists(st.integers(0, 2**48), max_size=20).map(tuple)
TEXT = st.text(max_size=256)
MESSAGES = st.one_of(
    st.builds(control.Hello, COUNT, TEXT, TEXT, COUNT, TEXT, COUNT, COUNT, COUNT, TEXT),
    st.builds(control.Want, COUNT, TEXT, COUNT, COUNT, COUNT, COUNT, LISTS), st.builds(control.Data, COUNT),
    st.builds(control.Welcome, TEXT, st.booleans(), LISTS),
    st.builds(control.Grant, LISTS), st.builds(control.Refuse, COUNT, TEXT), st.builds(control.Ping))


@settings(max_examples=200, deadline=None)
@given(MESSAGES)
def test_control_messages_survive_the_wire(message):
    assert control.unpack(control.pack(message)) == message
