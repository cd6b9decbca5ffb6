"""When prompts are answered again for the trainers, against an engine that only notes what it is asked."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from workers import second_answers
from workers.consent import Sampling, consent
from workers.scheduler import SECOND_PRIORITY, CountingScheduler
from workers.second_answers import SecondAnswers
from workers.serving_capture import MARK, SECOND


class Engine:
    """Keeps each request until it is let go."""

    def __init__(self):
        self.asked, self.released = [], asyncio.Event()

    async def generate(self, prompt, params, request_id, priority=0):
        self.asked.append((prompt["prompt_token_ids"], params, priority))
        yield "begun"
        await self.released.wait()
        yield "ended"


def answers(engine, running=lambda: 0, times=1, below=3, longest=100, max_age_s=60.0):
    return SecondAnswers(engine.generate, running, "replica", times, below, longest, max_age_s)


async def settle():
    """Let every task go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_newest_prompts_are_answered_while_there_is_room():
    async def story():
        engine, running = Engine(), [1]
        second = answers(engine, lambda: running[0])
        for token in range(5):
            second.remember([token] * 4, 50)
        second.begin()
        await settle()
        assert [prompt[0] for prompt, _, _ in engine.asked] == [4, 3]  # one user's request and two of ours are three
        second.begin()
        await settle()
        assert [prompt[0] for prompt, _, _ in engine.asked] == [4, 3, 2]  # the engine has not counted ours yet
        running[0] = 4
        second.begin()
        await settle()
        assert len(engine.asked) == 3
        engine.released.set()
        await settle()
        running[0] = 0
        second.begin()
        await settle()
        assert [prompt[0] for prompt, _, _ in engine.asked] == [4, 3, 2, 1, 0] and not second.prompts
        params, priority = engine.asked[0][1:]
        assert (params.temperature, params.max_tokens, params.extra_args, priority) == (1.0, 50, {MARK: SECOND}, SECOND_PRIORITY)
        second.close()

    asyncio.run(story())


def test_each_prompt_is_answered_as_often_as_asked_within_the_sample_and_not_when_old(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(second_answers.time, "monotonic", lambda: now[0])

    async def story():
        engine = Engine()
        engine.released.set()
        second = answers(engine, times=2, below=9, longest=20, max_age_s=10.0)
        second.remember([1] * 15, 50)     # 5 more tokens fit
        second.remember([2] * 19, 50)     # one more: nothing to learn
        second.remember([3] * 4, None)    # the user set no limit
        second.begin()
        await settle()
        assert [(prompt[0], params.max_tokens) for prompt, params, _ in engine.asked] == [(3, 16), (3, 16), (1, 5), (1, 5)]
        second.remember([4] * 4, 8)
        now[0] = 10.5
        second.begin()
        await settle()
        assert len(engine.asked) == 4 and not second.prompts
        second.close()

    asyncio.run(story())


def test_old_prompts_are_forgotten_though_nobody_wants_them_answered(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(second_answers, "BETWEEN_S", 0.0)
    monkeypatch.setattr(second_answers.time, "monotonic", lambda: now[0])

    async def story():
        engine = Engine()
        second = answers(engine, max_age_s=10.0)
        second.remember([1] * 4, 8)
        now[0] = 6.0
        second.remember([2] * 4, 8)
        await settle()
        assert len(second.prompts) == 2
        now[0] = 10.5
        while len(second.prompts) == 2:
            await asyncio.sleep(0)
        assert [asked.prompt[0] for asked in second.prompts] == [2] and not engine.asked
        second.close()

    asyncio.run(story())


def test_nothing_is_asked_until_training_wants_it_and_a_fault_ends_one_answer_only(monkeypatch):
    said = []
    monkeypatch.setattr(second_answers, "BETWEEN_S", 0.0)
    # Not caplog: whoever configures logging in this process may have switched a module's logger off.
    monkeypatch.setattr(second_answers, "log", SimpleNamespace(warning=lambda text, *values: said.append(text % values)))

    async def story():
        engine = Engine()
        plain, engine.released = engine.generate, asyncio.Event()

        async def generate(prompt, params, request_id, priority=0):
            if prompt["prompt_token_ids"][0] == 2:
                raise ValueError("too long")
            async for output in plain(prompt, params, request_id, priority):
                yield output

        second = SecondAnswers(generate, lambda: 0, "replica", 1, 4, 100, 60.0)
        for token in (1, 2):
            second.remember([token] * 4, 8)
        await settle()
        assert not engine.asked and len(second.prompts) == 2
        second.want(True)
        while not engine.asked:
            await asyncio.sleep(0)
        assert [prompt[0] for prompt, _, _ in engine.asked] == [1]
        assert said == ["a second answer was given up: ValueError"]
        second.close()

    asyncio.run(story())


@pytest.mark.parametrize("allowed, whole, again", [(True, True, [[5, 6]]), (True, False, []), (False, True, [])])
def test_only_sampled_requests_that_were_answered_whole_are_answered_again(allowed, whole, again):
    async def story():
        engine = Engine()
        engine.released.set()
        sampling, remembered = Sampling(1.0, True, 60.0), []
        sampling.second = SimpleNamespace(remember=lambda prompt, most: remembered.append(prompt))
        sampling.mark_requests_of(engine)
        consent.set(allowed)
        outputs = engine.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=4), "r")
        async for output in outputs:
            assert not remembered
            if not whole:
                break
        await outputs.aclose()
        assert remembered == again

    asyncio.run(story())


def test_rounds_of_second_answers_do_not_count_as_served():
    class Plain:
        def make_spec_decoding_stats(self, stats, num_draft_tokens, request_id):
            return stats + num_draft_tokens

    scheduler = type("Counting", (CountingScheduler.__mro__[1], Plain), {})()
    scheduler.requests = {name: SimpleNamespace(priority=priority)
                          for name, priority in (("user", 0), ("shadow", 1), ("second", SECOND_PRIORITY))}
    counted = [scheduler.make_spec_decoding_stats(10, num_draft_tokens=3, request_id=name) for name in scheduler.requests]
    assert counted == [13, 13, 10]
