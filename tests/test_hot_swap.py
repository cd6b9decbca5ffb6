"""The swap in a live engine: the drafter changes, the outputs never do, and a bad version changes nothing at all."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.serving_rig import ANSWER, LiveReplica, TinyTarget, rewrite, sign
from workers.refusal import SwapRefused

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TinyTarget(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def fresh(target):
    return target.fresh_drafter(0)


@pytest.fixture(scope="module")
def taught(target):
    return target.teach(target.fresh_drafter(1))


@pytest.fixture(scope="module")
def versions(target, fresh, taught, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    return {"fresh": target.export(fresh, folder, 1), "taught": target.export(taught, folder, 2)}


@pytest.fixture(scope="module")
def live(target, versions):
    from workers import server
    server.EXTENSION, usual = "tests.breaking.BreakingExtension", server.EXTENSION
    live = LiveReplica(target.config(), target.path, versions["fresh"])
    server.EXTENSION = usual
    yield live
    live.close()


@pytest.fixture
def on_fresh(live, versions):
    live.run(live.replica.swap(versions["fresh"]))
    return live


def answers(live, prompts, swap_to=()):
    """Answers to prompts sent together; each version in `swap_to` is swapped in once some of their tokens are out."""
    from vllm import SamplingParams

    async def work():
        started = asyncio.Event()

        async def answer(number, prompt):
            async for output in live.replica.engine.generate(
                    {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=ANSWER),
                    f"{number}-{len(swap_to)}-{id(started)}"):
                started.set()
            return prompt + list(output.outputs[0].token_ids)

        tasks = [asyncio.create_task(answer(*numbered)) for numbered in enumerate(prompts)]
        for version in swap_to:
            await started.wait()
            await live.replica.swap(version)
            started.clear()
        return await asyncio.gather(*tasks)

    return live.run(work())


def probed(live, target):
    return live.run(live.replica.probe(target.prompts, ANSWER))


def compare(target, drafter, found):
    equal = total = 0
    for probe in found:
        expected = target.drafts(drafter, probe["token_ids"])
        for known, drafted in probe["rounds"]:
            equal += expected[known - 2].tolist() == drafted
            total += 1
    return equal, total


def test_engine_drafts_what_the_trainer_drafts(on_fresh, target, fresh, taught, versions):
    equal, total = compare(target, fresh, probed(on_fresh, target))
    assert equal == total > 100
    on_fresh.run(on_fresh.replica.swap(versions["taught"]))
    equal, total = compare(target, taught, probed(on_fresh, target))
    assert equal == total > 40


def test_swap_changes_acceptance_and_no_output(on_fresh, target, versions):
    before, rounds = on_fresh.acceptance(lambda: probed(on_fresh, target))
    assert rounds > 100 and before < 1.2
    on_fresh.run(on_fresh.replica.swap(versions["taught"]))
    after, _ = on_fresh.acceptance(lambda: probed(on_fresh, target))
    assert after > 2
    assert [probe["token_ids"] for probe in probed(on_fresh, target)] == target.texts


def test_requests_in_flight_go_on_through_swaps(on_fresh, target, versions):
    prompts, texts = target.prompts * 3, target.texts * 3
    assert answers(on_fresh, prompts, [versions["taught"], versions["fresh"], versions["taught"]]) == texts
    assert on_fresh.replica.counter.version == "v000002"


def test_a_swap_back_is_bit_for_bit_the_old_drafter(on_fresh, target, versions):
    first, fingerprint = probed(on_fresh, target), on_fresh.replica.fingerprint
    on_fresh.run(on_fresh.replica.swap(versions["taught"]))
    assert on_fresh.replica.fingerprint != fingerprint
    on_fresh.run(on_fresh.replica.swap(versions["fresh"]))
    assert on_fresh.replica.fingerprint == fingerprint
    assert probed(on_fresh, target) == first


def spoil_nan(folder):
    rewrite(folder, lambda tensors: tensors["norm.weight"][3:4].fill_(float("nan")))


def spoil_truncated(folder):
    file = Path(folder, "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def spoil_truncated_and_signed(folder):
    spoil_truncated(folder)
    sign(Path(folder))


def spoil_shape(folder):
    rewrite(folder, lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 191)}))


def spoil_missing(folder):
    rewrite(folder, lambda tensors: tensors.pop("midlayer.mlp.down_proj.weight"))


def spoil_vocabulary_map(folder):
    rewrite(folder, lambda tensors: tensors["d2t"].add_(300))


def spoil_flag(folder):
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_output": False}))
    sign(Path(folder))


def spoil_target(folder):
    file = Path(folder, "manifest.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target": "other@0123456789abcdef"}))


def spoil_manifest(folder):
    Path(folder, "manifest.json").unlink()


@pytest.mark.parametrize("spoil, reason", [
    (spoil_nan, "norm"), (spoil_truncated, "SHA-256"), (spoil_truncated_and_signed, "safetensors"),
    (spoil_shape, "fc.weight"), (spoil_missing, "down_proj"), (spoil_vocabulary_map, "d2t"),
    (spoil_flag, "norm_output"), (spoil_target, "other@"), (spoil_manifest, "manifest"),
])
def test_a_bad_version_is_refused_and_nothing_changes(on_fresh, target, fresh, versions, tmp_path, spoil, reason):
    bad = shutil.copytree(versions["taught"], tmp_path / "v000009")
    spoil(bad)
    fingerprint = on_fresh.replica.fingerprint
    with pytest.raises(SwapRefused, match=f"check: .*{reason}"):
        on_fresh.run(on_fresh.replica.swap(str(bad)))
    assert on_fresh.replica.counter.version == "v000001"
    assert on_fresh.replica.fingerprint == fingerprint
    equal, total = compare(target, fresh, probed(on_fresh, target))
    assert equal == total > 100


@pytest.mark.parametrize("how, reason", [("raise", "no memory for the eighth tensor"), ("stale", "down_proj")])
def test_a_load_that_breaks_puts_the_old_weights_back(on_fresh, target, fresh, versions, how, reason):
    on_fresh.rpc("break_next_load", how)
    with pytest.raises(SwapRefused, match=f"load: .*{reason}"):
        on_fresh.run(on_fresh.replica.swap(versions["taught"]))
    equal, total = compare(target, fresh, probed(on_fresh, target))
    assert equal == total > 100
    assert [probe["token_ids"] for probe in probed(on_fresh, target)] == target.texts
    on_fresh.run(on_fresh.replica.swap(versions["taught"]))
    assert on_fresh.acceptance(lambda: probed(on_fresh, target))[0] > 2


def test_drafting_can_be_switched_off(on_fresh, target, versions):
    assert on_fresh.run(on_fresh.replica.set_drafting(False))
    drafts = on_fresh.replica.stats()["versions"]
    assert answers(on_fresh, target.prompts) == target.texts
    assert on_fresh.replica.stats()["versions"] == drafts
    assert on_fresh.run(on_fresh.replica.set_drafting(True))
    assert on_fresh.acceptance(lambda: probed(on_fresh, target))[1] > 100


def test_two_ranks_swap_together_or_not_at_all(target, fresh, taught, versions, tmp_path, monkeypatch):
    """Tensor parallelism: each rank reads its own shards back; one broken version leaves both ranks as they were."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    config = target.config()
    config.target.tensor_parallel_size = 2
    live = LiveReplica(config, target.path, versions["fresh"])
    try:
        first, second = live.replica.fingerprint.split(",")
        assert first != second
        for version, drafter in (("taught", taught), ("fresh", fresh)):
            live.run(live.replica.swap(versions[version]))
            found = probed(live, target)
            assert [probe["token_ids"] for probe in found] == target.texts
            equal, total = compare(target, drafter, found)
            assert equal == total > 40
        assert live.replica.fingerprint == f"{first},{second}"
        bad = shutil.copytree(versions["taught"], tmp_path / "v000009")
        spoil_nan(bad)
        with pytest.raises(SwapRefused, match="rank 0: .*rank 1: "):
            live.run(live.replica.swap(str(bad)))
        assert compare(target, fresh, probed(live, target))[0] > 100
    finally:
        live.close()


def test_a_head_equal_to_the_targets_is_never_shared_with_it(target, tmp_path):
    """EAGLE 3, whole vocabulary, started with the target's head: the next version must not write into the target."""
    flags = {"fc_norm": False, "norm_output": False, "draft_vocab_size": target.info.vocab_size}
    twin = target.fresh_drafter(2, **flags)
    twin.lm_head.data.copy_(target.head.lm_head)
    other = target.fresh_drafter(3, **flags)
    other.lm_head.data.mul_(-3)
    start, following = target.export(twin, tmp_path, 1), target.export(other, tmp_path, 2)
    live = LiveReplica(target.config(), target.path, start)
    try:
        for drafter in (twin, other):
            found = probed(live, target)
            assert [probe["token_ids"] for probe in found] == target.texts
            equal, total = compare(target, drafter, found)
            assert equal == total > 100
            live.run(live.replica.swap(following))
    finally:
        live.close()
