"""What a receiver lets in: peers of its version, and the samples that were announced to it."""

from collections import OrderedDict

from torchspec_lite.control import Hello, Want
from torchspec_lite.sample import Expectation, Sample
from torchspec_lite.wire import VERSION, WireError, decode


class Recent(OrderedDict):
    """The latest `limit` entries; older ones are forgotten."""

    def __init__(self, limit: int):
        super().__init__()
        self._limit = limit

    def __setitem__(self, key, value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            self.popitem(last=False)


def version_problem(hello: Hello) -> str:
    """Why a peer of another version is turned away, by name; empty for one of this version."""
    if hello.version == VERSION:
        return ""
    age = "newer" if hello.version > VERSION else "older"
    return (f"version: {hello.name} speaks wire version {hello.version}, {age} than this receiver's {VERSION}; "
            "run the same release on every node")


def length_problem(want: Want, expect: Expectation) -> str:
    """Why a sample is too long to be sent at all; empty for one that is not."""
    if want.nbytes <= expect.max_sample_bytes():
        return ""
    return (f"too_long: {want.nbytes} bytes, this receiver takes {expect.max_sample_bytes()} "
            f"({expect.max_tokens} tokens)")


def announced_sample(want: Want, frames: list[memoryview], into: list[memoryview] | None,
                     expect: Expectation) -> Sample:
    """Decode the frames (see `decode`) and compare them with their announcement. Raises SampleError."""
    sample = decode(frames, into)
    if (sample.id, sample.attempt, sample.ordinal) != (want.id, want.attempt, want.ordinal):
        raise WireError("mismatch", f"credit was asked for {want.id} attempt {want.attempt}, another sample came")
    expect.check(sample)
    return sample
