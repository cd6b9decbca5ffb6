"""Which requests may be sampled, what a replica remembers of them, and for how long."""

import asyncio
from weakref import WeakSet

import pytest
from vllm import SamplingParams

from workers import consent


class Tokens(list):
    """A list that can be watched."""

    __hash__ = object.__hash__


async def engine_generate(prompt, params, request_id):
    yield "answer"


def test_prompts_of_sampled_requests_are_remembered_newest_first_and_let_go_when_old(monkeypatch):
    now, kept = [0.0], WeakSet()
    monkeypatch.setattr(consent.time, "monotonic", lambda: now[0])

    def watched(tokens):
        copy = Tokens(tokens)
        kept.add(copy)
        return copy

    monkeypatch.setattr(consent, "list", watched, raising=False)

    class Engine:
        generate = staticmethod(engine_generate)

    async def story():
        sampling = consent.Sampling(1.0, True, max_age_s=10.0)
        sampling.mark_requests_of(Engine)
        for token, at, allowed in ((1, 0.0, True), (2, 4.0, True), (3, 5.0, False), (4, 6.0, True)):
            now[0] = at
            consent.consent.set(allowed)
            Engine.generate({"prompt_token_ids": [token]}, SamplingParams(), "request")
        assert sampling.recent(9) == [[4], [2], [1]] and sampling.recent(1) == [[4]]
        now[0] = 15.0
        sampling.forget_old()
        assert [list(tokens) for tokens in kept] == [[4]]  # in memory no more
        now[0] = 17.0
        assert sampling.recent(9) == [] and not kept

    asyncio.run(story())


@pytest.mark.parametrize("name, value, allowed", [
    (b"authorization", b"Bearer hush", False), (b"authorization", b"bearer hush", False),
    (b"Authorization", b"BEARER   hush ", False), (b"authorization", b"Bearer other", True), (b"authorization", b"hush", True),
    (b"authorization", b"Basic hush", True), (b"X-Torchspec-Lite-Capture", b" No ", False),
    (b"x-torchspec-lite-capture", b"yes", True)])
def test_whoever_says_no_in_any_way_that_is_let_in_is_not_sampled(name, value, allowed):
    seen = []

    async def app(scope, receive, send):
        seen.append(consent.consent.get())

    asyncio.run(consent.AsksConsent(app, "hush")({"type": "http", "headers": [(name, value)]}, None, None))
    assert seen == [allowed]
