"""Fixtures that several files of tests share."""

import pytest


@pytest.fixture
def closing():
    """Register what must be closed after the test."""
    opened = []
    yield lambda thing: opened.append(thing) or thing
    for thing in reversed(opened):
        thing.close()


@pytest.fixture(params=[False, True], ids=["frames", "shared"])
def shared(request):
    return request.param
