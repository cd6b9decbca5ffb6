"""A worker's line to a coordinator that dies, whatever Ray calls its death."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError

from workers import link
from workers.link import RETRIES, CoordinatorLost, Link


@pytest.fixture
def answer(monkeypatch):
    """What Ray gives for each call, in turn: an error is raised."""
    answers = []

    def get(reference, timeout):
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(link, "ray", SimpleNamespace(get=get))
    return answers


LINE = Link(SimpleNamespace(coming=SimpleNamespace(remote=lambda below: below)), "trainer 1")


@pytest.mark.parametrize("death", [ActorDiedError(), OutOfMemoryError("the node was running low on memory")])
def test_a_coordinator_that_died_is_asked_again_and_named_when_it_stays_away(answer, death):
    answer += [death, death, 5]
    assert LINE.call("coming", None) == 5
    answer += [death] * RETRIES
    with pytest.raises(CoordinatorLost, match="trainer 1 called coming, but the coordinator is gone"):
        LINE.call("coming", None)
    assert not answer


def test_one_that_does_not_answer_is_named(answer):
    answer.append(GetTimeoutError("Get timed out"))
    with pytest.raises(CoordinatorLost, match="trainer 1 waited 120 s for the coordinator to answer coming"):
        LINE.call("coming", None)
