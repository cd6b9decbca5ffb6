"""What a run would start and whether it fits, without starting it: `train --dry-run`."""

from dataclasses import replace

import ray

from cluster.nodes import Node, check_fit, ray_nodes, this_machine
from cluster.placement import make_plan, render
from cluster.session import address_of, visit
from torchspec_lite.config import Config, RayConfig
from torchspec_lite.errors import UserError
from torchspec_lite.sample_order import read_order
from torchspec_lite.starting_point import settled
from torchspec_lite.target import describe
from torchspec_lite.target_folder import cache_dir, resolve_target


def dry_run(config: Config) -> tuple[dict, str]:
    """The plan as values and as text, doubts included; nothing is written but the target's cache.

    Raises UserError for conversation files that are missing or wrong.
    """
    info = describe(resolve_target(config.target.model, config.target.trust_remote_code))
    plan = make_plan(settled(config, info), info)
    read_order(config, cache_dir())
    try:
        doubts = check_fit(plan, nodes_for(config.ray))
    except UserError as error:
        doubts = [str(error)]
    plan = replace(plan, doubts=(*plan.doubts, *doubts))
    return plan.values(), render(plan)


def nodes_for(options: RayConfig) -> list[Node]:
    """The nodes that a run would have: the cluster's that it would join, else this machine.

    Raises UserError when the cluster cannot be reached.
    """
    address = address_of(options)
    if address is None:
        return [this_machine()]
    with visit(address):
        return ray_nodes(ray.nodes())
