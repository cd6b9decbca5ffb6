"""The places of a run's actors, held together from the start: as few nodes as will do, the largest actors first.

Without it Ray spreads actors over half-full nodes, and trainers of one GPU each may leave no node whole for an engine
of eight.
"""

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.placement import target_workers
from torchspec_lite.config import Config
from torchspec_lite.errors import UserError

WAIT_S = 60.0


class Reservation:
    """A place for each target worker and trainer; it ends with the driver. Replicas are placed by Ray Serve, in what is
    left."""

    def __init__(self, config: Config, group: PlacementGroup):
        self.config, self.group = config, group

    def target(self, number: int) -> dict:
        """Actor options of a target worker's place."""
        return self._place(self.config.capture, number)

    def trainer(self, rank: int) -> dict:
        """Actor options of a trainer's place."""
        return self._place(self.config.trainer, target_workers(self.config) + rank)

    def _place(self, section, index: int) -> dict:
        return {"num_cpus": section.cpus, "num_gpus": section.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, index)}


def reserve(config: Config) -> Reservation:
    """Hold the places of all target workers and trainers. Raises UserError when they do not become free in a minute.

    A bundle is on one node, and so are the GPUs of a tensor-parallel engine.
    """
    sections = [config.capture] * target_workers(config) + [config.trainer] * config.trainer.ranks
    group = placement_group([_bundle(section) for section in sections], strategy="PACK",
                            bundle_label_selector=[section.node for section in sections])
    if not group.wait(WAIT_S):
        free = ray.available_resources()
        raise UserError(f"no room for the run's {target_workers(config)} target workers and {config.trainer.ranks} trainers "
                        f"after {WAIT_S:.0f} s: {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free in the "
                        "whole cluster, but other jobs hold what these need; end those, or lower cpus, gpus and counts")
    return Reservation(config, group)


def beside_driver() -> NodeAffinitySchedulingStrategy:
    """This node: the ledger's readers (page, status) share memory with its writer, so they are on one machine."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _bundle(section) -> dict[str, float]:
    return {"CPU": section.cpus} | ({"GPU": section.gpus} if section.gpus else {})
