"""States of served requests, captured by the engine that speculates, against a plain Hugging Face forward."""

import asyncio

import httpx
import pytest
import torch
from vllm import SamplingParams

from tests.serving_rig import ANSWER, LAYER_IDS, LiveReplica, TinyTarget
from torchspec_lite.config import build
from torchspec_lite.sample import Expectation, Sample
from torchspec_lite.stream import Receiver
from workers.consent import consent
from workers.serving_capture import MARK
from workers.target_address import ReceiverAddress

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
WAIT_S = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TinyTarget(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def live(target, tmp_path_factory):
    # A drafter that knows the answers: rounds accept, and at their ends reject.
    drafter = target.export(target.teach(target.fresh_drafter(1)), tmp_path_factory.mktemp("drafters"), 1)
    config = target.config()
    config = build(config.model_dump() | {"traffic": {"fraction": 1.0, "prefer_low_acceptance": 0.0, "opt_out_key": "quiet",
                                                      "second_answers": 1},
                                          "drafter": {"init_from": drafter}, "capture": {"layer_ids": list(LAYER_IDS)}}, "test")
    live = LiveReplica(config, target.path, drafter, api_key="hush")
    yield live
    live.close()


@pytest.fixture
def receiver(live, target, request):
    """Receives what `live` captures during one test."""
    options = dict(fingerprint=target.info.fingerprint, budget=64 << 20) | getattr(request, "param", {})
    expect = Expectation(options["fingerprint"], LAYER_IDS, torch.float32, 64, 512)
    receiver = Receiver("127.0.0.1", options["budget"], 100, expect)
    live.run(live.replica.capture([ReceiverAddress(receiver.endpoint)]))
    yield receiver
    live.rpc("capture_off")
    receiver.close()


def ask(live, prompts, allowed=True, cancel_after=None, temperatures=(), **params) -> list[list[int]]:
    """Texts of answers to prompts sent together, greedy but where `temperatures` says; `allowed` is the users' consent."""
    async def answer(number, prompt):
        consent.set(allowed)
        output = None
        async for output in live.replica.engine.generate({"prompt_token_ids": prompt}, SamplingParams(
                temperature=dict(enumerate(temperatures)).get(number, 0.0),
                max_tokens=params.get("max_tokens", ANSWER)), f"r{number}-{id(params)}"):
            if cancel_after is not None and len(output.outputs[0].token_ids) >= cancel_after:
                break
        return prompt + list(output.outputs[0].token_ids)

    async def answers():
        return await asyncio.gather(*(asyncio.create_task(answer(*pair)) for pair in enumerate(prompts)))

    return live.run(answers())


def take(receiver, count: int) -> list[Sample]:
    samples = []
    for _ in range(count):
        sample = receiver.get(WAIT_S)
        samples.append(sample.clone())
        receiver.release(sample)
    return samples


def last_states(target, token_ids) -> torch.Tensor:
    found = []
    hook = target.model.base_model.norm.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    with torch.no_grad():
        target.model(torch.tensor([token_ids[:-1]]))
    hook.remove()
    return found[0][0]


def check(target, sample, text, prompt_tokens, first=0) -> None:
    """The sample is of `text` from token `first` on, and its states are those of a forward over the whole text."""
    assert sample.token_ids.tolist() == text[first:] and sample.purpose == "traffic"
    assert sample.mask.tolist() == [int(place >= prompt_tokens) for place in range(first, len(text))]
    for states, expected in ((sample.aux, target.states(text)[first:]), (sample.last, last_states(target, text)[first:])):
        assert float((states - expected).norm() / expected.norm()) < 1e-5


def by_length(samples):
    return sorted(samples, key=lambda sample: sample.tokens)


def counts(live):
    return live.run(live.replica.traffic())


def test_states_of_concurrent_requests_are_the_targets_and_answers_are_unchanged(live, receiver, target):
    texts = []
    acceptance, rounds = live.acceptance(lambda: texts.extend(ask(live, target.prompts)))
    assert texts == target.texts and acceptance > 2 and rounds > 20
    found = {tuple(sample.token_ids.tolist()): sample for sample in take(receiver, len(texts))}
    for prompt, text in zip(target.prompts, texts):
        check(target, found[tuple(text)], text, len(prompt))
    assert counts(live)["sent"] >= len(texts)


def test_second_answers_are_captured_and_counted_apart(live, receiver, target):
    live.replica.sampling.second.prompts.clear()
    prompts, found = target.prompts[4:6], []
    ask(live, prompts)
    firsts = take(receiver, 2)
    before, generated = counts(live), live.replica.stats()["generated"]

    def answer_again():
        live.replica.second_answers(True)
        found.extend(take(receiver, 2))

    _, rounds = live.acceptance(answer_again)
    live.replica.second_answers(False)
    assert rounds == 0 and live.replica.stats()["generated"] > generated
    after = counts(live)
    assert [after[key] - before[key] for key in ("requests", "sampled", "second_answers")] == [0, 0, 2]
    for sample in found:
        text = sample.token_ids.tolist()
        prompt = next(prompt for prompt in prompts if text[:len(prompt)] == prompt)
        assert sample.id.startswith("traffic-second-") and text not in target.texts
        check(target, sample, text, len(prompt))
    assert not any(sample.id.startswith("traffic-second-") for sample in firsts)


def test_sampled_requests_leave_the_answers_beside_them_alone(live, target):
    texts = ask(live, [*target.prompts, *target.prompts], temperatures=[0.0] * 6 + [1.0] * 6)
    assert texts[:6] == target.texts and not any(text in target.texts for text in texts[6:])


def test_a_limit_inside_an_accepted_round_cuts_the_sample(live, receiver, target):
    limits = [4, 5, 6, 7]
    for limit in limits:
        (text,) = ask(live, target.prompts[3:4], max_tokens=limit)
        (sample,) = take(receiver, 1)
        assert text == target.texts[3][:len(target.prompts[3]) + limit]
        check(target, sample, text, len(target.prompts[3]))


def test_a_cancelled_request_gives_what_was_computed(live, receiver, target):
    ask(live, target.prompts[2:3], cancel_after=6)
    (sample,) = take(receiver, 1)
    prompt = len(target.prompts[2])
    assert prompt + 6 <= sample.tokens <= len(target.texts[2])
    check(target, sample, target.texts[2][:sample.tokens], prompt)


def test_a_sampled_request_reads_no_cached_prefix_unless_told(live, receiver, target):
    prompt = (target.prompts[5] + target.prompts[4]) * 2  # 388 tokens: three whole blocks of 128
    text = target.continued(prompt)
    for limit in (10, 12):
        ask(live, [prompt], max_tokens=limit)
        check(target, take(receiver, 1)[0], text[:len(prompt) + limit], len(prompt))

    async def with_cache():
        params = SamplingParams(temperature=0.0, max_tokens=14, extra_args={MARK: True})
        plain = type(live.replica.engine).generate  # past the marking
        async for _ in plain(live.replica.engine, {"prompt_token_ids": prompt}, params, "cached"):
            pass
    live.run(with_cache())
    # vLLM leaves the last cached block unread for the drafter's sake, so 256 tokens came from the cache.
    check(target, take(receiver, 1)[0], text[:len(prompt) + 14], len(prompt), first=256)


def test_who_forbids_it_is_not_captured(live, receiver, target):
    before = counts(live)
    assert ask(live, target.prompts[:2], allowed=False, max_tokens=9) == [
        text[:len(prompt) + 9] for prompt, text in zip(target.prompts[:2], target.texts)]
    assert ask(live, target.prompts[:1], allowed=None, max_tokens=9)  # what the pool asks of itself

    async def http(**headers):
        transport = httpx.ASGITransport(live.replica.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            answer = await client.post("/v1/completions", headers=headers, json={
                "model": "tiny", "prompt": target.prompts[1], "max_tokens": 8, "temperature": 0})
            assert answer.status_code == 200, answer.text

    live.run(http(Authorization="Bearer quiet"))
    live.run(http(Authorization="Bearer hush", **{"X-Torchspec-Lite-Capture": "no"}))
    after = counts(live)
    assert after["sampled"] == before["sampled"] and after["excluded"] == before["excluded"] + 4
    live.run(http(Authorization="Bearer hush"))
    (sample,) = take(receiver, 1)
    prompt = target.prompts[1]
    check(target, sample, target.texts[1][:len(prompt) + 8], len(prompt))
    assert counts(live)["requests"] == before["requests"] + 5


@pytest.mark.parametrize("receiver", [{"fingerprint": "other@0"}], indirect=True)
def test_another_targets_states_are_refused_by_name(live, receiver, target):
    ask(live, target.prompts[:1], max_tokens=11)
    with pytest.raises(TimeoutError):
        receiver.get(2.0)
    assert counts(live)["refused"] == ["mismatch"]


@pytest.mark.parametrize("receiver", [{"budget": 1 << 20}], indirect=True)
def test_a_trainer_that_takes_nothing_slows_no_one(live, receiver, target):
    before, sent = counts(live), 0
    settings = live.replica.capture_settings
    live.rpc("capture_on", vars(settings) | {"budget_bytes": 1 << 20}, [(receiver.endpoint, None)])
    limits = iter(range(2, 32))
    for limit in limits:  # about 40 kB each; the receiver holds 1 MB, the engine another
        for prompt, text in zip(target.prompts, target.texts):
            assert ask(live, [prompt], max_tokens=limit)[0] == text[:len(prompt) + limit]
        sent = counts(live)["left_out"].get("trainers_behind", 0) - before["left_out"].get("trainers_behind", 0)
        if sent:
            break
    assert sent > 0
