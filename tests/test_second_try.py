"""A request that got no answer is asked once more; one that got a byte is not; a dead engine answers nothing."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from cluster import second_try
from cluster.second_try import EndsWithEngine, SecondTry

ASKED = [{"type": "http.request", "body": b"que", "more_body": True}, {"type": "http.request", "body": b"stion"}]
START = {"type": "http.response.start", "status": 200, "headers": []}
FIRST, LAST = ({"type": "http.response.body", "body": body, "more_body": more} for body, more in ((b"a", True), (b"b", False)))


def call(*attempts, then=()):
    """What the client gets, and what each attempt heard, when attempt i of the application sends `attempts[i]`."""
    messages, sent, heard = iter([*ASKED, *then]), [], []

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    async def application(scope, receive, send):
        scope["headers"].append((b"x-request-id", b"1"))
        heard.append((len(scope["headers"]), [await receive() for _ in range(2 + len(then))]))
        for message in attempts[len(heard) - 1]:
            await send(message)

    asyncio.run(SecondTry(application)({"type": "http", "headers": []}, receive, send))
    return sent, heard


@pytest.mark.parametrize("lost", [[], [START], [START, {"type": "http.response.body", "body": b"", "more_body": True}]])
def test_a_request_without_an_answer_is_asked_again_whole(lost):
    sent, heard = call(lost, [START, FIRST, LAST])
    assert sent == [START, FIRST, LAST]
    assert heard == [(1, ASKED), (1, ASKED)]


def test_an_answer_that_has_begun_is_never_begun_again():
    sent, heard = call([START, FIRST], [START, FIRST, LAST])
    assert sent == [START, FIRST] and len(heard) == 1


def test_an_empty_answer_is_an_answer():
    end = {"type": "http.response.body", "body": b""}
    assert call([START, end])[0] == [START, end]


def test_two_lost_attempts_are_a_503():
    sent, heard = call([], [START])
    assert len(heard) == 2 and sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == 503


def test_a_client_that_left_is_not_answered():
    sent, heard = call([], [START, LAST], then=[{"type": "http.disconnect"}])
    assert sent == [] and len(heard) == 1


def test_a_dead_engine_ends_its_process_instead_of_answering(monkeypatch):
    engine, sent, ends = SimpleNamespace(errored=False), [], []

    def exit(code):
        ends.append(code)
        raise SystemExit

    async def application(scope, receive, send):
        await send(START)
        engine.errored = True
        await send(LAST)

    async def send(message):
        sent.append(message)

    monkeypatch.setattr(second_try.os, "_exit", exit)
    with pytest.raises(SystemExit):
        asyncio.run(EndsWithEngine(application, engine)({}, None, send))
    assert sent == [START] and ends == [second_try.ENGINE_DEAD]
