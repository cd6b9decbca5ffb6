"""The serving pool: N replicas on Ray Serve behind one OpenAI-compatible endpoint, each addressed by its name.

Ray Serve spreads requests over the replicas, restarts one that dies and passes HTTP through to vLLM's own application.
A call to one replica is a broadcast that every other replica answers with nothing (`ReplicaDeployment.on_replica`):
Ray Serve's public interface knows at each moment which replicas live, and no second registry can disagree with it.
"""

import asyncio
import hashlib
import json
import logging
import socket
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster import pool_owner
from cluster.second_try import PROXY_CALLBACK, EndsWithEngine
from cluster.session import address_of
from torchspec_lite.config import Config, resolve_secret
from torchspec_lite.errors import UserError
from torchspec_lite.keys import is_loopback
from workers.engine import engine_env
from workers.refusal import SwapRefused
from workers.target_address import ReceiverAddress

log = logging.getLogger(__name__)
DEPLOYMENT = "Replica"
PROMOTED = "promoted.json"
SWAP_WAIT_S = 300.0
STATS_WAIT_S = 20.0
QUEUED_REQUESTS = 1024
HEALTH_PERIOD_S = 2.0
ROOM_WAIT_S = 900.0
"""Longest wait for the first replicas to be placed: a cluster that grows by itself may fetch a node for them."""
LOAD_WAIT_S = 3600.0
"""Longest wait for the first replicas to answer."""
DRAIN_S = 120.0
"""A replica that Ray Serve takes away, since there are fewer requests, ends those that it has begun for so long."""


class ReplicaGone(Exception):
    """The replica that was asked is not there (any more); Ray Serve starts another with the promoted version."""


@serve.deployment(name=DEPLOYMENT)
@serve.ingress()
class ReplicaDeployment:
    """Ray Serve's side of `workers.server.Replica`; vLLM is imported in the replica's own process only."""

    async def __init__(self, config: Config, target_dir: str, run_dir: str, api_key: str | None, opt_out_key: str | None):
        from workers.server import Replica
        version_dir = promoted(run_dir)
        name = serve.get_replica_context().replica_id.unique_id
        self.replica = await Replica.start(config, target_dir, version_dir, name, api_key, opt_out_key)
        if promoted(run_dir) != version_dir:
            await self.replica.swap(promoted(run_dir))

    def __serve_build_asgi_app__(self):
        app = self.replica.app
        app.middleware_stack = EndsWithEngine(app.middleware_stack or app.build_middleware_stack(), self.replica.engine)
        return app

    async def check_health(self) -> None:
        await self.replica.check_health()

    async def on_replica(self, name: str | None, method: str, args: list) -> dict | None:
        """Run a method of the replica called `name` (None: of each). The others answer None, and so does one whose engine
        died: Ray Serve has only not replaced it yet."""
        from vllm.v1.engine.exceptions import EngineDeadError
        if name not in (None, self.replica.name):
            return None
        try:
            value = getattr(self.replica, method)(*args)
            if asyncio.iscoroutine(value):
                value = await value
        except SwapRefused as refusal:
            return {"replica": self.replica.name, "refused": [refusal.stage, refusal.reason]}
        except EngineDeadError:
            return None
        return {"replica": self.replica.name, "value": value}

    def __del__(self):
        # Ray Serve calls this when it stops a replica; one whose start failed has no engine to stop.
        if "replica" in self.__dict__:
            self.replica.close()


@dataclass(frozen=True)
class Pool:
    """A running pool. Holds no connection, so it may be handed to any actor of the cluster. Methods are async.

    `application`: its name in Ray Serve. `replica_count`: how many replicas there are at least when all is well.
    """

    url: str
    run_dir: str
    application: str
    replica_count: int

    async def stats(self) -> list[dict]:
        """`Replica.stats()` of every replica that answers within 20 s, in the order of their names."""
        answers = await self._ask(None, "stats", [], STATS_WAIT_S)
        return sorted((answer["value"] for answer in answers), key=lambda stats: stats["replica"])

    async def replicas(self) -> list[str]:
        """Names of the replicas that answer; a restarted one has a new name."""
        return [stats["replica"] for stats in await self.stats()]

    async def swap(self, replica: str, version_dir: str) -> dict:
        """Make one replica draft with another version: `Replica.swap`. Raises SwapRefused or ReplicaGone."""
        return await self._ask_one(replica, "swap", [version_dir], SWAP_WAIT_S)

    async def probe(self, replica: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        """What one replica drafts for prompts (token ids): `Replica.probe`. Raises ReplicaGone."""
        return await self._ask_one(replica, "probe", [prompts, max_tokens], SWAP_WAIT_S)

    async def shadow(self, replica: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        """Draft rounds of one replica on given prompts at low priority: `Replica.shadow`. Raises ReplicaGone."""
        return await self._ask_one(replica, "shadow", [prompts, max_tokens], SWAP_WAIT_S)

    async def traffic(self) -> list[dict]:
        """What every replica that answers captured of its requests: `Replica.traffic`."""
        return [answer["value"] for answer in await self._ask(None, "traffic", [], STATS_WAIT_S)]

    async def capture(self, replica: str, receivers: list[ReceiverAddress]) -> None:
        """Have one replica stream sampled requests to these receivers. Raises ReplicaGone."""
        await self._ask_one(replica, "capture", [receivers], STATS_WAIT_S)

    async def second_answers(self, wanted: bool) -> None:
        """Tell every replica whether trainers have use for second answers just now."""
        await self._ask(None, "second_answers", [wanted], STATS_WAIT_S)

    async def recent_prompts(self, count: int) -> list[list[int]]:
        """Token ids of up to `count` prompts sampled last, from all replicas in turn; kept in memory only."""
        answers = await self._ask(None, "recent_prompts", [count], STATS_WAIT_S)
        return [prompt for row in zip_longest(*(answer["value"] for answer in answers)) for prompt in row if prompt][:count]

    async def set_drafting(self, enabled: bool) -> None:
        """Switch drafting off or on in every replica, to measure. Raises UserError where vLLM cannot."""
        answers = await self._ask(None, "set_drafting", [enabled], STATS_WAIT_S)
        if not all(answer["value"] for answer in answers):
            raise UserError("drafting cannot be switched in this engine (model runner V2 or asynchronous scheduling); "
                            "start a pool without a drafter to compare")

    def promote(self, version_dir: str) -> None:
        """Name the version that replicas start with from now on, after a failure too. Replicas that run keep theirs."""
        write_promoted(self.run_dir, version_dir)

    async def _ask_one(self, replica, method, args, wait_s):
        for answer in await self._ask(replica, method, args, wait_s):
            if answer["replica"] == replica:
                if "refused" in answer:
                    raise SwapRefused(*answer["refused"])
                return answer["value"]
        raise ReplicaGone(f"replica {replica} did not answer {method} within {wait_s:.0f} s or is gone; "
                          f"alive: {', '.join(await self.replicas()) or 'none'}")

    async def _ask(self, replica, method, args, wait_s) -> list[dict]:
        handle = serve.get_app_handle(self.application)
        try:
            answers = await handle.broadcast("on_replica", replica, method, args).results_async(
                timeout_s=wait_s, return_exceptions=True)
        except (RayServeException, TimeoutError):
            return []
        for answer in answers:
            # A replica that died or did not answer in time has no say; any other error is a fault of this program.
            if isinstance(answer, Exception) and not isinstance(answer, RayError | RayServeException | TimeoutError):
                raise answer
            if isinstance(answer, ray.exceptions.RayTaskError):
                raise answer
        return [answer for answer in answers if isinstance(answer, dict)]


def check(config: Config) -> None:
    """What `start` would refuse, as far as it can be known when a run begins, minutes before its first version."""
    check_exposure(config.serve.host, resolve_secret(config.serve.api_key, "serve.api_key"))
    if address_of(config.ray) is None:  # on a cluster that is there the port is its head node's
        claim_port(config.serve.host, config.serve.port)


def start(config: Config, target_dir: str, drafter_dir: str, run_dir: str) -> Pool:
    """Start the pool on the Ray cluster that this process is connected to; returns when every replica answers.

    target_dir, drafter_dir: folders that every node sees. run_dir: where `promoted.json` is kept. Raises UserError when
    another process serves from run_dir, the port is in use, others use the cluster's Ray Serve, the endpoint would be open
    to others without an API key, no node has room for a replica, or one cannot start.
    """
    options, name = config.serve, application(config)
    api_key = resolve_secret(options.api_key, "serve.api_key")
    opt_out_key = resolve_secret(config.traffic.opt_out_key, "traffic.opt_out_key")
    check_exposure(options.host, api_key)
    pool_owner.take(name, run_dir)
    try:
        _make_way(name)
        port = claim_port(options.host, options.port)
    except BaseException:
        pool_owner.give_up(name)  # nothing of ours was started
        raise
    write_promoted(run_dir, drafter_dir)
    serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": port},
                logging_config={"log_level": "WARNING", "enable_access_log": False},
                controller_options={"runtime_env": {"env_vars": PROXY_CALLBACK}})
    scale = ({"autoscaling_config": options.autoscaling} if options.autoscaling else
             {"num_replicas": options.replicas})
    deployment = ReplicaDeployment.options(
        **scale, max_ongoing_requests=4 * options.max_num_seqs, max_queued_requests=QUEUED_REQUESTS,
        health_check_period_s=HEALTH_PERIOD_S, graceful_shutdown_timeout_s=DRAIN_S, graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus, "label_selector": options.node, "runtime_env": {
            "env_vars": engine_env(options.cpus, options.gpus, config.target.tensor_parallel_size)}})
    deployed = deployment.bind(config, str(Path(target_dir).absolute()), str(Path(run_dir).absolute()), api_key,
                               opt_out_key)
    try:
        serve.run_many([serve.RunTarget(deployed, name=name, route_prefix="/")], wait_for_applications_running=False)
        _await_running(name)
    except BaseException:
        stop(config)
        raise
    host = f"[{options.host}]" if ":" in options.host else options.host
    count = options.autoscaling.get("min_replicas", 1) if options.autoscaling else options.replicas
    return Pool(f"http://{host}:{port}", str(Path(run_dir).absolute()), name, count)


def _await_running(name: str) -> None:
    """Wait for the first replicas, telling what Ray Serve tells. Raises UserError when they cannot start, are not placed
    within ROOM_WAIT_S or do not answer within LOAD_WAIT_S: Ray Serve itself waits without a limit."""
    started, told = time.monotonic(), ""
    while (found := serve.status().applications[name]).status != "RUNNING":
        words = " ".join(filter(None, (found.message, *(part.message for part in found.deployments.values()))))
        if found.status == "DEPLOY_FAILED":
            raise UserError("serving pool: a replica did not start; Ray's session log of the replica has the whole error. "
                            + words)
        if words and words != told:
            log.warning("serving pool: %s", words)
            told = words
        waited, placed = time.monotonic() - started, "to be scheduled" not in words
        if waited > (LOAD_WAIT_S if placed else ROOM_WAIT_S):
            what = "a replica does not answer" if placed else "no node has room for a replica: other jobs hold what it needs"
            raise UserError(f"serving pool: after {waited:.0f} s {what}. {words}")
        time.sleep(0.2)


def stop(config: Config) -> None:
    """Stop this process's pool of the run and, unless others use it, Ray Serve; returns when their processes have been told
    to go. Does nothing without a pool."""
    name = application(config)
    if not pool_owner.owns(name):
        return
    running = set(serve.status().applications)
    if not running - {name}:
        serve.shutdown()
    elif name in running:
        serve.delete(name)
    pool_owner.give_up(name)


def application(config: Config) -> str:
    """The name of a run's pool in Ray Serve; two runs of one name in different folders differ."""
    place = hashlib.sha256(str(config.run_dir.absolute()).encode()).hexdigest()[:8]
    return f"torchspec-lite {config.name} {place}"


def _make_way(name: str) -> None:
    """Take away what a killed driver of this run left on a cluster that outlives it. Raises UserError for a Ray Serve that
    others use: its address is not ours to set, and who may reach it is not known."""
    if others := set(serve.status().applications) - {name}:
        raise UserError(f"serving pool: Ray Serve on this cluster serves {', '.join(sorted(others))} already, at an address of "
                        "its own; end that, give the run a cluster of its own, or train with serve.replicas=0")
    serve.shutdown()


def promoted(run_dir: str) -> str:
    """The version folder that replicas start with."""
    return json.loads((Path(run_dir) / PROMOTED).read_text())["version_dir"]


def write_promoted(run_dir: str, version_dir: str) -> None:
    """Name the version folder that replicas start with; a reader sees the old name or the new one, never half of it."""
    final = Path(run_dir) / PROMOTED
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_suffix(".partial")
    partial.write_text(json.dumps({"version_dir": str(Path(version_dir).absolute())}))
    partial.replace(final)


def check_exposure(host: str, api_key: str | None) -> None:
    """Raises UserError for an address that others can reach when there is no API key."""
    if not api_key and not is_loopback(host):
        raise UserError(f"config serve.host {host}: others can reach this address; set serve.api_key "
                        "(env:NAME reads a variable), or serve on 127.0.0.1")


def claim_port(host: str, port: int) -> int:
    """A port that can be bound now; a free one for 0. Raises UserError when it is in use or the address is not here."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As Ray's proxy will bind it: connections of a server that has just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"config serve.port {port}: cannot listen on {host}:{port} ({error.strerror}); stop what "
                            "uses the port, or set serve.port (0 picks a free one)") from error
        return probe.getsockname()[1]
