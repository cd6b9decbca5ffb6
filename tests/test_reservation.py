"""Places of a run's actors on real Ray nodes (GPUs are only counted, not touched)."""

import time

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table, remove_placement_group

from cluster import reservation
from cluster.nodes import ray_nodes
from cluster.reservation import reserve
from torchspec_lite import config as configs
from torchspec_lite.errors import UserError


@pytest.fixture(scope="module")
def nodes():
    """Two nodes of 8 GPUs, one labelled role=train; their ids by label."""
    common = {"num_cpus": 16, "num_gpus": 8, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=common)
    try:
        cluster.add_node(**common | {"labels": {"role": "train"}})
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield {node["Labels"].get("role"): node["NodeID"] for node in ray.nodes()}
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def places():
    """Hold a config's places until the test ends; the node of each: target workers first, then trainers."""
    groups = []

    def hold(**sections):
        config = configs.build({"target": {"model": "x", "tensor_parallel_size": sections.pop("tp", 1)},
                                "data": {"train": ["x"]}} | sections, "test")
        groups.append(reserve(config).group)
        found = placement_group_table(groups[-1])["bundles_to_node_id"]
        return [found[place] for place in sorted(found)]

    yield hold
    for group in groups:
        remove_placement_group(group)
    deadline = time.monotonic() + 60
    while ray.available_resources().get("GPU") != 16:  # Ray gives them back in its own time, and only tells when asked
        assert time.monotonic() < deadline, f"places were not given back: {ray.available_resources()}"
        time.sleep(0.05)


def test_trainers_of_one_gpu_leave_a_whole_node_to_an_engine(nodes, places):
    engine, *trainers = places(tp=8, capture={"gpus": 8}, trainer={"ranks": 8, "gpus": 1})
    assert len(trainers) == 8 and len(set(trainers)) == 1 and trainers[0] != engine


def test_labels_choose_the_node_and_shares_of_a_gpu_are_shares(nodes, places):
    assert places(capture={"workers": 2, "gpus": 0.5}, trainer={"gpus": 0.25, "node": {"role": "train"}})[2] == nodes["train"]
    assert ray.available_resources()["GPU"] == pytest.approx(16 - 1.25)
    assert {node.labels.get("role"): node.gpus for node in ray_nodes(ray.nodes())} == {None: 8, "train": 8}


def test_what_others_hold_is_told(nodes, places, monkeypatch):
    places(capture={"gpus": 8}, trainer={"gpus": 0.5})
    monkeypatch.setattr(reservation, "WAIT_S", 1.0)
    with pytest.raises(UserError, match="no room for the run's 1 target workers and 8 trainers .* 7.5 GPUs are free"):
        reserve(configs.build({"target": {"model": "x"}, "data": {"train": ["x"]}, "trainer": {"ranks": 8, "gpus": 1}}, "test"))
