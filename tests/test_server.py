"""One replica over HTTP, and what needs no engine: counts per version and the pool's doors."""

import asyncio
import json
import socket
from types import SimpleNamespace

import httpx
import pytest

from vllm.utils.import_utils import resolve_obj_by_qualname

from cluster.pool import check_exposure, claim_port, promoted, write_promoted
from tests.serving_rig import ANSWER, LiveReplica, TinyTarget
from torchspec_lite.break_even import WINDOW
from torchspec_lite.config import build
from torchspec_lite.errors import UserError
from workers import scheduler
from workers.draft_stats import DraftCounter
from workers.server import LOW_PRIORITY, Replica, serving_args

KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TinyTarget(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def live(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    versions = [target.export(target.fresh_drafter(seed), folder, seed) for seed in (1, 2)]
    # Six requests and a switch at three: the test's six prompts together are served without drafts.
    config = target.config(max_concurrency_for_speculation=3)
    live = LiveReplica(config, target.path, versions[0], "sesame")
    live.versions = versions
    yield live
    live.close()


def call(live, method, path, headers=KEY, **options):
    async def ask():
        transport = httpx.ASGITransport(app=live.replica.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=60) as client:
            return await client.request(method, path, headers=headers, **options)
    return live.run(ask())


def complete(live, prompts):
    response = call(live, "POST", "/v1/completions", json={
        "model": "tiny", "prompt": prompts, "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True})
    return [prompt + choice["token_ids"] for prompt, choice in
            zip(prompts, sorted(response.json()["choices"], key=lambda choice: choice["index"]), strict=True)]


@pytest.mark.engine
@pytest.mark.timeout(300)
class TestReplica:
    def test_completions_are_the_targets(self, live, target):
        assert complete(live, target.prompts[:1]) == target.texts[:1]

    def test_streamed_chat_says_what_chat_says(self, live):
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}],
                 "max_tokens": 16, "temperature": 0}
        whole = call(live, "POST", "/v1/chat/completions", json=asked).json()
        lines = call(live, "POST", "/v1/chat/completions", json=asked | {"stream": True}).text.splitlines()
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
        assert text == whole["choices"][0]["message"]["content"] != ""
        assert whole["metrics"]["speculative_decoding"]["mean_acceptance_length"] >= 1
        assert lines[-1] == "data: [DONE]" or lines[-2] == "data: [DONE]"

    def test_version_shows_in_models_and_metrics_and_moves_with_a_swap(self, live):
        for version_dir in live.versions[::-1]:
            live.run(live.replica.swap(version_dir))
            version = version_dir[-7:]
            card, = call(live, "GET", "/v1/models").json()["data"]
            assert card["id"] == "tiny"
            assert card["drafter"] == {"version": version, "fingerprint": live.replica.fingerprint}
            metrics = call(live, "GET", "/metrics").text
            assert f'torchspec_lite_serve_drafter{{replica="replica-0",version="{version}"}} 1.0' in metrics
            assert "vllm:num_requests_running" in metrics

    def test_api_key_is_asked_for(self, live):
        assert call(live, "GET", "/v1/models", headers={}).status_code == 401
        assert call(live, "POST", "/v1/completions", headers={"Authorization": "Bearer no"}, json={}).status_code == 401
        assert call(live, "GET", "/health", headers={}).status_code == 200

    def test_above_the_set_concurrency_nothing_is_drafted(self, live, target):
        _, alone = live.acceptance(lambda: complete(live, target.prompts[:1]))
        assert alone > 10
        texts = []
        _, together = live.acceptance(lambda: texts.extend(complete(live, target.prompts)))
        assert texts == target.texts
        # Drafts appear only while three requests or fewer are left.
        assert together < len(target.prompts) * alone / 2
        # But shadow prompts and probes, four of which run at once here, are asked for the sake of their drafts.
        counts, found = [], []
        _, shadow = live.acceptance(lambda: counts.extend(live.run(live.replica.shadow(target.prompts, ANSWER))))
        assert shadow == sum(count["drafts"] for count in counts) and shadow > len(target.prompts) * alone / 2
        found.extend(live.run(live.replica.probe(target.prompts, ANSWER)))
        assert [one["token_ids"] for one in found] == target.texts and all(len(one["rounds"]) > 5 for one in found)

    def test_shadow_counts_the_rounds_of_its_own_requests(self, live, target):
        counts = []
        _, rounds = live.acceptance(lambda: counts.extend(live.run(live.replica.shadow(target.prompts[:2], ANSWER))))
        assert len(counts) == 2
        assert sum(count["drafts"] for count in counts) == rounds > 10
        assert all(count["accepted"] == sum(count["per_position"]) for count in counts)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_auto_drafts_only_where_it_pays_and_always_for_shadow_prompts(target, tmp_path):
    # What the file's other replica is told by a number, this one finds: one request pays, two never do.
    config = target.config(max_concurrency_for_speculation="auto", break_even={1: 1.0, 2: 99.0})
    live = LiveReplica(config, target.path, target.export(target.fresh_drafter(1), tmp_path, 1))
    try:
        texts = []
        _, at_first = live.acceptance(lambda: texts.extend(complete(live, target.prompts)))
        while at_first < WINDOW:
            at_first += live.acceptance(lambda: texts.extend(complete(live, target.prompts)))[1]
        asked = len(texts)
        _, together = live.acceptance(lambda: texts.extend(complete(live, target.prompts)))
        _, alone = live.acceptance(lambda: texts.extend(complete(live, target.prompts[:1])))
        _, shadow = live.acceptance(lambda: live.run(live.replica.shadow(target.prompts, ANSWER)))
        assert texts == target.texts * (asked // 6 + 1) + target.texts[:1]
        assert alone > 10 and shadow > 100 > 2 * together
    finally:
        live.close()


class Engine:
    """Of vLLM's engine what a replica asks: each request runs for some turns of the event loop."""

    def __init__(self):
        self.running, self.most, self.asked = 0, 0, []

    async def collective_rpc(self, method, args=()):
        return [{"ok": True, "value": []}]

    async def generate(self, prompt, params, request_id, priority=0):
        self.asked.append((params, priority))
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(20):  # as many come in beside it as may
            await asyncio.sleep(0)
        self.running -= 1
        token = prompt["prompt_token_ids"][0]
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[token + 1], spec_decode_metrics=None)])


@pytest.mark.parametrize("max_num_seqs, most", [(16, 8), (3, 1), (1, 1)])
def test_what_the_pool_asks_leaves_half_of_the_seats_to_users(max_num_seqs, most):
    engine = Engine()

    async def story():
        replica = Replica(engine, None, DraftCounter("v1", 3), "replica", "x@0", max_num_seqs)
        probed, counts = await asyncio.gather(replica.probe([[token] for token in range(10)], 4),
                                              replica.shadow([[1]] * 24, 4))
        assert [one["token_ids"] for one in probed] == [[token, token + 1] for token in range(10)]
        assert counts == [{"drafts": 0, "accepted": 0, "per_position": []}] * 24
        replica._keys.cleanup()

    asyncio.run(story())
    assert engine.most == most and len(engine.asked) == 34
    # None of it meets a block whose drafter's keys and values another version wrote.
    assert all(params.skip_reading_prefix_cache and priority == LOW_PRIORITY for params, priority in engine.asked)


@pytest.mark.parametrize("serve, traffic, kind", [
    ({"max_concurrency_for_speculation": 3}, {}, "LimitedScheduler"),
    ({"max_concurrency_for_speculation": 3, "gpus": 1}, {"second_answers": 1}, "AsyncLimitedScheduler"),
    ({"max_concurrency_for_speculation": 8}, {}, None), ({"max_concurrency_for_speculation": 9}, {"second_answers": 1}, "CountingScheduler"),
    ({"max_concurrency_for_speculation": "auto", "break_even": {1: 1.0}}, {}, "ServingScheduler"), ({}, {}, None)])
def test_a_limit_on_drafting_comes_with_the_scheduler_that_lifts_it_for_probes(serve, traffic, kind):
    config = build({"target": {"model": "x"}, "serve": {"max_num_seqs": 8} | serve, "traffic": traffic}, "test")
    name = serving_args(config, "x", "v000001").get("scheduler_cls")
    assert (name and resolve_obj_by_qualname(name)) is (kind and getattr(scheduler, kind))


def rounds(drafts, accepted_per_position):
    spec = SimpleNamespace(num_drafts=drafts, num_draft_tokens=3 * drafts,
                           num_accepted_tokens=sum(accepted_per_position),
                           num_accepted_tokens_per_pos=accepted_per_position)
    return (SimpleNamespace(num_running_reqs=drafts, num_waiting_reqs=0, spec_decoding_stats=spec),
            SimpleNamespace(num_generation_tokens=drafts + sum(accepted_per_position), finished_requests=["one"]))


def test_rounds_are_counted_for_the_version_that_drafted_them():
    counter = DraftCounter("v1", positions=3)
    counter.record(*rounds(4, [3, 2, 1]))
    counter.begin_swap()
    counter.record(*rounds(5, [5, 5, 5]))
    counter.end_swap("v2")
    counter.record(*rounds(1, [1, 1, 1]))
    counter.record(None, None)
    counter.record(*rounds(1, [1, 1, 1]))
    counter.record(*rounds(2, [2, 0, 0]))
    seen = counter.snapshot()
    assert seen["versions"] == [
        {"version": "v1", "drafts": 4, "drafted": 12, "accepted": 6, "per_position": [3, 2, 1]},
        {"version": "v2", "drafts": 2, "drafted": 6, "accepted": 2, "per_position": [2, 0, 0]}]
    assert seen["unattributed"] == 7
    assert seen["version"] == "v2"
    assert seen["generated"] == 10 + 20 + 4 + 4 + 4
    assert seen["requests"] == 5
    assert counter.versions["v1"].acceptance_length == 2.5


def test_rounds_after_a_failed_swap_stay_with_the_old_version():
    counter = DraftCounter("v1", positions=1)
    counter.begin_swap()
    counter.end_swap("v1")
    for _ in range(3):
        counter.record(*rounds(1, [1]))
    assert [(stats["version"], stats["drafts"]) for stats in counter.snapshot()["versions"]] == [("v1", 1)]


def test_port_in_use_is_one_clear_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"serve.port {port}: cannot listen on 127.0.0.1:{port}.*set serve.port"):
            claim_port("127.0.0.1", port)
    assert claim_port("127.0.0.1", 0) > 0


def test_an_open_address_needs_a_key():
    check_exposure("127.0.0.1", None)
    check_exposure("0.0.0.0", "sesame")
    with pytest.raises(UserError, match="serve.api_key"):
        check_exposure("0.0.0.0", None)


def test_promoted_version_is_read_back(tmp_path):
    write_promoted(str(tmp_path / "run"), str(tmp_path / "v000001"))
    write_promoted(str(tmp_path / "run"), str(tmp_path / "v000002"))
    assert promoted(str(tmp_path / "run")) == str(tmp_path / "v000002")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["promoted.json"]
