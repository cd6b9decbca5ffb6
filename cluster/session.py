"""The Ray session of a run: join the cluster that is there, or start one on this machine; end what was started."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import ray._private.worker as ray_worker

from cluster.nodes import check_fit, ray_nodes
from cluster.placement import Plan
from torchspec_lite.config import RayConfig
from torchspec_lite.errors import UserError

log = logging.getLogger(__name__)
NAMESPACE = "torchspec-lite"
SPARE_CPUS = 2
"""Logical CPUs beyond the plan's for a cluster started here: Ray Serve's controller and proxy take fractions."""


@contextmanager
def session(options: RayConfig, plan: Plan) -> Iterator[list[str]]:
    """Be connected to Ray while the block runs; gives what is doubtful about the plan. Raises UserError when the cluster
    cannot be reached or cannot hold the plan."""
    address = address_of(options)
    if address:
        _init(f"join the cluster at {address}", address=address)
    else:
        cpus = options.num_cpus or int(plan.cpus + SPARE_CPUS + 0.999)
        _init("start", address="local", num_cpus=cpus, include_dashboard=False,
              object_store_memory=options.object_store_mib << 20)
    try:
        yield [*plan.doubts, *check_fit(plan, ray_nodes(ray.nodes()))]
    finally:
        ray.shutdown()


@contextmanager
def visit(address: str) -> Iterator[None]:
    """Be connected to a cluster that is there. Raises UserError when it cannot be reached."""
    _init(f"join the cluster at {address}", address=address)
    try:
        yield
    finally:
        ray.shutdown()


def address_of(options: RayConfig) -> str | None:
    """The cluster to join; None: one is to be started on this machine."""
    return options.address or os.environ.get("RAY_ADDRESS")


def _init(what: str, **arguments) -> None:
    quiet_ray()
    try:
        ray.init(namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False,
                 runtime_env={"env_vars": {"PYTHONPATH": _source_path()}}, **arguments)
    except (ConnectionError, RuntimeError, ValueError) as error:
        token = ("; a cluster that `ray start` made may ask for its token: export RAY_AUTH_MODE=token"
                 if "address" in arguments and arguments["address"] != "local" and "RAY_AUTH_MODE" not in os.environ else "")
        raise UserError(f"Ray: cannot {what}: {error}{token}") from error


def quiet_ray() -> None:
    """Ray's own remarks (a controller that was told to go has gone) are no part of a run's screen; its log has them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Ray has no switch for these; without the name (another Ray) they are printed as ever.
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda data, **_: log.debug("%s", data.get("lines"))


def _source_path() -> str:
    """Where this program's packages are, first on every worker's path: workers run the driver's own code."""
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
