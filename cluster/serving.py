"""Serve a drafter with its target, without training: `torchspec-lite serve`."""

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path

from cluster import pool as pools
from cluster.placement import make_plan
from cluster.session import session
from torchspec_lite.config import Config
from torchspec_lite.errors import UserError
from torchspec_lite.export import verify, versions
from torchspec_lite.target import describe
from torchspec_lite.target_folder import resolve_target

log = logging.getLogger(__name__)


def serve(config: Config, as_json: bool) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises UserError when there is no drafter, or the port is taken."""
    if config.serve.replicas == 0:
        raise UserError("config serve.replicas is 0; set serve.replicas=1 or more to serve")
    info = describe(resolve_target(config.target.model, config.target.trust_remote_code))
    drafter = choose_drafter(config, info.fingerprint)
    plan = make_plan(config, info, only="serving replica")
    with session(config.ray, plan) as doubts:
        for doubt in doubts:
            log.warning(doubt)
        pool = pools.start(without_capture(config), info.path, str(drafter), str(config.run_dir))
        started = {"url": f"{pool.url}/v1", "model": config.serve.model_name or info.name, "drafter": str(drafter)}
        if as_json:
            print(json.dumps(started), file=sys.__stdout__, flush=True)
        else:
            print(f"serving {started['model']} at {started['url']} with {drafter}; Ctrl-C stops", file=sys.stderr)
        try:
            asyncio.run(_until_signal())
        finally:
            pools.stop(config)
    return 0


def without_capture(config: Config) -> Config:
    """The config for replicas that nobody learns from: no request skips the prefix cache, and no prompt is kept."""
    return config.model_copy(update={"traffic": config.traffic.model_copy(update={"fraction": 0.0})})


def choose_drafter(config: Config, fingerprint: str) -> Path:
    """The configured drafter, else the run's promoted version, else its newest. Versions with a manifest are verified.

    Raises UserError when there is none or it is not whole.
    """
    if config.serve.drafter is not None:
        folder = Path(config.serve.drafter)
    elif (config.run_dir / pools.PROMOTED).exists():
        folder = Path(pools.promoted(str(config.run_dir)))
    else:
        found = versions(config.run_dir / "drafters")
        if not found:
            raise UserError(f"no drafter in {config.run_dir / 'drafters'}; train one first, or set serve.drafter=FOLDER")
        folder = list(found.values())[-1]
    if (folder / "manifest.json").exists():
        verify(folder, fingerprint)
    elif not (folder / "config.json").exists():
        raise UserError(f"drafter {folder}: no config.json there; give a drafter folder, like runs/NAME/drafters/v000001")
    return folder


async def _until_signal() -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
