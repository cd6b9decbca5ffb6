"""The plan: who needs what, and whether nodes have it."""

import json
from dataclasses import replace

import pytest
import torch

from cluster.nodes import Node, check_fit, ray_nodes, this_machine
from cluster.placement import make_plan, render
from tests.tiny import make_tiny_target
from torchspec_lite import config as configs
from torchspec_lite.errors import UserError
from torchspec_lite.target import describe

GIB = 2**30


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return describe(make_tiny_target(tmp_path_factory.mktemp("target")))


def config(**sections):
    return configs.build({"target": {"model": "x", "tensor_parallel_size": sections.pop("tp", 1)}, "data": {"train": ["x"]}} | sections,
                         "test")


def big(*gpus, **labels):
    return [Node(f"n{place}", 64, count, 500 * GIB, labels) for place, count in enumerate(gpus)]


def test_what_the_stream_asks_is_worked_out_for_each_role(info):
    asked = config(capture={"workers": 3, "tokens_per_s": 10_000}, trainer={"ranks": 2}, serve={"replicas": 1})
    plan = make_plan(asked, info)
    assert plan.bytes_per_token == 4 * 64 * 2 + 5  # 4 states of 64 channels in bf16, token id (4) and mask (1)
    target, trainer, replica = plan.roles
    assert (target.stream, trainer.stream, replica.stream) == (5.17e6, 7.755e6, 0.0)
    assert plan.doubts == () and "0.005 GB/s" in render(plan)
    json.dumps(plan.values())


@pytest.mark.parametrize("stream, rate, words", [
    ({"host": "eth0", "link_gbit": 10}, 4e5, []),  # 3 × 0.207 GB/s: under 1.25 of the link and 0.65 of encryption
    ({"host": "eth0", "link_gbit": 10}, 7e5, ["one trainer streams 1.09 GB/s", "stream.encrypt=off"]),
    ({"host": "eth0", "link_gbit": 10}, 2e6, ["one trainer streams 3.10 GB/s", "target worker: 3.10 GB/s",
                                             "trainer: 3.10 GB/s of stream", "10 Gbit/s carries 1.25",
                                             "at most 2,417,795 tokens/s", "stream.encrypt=off"]),
    ({"host": "eth0", "link_gbit": 10, "encrypt": "off"}, 2e6, ["trainer: 3.10 GB/s"]),
    ({"link_gbit": 10}, 2e6, []),  # loopback
])
def test_a_network_that_is_too_thin_is_told(info, stream, rate, words):
    plan = make_plan(config(capture={"workers": 3, "tokens_per_s": rate}, stream=stream), info)
    doubts = "\n".join(plan.doubts)
    assert all(word in doubts for word in words), doubts
    assert bool(doubts) == bool(words) and ("encrypt" in doubts) == ("stream.encrypt=off" in words)
    assert all(f"WARNING         {doubt}" in render(plan) for doubt in plan.doubts)


def test_shares_of_gpus_pass_and_odd_numbers_do_not(info):
    plan = make_plan(config(capture={"gpus": 1}, trainer={"gpus": 0.5}, serve={"gpus": 0.5}), info)
    assert plan.gpus == 2.0 and check_fit(plan, big(2)) == []
    thirds = replace(plan, roles=tuple(replace(role, gpus=0.6) for role in plan.roles))
    assert "1 × serving replica may find no node" in check_fit(thirds, big(2))[0]  # 1.8 of 2, but on no single GPU
    for role in ("capture", "serve"):
        with pytest.raises(UserError, match=f"{role}.gpus is 1.5; Ray gives a share of one GPU, or whole ones"):
            make_plan(config(**{role: {"gpus": 1.5}}), info)


@pytest.mark.parametrize("trainer, words", [
    ({"gpus": 2}, "trainer.gpus is 2, but a trainer uses one GPU: .* raise trainer.ranks"),
    ({"gpus": 1.5}, "trainer.gpus is 1.5, but a trainer uses one GPU"),
    ({"gpus": 0.5, "ranks": 2}, "trainer.gpus is 0.5 with trainer.ranks=2.*set trainer.gpus=1, or trainer.backend=gloo"),
    ({"gpus": 0.5, "ranks": 2, "backend": "nccl"}, "NCCL refuses"),
    ({"backend": "nccl"}, "trainer.backend is nccl, which needs GPUs, but trainer.gpus is 0"),
    ({"gpus": 0.5, "ranks": 2, "backend": "gloo"}, None), ({"gpus": 1, "ranks": 2}, None), ({"gpus": 0.5}, None),
    ({"ranks": 2}, None), ({"gpus": 1, "ranks": 2, "backend": "nccl"}, None)])
def test_gpus_that_trainers_cannot_use_are_refused(info, trainer, words):
    asked = config(trainer=trainer)
    if words is None:
        assert make_plan(asked, info).gpus == trainer.get("gpus", 0) * trainer.get("ranks", 1)
        return
    with pytest.raises(UserError, match=words):
        make_plan(asked, info)
    assert make_plan(asked, info, only="serving replica").gpus == 0  # who only serves has no trainer


def test_vllm_for_gpus_does_not_run_without(info, monkeypatch):
    on_gpus = {"capture": {"gpus": 1}, "serve": {"gpus": 0.3}}
    make_plan(config(), info)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert make_plan(config(**on_gpus), info).gpus == 1.3
    for role in ("capture", "serve"):
        with pytest.raises(UserError, match=f"^{role}.gpus is 0, but the vLLM here is its GPU build, which cannot run on CPUs: "
                                            rf"set {role}.gpus=1 \(or a share such as 0.3\)$"):
            make_plan(config(**on_gpus | {role: {}}), info)
    with pytest.raises(UserError, match="serve.gpus=2$"):
        make_plan(config(tp=2, capture={"gpus": 2}), info)
    # A role that is not there needs none.
    make_plan(config(capture={"gpus": 1}, serve={"replicas": 0}), info)
    make_plan(config(capture={"gpus": 1}, serve={"external": ["http://127.0.0.1:8000"]}), info)
    make_plan(config(data={}, serve={"gpus": 1}), info)
    assert [role.name for role in make_plan(config(serve={"gpus": 1}), info, only="serving replica").roles] == ["serving replica"]


def test_a_tensor_parallel_engine_needs_its_gpus_on_one_node(info):
    plan = make_plan(config(tp=8, capture={"gpus": 8}, trainer={"ranks": 8, "gpus": 1}, serve={"gpus": 8}), info)
    assert check_fit(plan, big(8, 8, 8)) == []
    with pytest.raises(UserError, match="one target worker needs 8 GPUs on one node, and .* none has more than 4; "
                                        "lower capture.gpus"):
        check_fit(plan, big(4, 4, 4, 4, 4, 4))
    with pytest.raises(UserError, match="needs 24 GPUs but the 2 nodes have 16"):
        check_fit(plan, big(8, 8))
    assert "1 × serving replica" in check_fit(plan, big(10, 7, 7))[0]  # 24, but only one node has 8


def test_labels_are_looked_for(info):
    plan = make_plan(config(capture={"node": {"role": "capture"}}, trainer={"node": {"zone": "b"}}), info)
    nodes = [Node("a", 4, 0, 9 * GIB, {"role": "capture"}), Node("b", 4, 0, 9 * GIB, {"zone": "b", "role": "x"})]
    assert check_fit(plan, nodes) == [] and "role=capture" in render(plan)
    with pytest.raises(UserError, match="trainer.node: no node is labelled zone=b; .*ray start --labels zone=b"):
        check_fit(plan, nodes[:1])
    with pytest.raises(UserError, match=r"capture.node"):
        config(capture={"node": {"role": "not, plain"}})


def test_a_run_on_traffic_alone_needs_no_target_worker(info):
    plan = make_plan(config(data={}, capture={"workers": 2, "gpus": 1}), info)
    assert [role.name for role in plan.roles] == ["trainer", "serving replica"] and plan.gpus == 0


def test_memory_is_counted_where_actors_come_to_lie(info):
    plan = make_plan(config(stream={"budget_mib": 4096}, trainer={"ranks": 2}), info)
    each = {role.name: role.memory for role in plan.roles}
    need = each["target worker"] + 2 * each["trainer"] + each["serving replica"]
    assert need > 9 * GIB
    assert check_fit(plan, [Node("n", 9, 0, need)]) == []
    (doubt,) = check_fit(plan, [Node("n", 9, 0, need - GIB)])
    assert f"want about {need / GIB:.1f} GiB" in doubt and f"has {need / GIB - 1:.1f}" in doubt and "2 × trainer" in doubt


def test_nodes_are_read_from_ray_and_from_this_machine():
    alive = {"NodeManagerAddress": "10.0.0.1", "Alive": True, "Labels": {"role": "x"},
             "Resources": {"CPU": 8.0, "GPU": 2.0, "memory": 7e9, "node:10.0.0.1": 1.0}}
    assert ray_nodes([alive, alive | {"Alive": False}]) == [Node("10.0.0.1", 8.0, 2, 7_000_000_000, {"role": "x"})]
    here = this_machine()
    assert here.cpus > 1e6 and here.memory > GIB // 2
