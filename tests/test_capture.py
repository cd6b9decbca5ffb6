"""The capture engine end to end: vLLM with our connector, real streams, states against a Hugging Face forward."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_target
from torchspec_lite.config import build
from torchspec_lite.lease import Lease
from torchspec_lite.sample import Sample
from torchspec_lite.stream import Expectation, Receiver
from torchspec_lite.target import describe
from workers.engine import engine_env
from workers.ticket import Ticket, sampling

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LAYER_IDS = (0, 2, 3)
WAIT_S = 60.0
WORDS = "water bread map knife coat river forest town sky light train station add return number list".split()


def words(count: int, start: int) -> str:
    return " ".join(WORDS[(start + 7 * place + place * place) % len(WORDS)] for place in range(count))


def conversations() -> list[dict]:
    """Prompts from a few to some hundred tokens, one of them twice, one with its answer, two that cannot be used."""
    user = {f"p{place}": words(count, place) for place, count in enumerate((1, 3, 120, 17, 60))}
    user["p5"] = user["p2"]
    records = [{"id": id, "messages": [{"role": "user", "content": text}]} for id, text in user.items()]
    records.append({"id": "answered", "messages": [
        {"role": "user", "content": words(9, 1)}, {"role": "assistant", "content": words(30, 2)},
        {"role": "user", "content": words(5, 3)}, {"role": "assistant", "content": words(40, 4)}]})
    records.append({"id": "empty", "messages": []})
    records.append({"id": "long", "messages": [{"role": "user", "content": words(900, 5)}]})
    return records


class Desk:
    """A coordinator for tests: hands out leases for given ids, and notes what it is told."""

    def __init__(self, ids: list[str], attempt: int):
        self._leases = [Lease(id, ordinal, attempt, "train", 0) for ordinal, id in enumerate(ids)]
        self.captured_tokens, self.rejections, self.failures = {}, {}, {}

    async def lease(self, worker: str, n: int) -> list[Lease] | None:
        taken, self._leases = self._leases[:n], self._leases[n:]
        return taken or None

    async def captured(self, id: str, attempt: int, tokens: int) -> None:
        self.captured_tokens[id] = tokens

    async def rejected(self, id: str, attempt: int, reason: str, detail: str) -> None:
        self.rejections[id] = reason

    async def failed(self, id: str, attempt: int, detail: str) -> None:
        self.failures[id] = detail


class Bench:
    """One engine and one receiver for all tests of this file, on an event loop of their own."""

    def __init__(self, folder):
        from workers.target import ReceiverAddress, TargetWorker
        make_tiny_target(folder / "target", layers=4, hidden=128)
        data = folder / "conversations.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in conversations()))
        self.info = describe(folder / "target")
        self.config = build({
            "target": {"model": str(folder / "target"), "dtype": "float32", "max_model_len": 1024},
            "data": {"max_length": 640, "max_answer_tokens": 24},
            "capture": {"layer_ids": list(LAYER_IDS), "max_num_seqs": 8, "max_num_batched_tokens": 48,
                        "kv_cache_mib": 16},
            "stream": {"wait_s": 20.0, "heartbeat_s": 1.0},
        }, "test")
        self.expect = Expectation(self.info.fingerprint, LAYER_IDS, torch.float32, 128, 1024)
        self.receiver = Receiver("127.0.0.1", 64 << 20, 64, self.expect)
        self.loop = asyncio.new_event_loop()
        self.worker = TargetWorker("target-0", self.config, self.info, [data],
                                   [ReceiverAddress(self.receiver.endpoint)])
        self.attempt = 0
        self.wait(self.worker.start())

    def wait(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, WAIT_S * 3))

    def run(self, *ids: str) -> tuple[Desk, dict[str, Sample]]:
        """Capture conversations in one go; what the desk was told, and the samples by id."""
        self.attempt += 1
        desk = Desk(list(ids), self.attempt)
        self.wait(self.worker.run(desk))
        samples = {}
        for _ in desk.captured_tokens:
            sample = self.receiver.get(WAIT_S)
            assert sample.attempt == self.attempt and sample.id not in samples
            samples[sample.id] = sample.clone()
            self.receiver.release(sample)
        return desk, samples

    def close(self) -> None:
        self.wait(self.worker.close())
        self.receiver.close()
        self.loop.close()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with environment(engine_env(cpus=1, gpus=0)):
        bench = Bench(tmp_path_factory.mktemp("capture"))
        yield bench
        bench.close()


@pytest.fixture(scope="module")
def plain(bench):
    """Token ids [n] → Hugging Face states entering layers 0 … 3 and the one before the final norm, [n, 5, H]."""
    model = AutoModelForCausalLM.from_pretrained(bench.info.path, dtype=torch.float32).eval()
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0][0]))

    @torch.no_grad()
    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        before_norm.clear()
        states = model(token_ids[None].long(), output_hidden_states=True).hidden_states
        return torch.stack([*(layer[0] for layer in states[:-1]), before_norm[0]], 1)

    return forward


def assert_states(sample: Sample, plain) -> None:
    n = sample.token_ids.shape[0]
    assert sample.aux.shape == (n - 1, 3, 128) and sample.last.shape == (n - 1, 128)
    reference = plain(sample.token_ids)[:-1]
    for states, layer in ((sample.aux, reference[:, LAYER_IDS]), (sample.last, reference[:, 4])):
        error = (states - layer).norm(dim=-1) / layer.norm(dim=-1)
        assert error.max() < 1e-4, error.max()


def test_generate_streams_the_states_of_a_batch_of_many_lengths(bench, plain):
    desk, samples = bench.run("p0", "p1", "p2", "p3", "p4", "p5")
    assert set(samples) == set(desk.captured_tokens) == {f"p{place}" for place in range(6)}
    for sample in samples.values():
        assert_states(sample, plain)
        assert desk.captured_tokens[sample.id] == sample.tokens
        answer = int(sample.mask.sum())
        # All and only what the target wrote is supervised; it stops at its end-of-turn token or at the limit.
        assert sample.mask[-answer:].all() and 2 <= answer <= 24
        assert answer == 24 or sample.token_ids[-1] == 2
    # More tokens than a step and a block hold: prefill went in chunks, states lie in several blocks.
    assert samples["p2"].tokens > 200
    assert torch.equal(samples["p2"].token_ids, samples["p5"].token_ids)


def test_written_tokens_are_the_greedy_ones(bench, plain):
    _, samples = bench.run("p3")
    sample, = samples.values()
    answer = int(sample.mask.sum())
    model = AutoModelForCausalLM.from_pretrained(bench.info.path, dtype=torch.float32).eval()
    with torch.no_grad():
        greedy = model(sample.token_ids[None].long()).logits[0].argmax(-1)
    assert torch.equal(greedy[-answer - 1:-1], sample.token_ids[-answer:].long())


def test_replay_streams_the_given_answer(bench, plain):
    bench.config.data.mode = "replay"
    try:
        desk, samples = bench.run("answered", "p1", "empty")
    finally:
        bench.config.data.mode = "generate"
    sample, = samples.values()
    assert desk.rejections == {"p1": "no_answer", "empty": "no_messages"}
    assert_states(sample, plain)
    supervised = bench.worker.tokenizer.decode(sample.token_ids[sample.mask.bool()])
    assert supervised == f"{words(30, 2)}<|im_end|>{words(40, 4)}<|im_end|>"
    text = bench.worker.tokenizer.decode(sample.token_ids)
    assert text.rstrip("\n").endswith(f"{words(40, 4)}<|im_end|>")


def test_a_bad_conversation_is_rejected_and_the_rest_goes_on(bench):
    desk, samples = bench.run("empty", "long", "p1")
    assert desk.rejections == {"empty": "no_messages", "long": "too_long"}
    assert set(samples) == {"p1"}


def test_a_preempted_request_is_captured_whole(bench, plain):
    before = bench.worker.stats()["preemptions"]

    async def answer_at_length():
        # The cache holds some 4,000 tokens, these requests grow to 4,900.
        tasks = []
        for place in range(8):
            ticket = Ticket(f"grown{place}", 1, place, "train", bench.receiver.endpoint, None)
            params = sampling(ticket, 510, 0.0, None)
            params.ignore_eos = True
            tasks.append(bench.worker.capture(list(range(3 + place, 103 + place)), params, ticket))
        return await asyncio.gather(*tasks)

    results = bench.wait(answer_at_length())
    assert bench.worker.stats()["preemptions"] > before
    samples = [bench.receiver.get(WAIT_S) for _ in results]
    assert sorted(sample.id for sample in samples) == [f"grown{place}" for place in range(8)]
    for sample in samples:
        assert sample.token_ids[100:].tolist() == results[sample.ordinal][0]
        assert_states(sample, plain)
        bench.receiver.release(sample)


def test_an_aborted_request_sends_nothing_and_frees_its_blocks(bench, plain):
    prompt = list(range(3, 300))

    async def start_and_abort():
        ticket = Ticket("aborted", 1, 0, "train", bench.receiver.endpoint, None)
        task = asyncio.ensure_future(bench.worker.capture(prompt, sampling(ticket, 600, 0.0, None), ticket))
        while bench.worker.stats()["kv_cache_usage"] == 0:
            assert not task.done()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    bench.run("p0")
    bench.wait(start_and_abort())
    desk, samples = bench.run("p3")
    assert set(samples) == {"p3"}
    assert_states(samples["p3"], plain)
    assert bench.worker.stats()["kv_cache_usage"] == 0


def test_a_receiver_without_credit_holds_the_engine_back_and_nothing_is_lost(bench):
    from workers.target import ReceiverAddress
    slow = Receiver("127.0.0.1", 3 << 20, 1, bench.expect)
    arrived = []

    def consume():
        for _ in range(5):
            sample = slow.get(WAIT_S)
            arrived.append(sample.id)
            slow.release(sample)

    async def run(desk):
        await asyncio.gather(bench.worker.run(desk), asyncio.to_thread(consume))

    bench.wait(bench.worker.set_receiver(0, ReceiverAddress(slow.endpoint)))
    try:
        ids = ["p0", "p1", "p2", "p3", "p4"]
        desk = Desk(ids, 1000)
        bench.wait(run(desk))
        assert sorted(arrived) == ids == sorted(desk.captured_tokens)
    finally:
        bench.wait(bench.worker.set_receiver(0, ReceiverAddress(bench.receiver.endpoint)))
        slow.close()


def test_a_receiver_that_is_gone_fails_the_sample_but_not_the_engine(bench):
    from workers.target import ReceiverAddress
    gone = Receiver("127.0.0.1", 1 << 20, 1, bench.expect)
    gone.close()
    bench.wait(bench.worker.set_receiver(0, ReceiverAddress(gone.endpoint)))
    desk = Desk(["p1"], 2000)

    async def give_up_once_held():
        run = asyncio.ensure_future(bench.worker.run(desk))
        while not await bench.worker.sender_stats():
            assert not run.done()
        await bench.worker.set_receiver(0, ReceiverAddress(bench.receiver.endpoint))
        await run

    bench.wait(give_up_once_held())
    assert list(desk.failures) == ["p1"] and "closed" in desk.failures["p1"]
    assert set(bench.run("p1")[1]) == {"p1"}


def test_sampled_answers_repeat_with_the_lease(bench):
    # Short prompts: this engine chunks prefills, which `engine_args` forbids where seeds are used.
    bench.config.data.temperature = 1.0
    try:
        first, second = bench.run("p1")[1]["p1"], bench.run("p1")[1]["p1"]
    finally:
        bench.config.data.temperature = 0.0
    greedy = bench.run("p1")[1]["p1"]
    assert torch.equal(first.token_ids, second.token_ids)
    assert not torch.equal(first.token_ids, greedy.token_ids)


def test_the_probe_names_a_wrong_layer(bench, plain):
    from dataclasses import replace

    from workers.probe import ProbeError, check_states
    sample = bench.run("p3")[1]["p3"]
    prompt = sample.tokens - int(sample.mask.sum())
    report = check_states(sample, prompt, bench.info, "float32")
    assert max(report.errors.values()) < 1e-4 and report.head_agreement == 1.0
    assert bench.worker.probe.head_agreement == 1.0
    shifted = replace(sample, layer_ids=(0, 1, 3))
    with pytest.raises(ProbeError, match=r"layer id 1 are off .* nearest is layer id 2, "):
        check_states(shifted, prompt, bench.info, "float32")
    normed = replace(sample, last=torch.nn.functional.rms_norm(sample.last, (128,)))
    with pytest.raises(ProbeError, match="layer id 4 are off"):
        check_states(normed, prompt, bench.info, "float32")
    rolled = replace(sample, last=sample.last.roll(1, 0), aux=sample.aux.roll(1, 0))
    with pytest.raises(ProbeError, match="layer id 0 are off"):
        check_states(rolled, prompt, bench.info, "float32")
