"""A person's hand on the rollout of a running run: look, pause, resume, promote, roll back."""

import os
from pathlib import Path

import ray

from cluster.session import NAMESPACE, quiet_ray
from torchspec_lite.config import load
from torchspec_lite.errors import UserError
from torchspec_lite.ledger import Ledger
from torchspec_lite.snapshot import is_over, read_snapshot

ANSWER_S = 30


def control(run_dir: Path, action: str, version: int | None) -> tuple[dict, str]:
    """Do `action` and return the rollout's state as values and text. `status` reads the run directory alone, so it
    works for a finished run too. Raises UserError when the run is over or cannot be reached."""
    if (action == "promote") != (version is not None):
        raise UserError("rollout: promote needs a VERSION, and only promote takes one")
    if action != "status":
        _tell(run_dir, action, version)
    ledger = Ledger(run_dir / "ledger.sqlite", reuse=1, read_only=True)
    try:
        versions, events = ledger.versions(), ledger.history(limit=40)
    finally:
        ledger.close()
    events = [event | {"data": None} for event in events]
    lines = [f"{'version':>8}{'step':>8}{'predicted':>11}  state"]
    for row in versions:
        predicted = f"{row['predicted']:.3f}" if row["predicted"] is not None else "-"
        lines.append(f"{row['version']:>8}{row['step']:>8}{predicted:>11}  {row['state']}: {row['reason'] or ''}")
    if action != "status":
        lines.append(f"told the run: {action}" + ("" if version is None else f" {version}"))
    return {"versions": versions, "events": events}, "\n".join(lines)


def _tell(run_dir: Path, action: str, version: int | None) -> None:
    snapshot = read_snapshot(run_dir)
    if is_over(snapshot):
        raise UserError(f"run {run_dir}: it is {snapshot.state}; only a running one can be told to {action}")
    config = load(run_dir / "config.yaml")
    quiet_ray()
    address = config.ray.address or os.environ.get("RAY_ADDRESS") or (snapshot.links or {}).get("ray") or "auto"
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        coordinator = ray.get_actor(f"coordinator-{config.name}", namespace=NAMESPACE)
        ray.get(coordinator.override.remote(action, version), timeout=ANSWER_S)
    except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"run {run_dir}: cannot reach its coordinator at Ray address {address} ({error}); run this on a "
                        "node of its cluster") from error
    finally:
        ray.shutdown()
