"""What the rollout's tests share: a pool and a coordinator that keep what they were told, versions on the disk."""

from pathlib import Path

from cluster import rollout as rollouts
from cluster.pool import ReplicaGone
from cluster.rollout import Rollout
from torchspec_lite.config import build
from torchspec_lite.errors import UserError
from torchspec_lite.parity import ParityProbe
from workers.refusal import SwapRefused
from workers.reports import Export

LENGTHS = {"v000000": 1.2, "v000001": 1.5, "v000002": 1.1, "v000003": 1.0}
PROBE = ParityProbe(2, [1, 2, 7, 8, 9], [[8, 9], [9, 4], [5, 6]])


class FakePool:
    """Replicas whose shadow acceptance depends on the version they run: `length[version]`."""

    def __init__(self, names, length, refuse=(), gone=(), drafted=None, serving=0):
        self.running = dict.fromkeys(names, f"v{serving:06d}")
        self.replica_count, self.length, self.refuse, self.gone = len(names), length, set(refuse), set(gone)
        self.drafted = drafted or {}
        self.promoted = None

    async def replicas(self):
        return list(self.running)

    async def stats(self):
        return [{"replica": name, "version": version, "running": 0, "waiting": 0, "versions": []}
                for name, version in self.running.items()]

    async def swap(self, name, directory):
        version = Path(directory).name
        if version in self.refuse or (name, version) in self.refuse:
            raise SwapRefused("load", "wrong shape")
        if (name, version) in self.gone:
            raise ReplicaGone(f"replica {name} is gone")
        self.running[name] = version
        return {"load_ms": 10.0}

    async def probe(self, name, prompts, max_tokens):
        drafts = self.drafted.get(self.running[name], [8, 9])
        return [{"token_ids": [1, 2, 7, 8, 9], "rounds": [(3, drafts)]} for _ in prompts]

    async def shadow(self, name, prompts, max_tokens):
        return [{"drafts": 40, "per_position": [round(40 * (self.length[self.running[name]] - 1))]} for _ in prompts]

    def promote(self, directory):
        self.promoted = Path(directory).name


class FakeCoordinator:
    def __init__(self):
        self.states, self.alarms, self.events, self.exports = [], [], [], []
        self.known, self.needed = {}, []

    async def find_export(self, version):
        return self.known.get(version)

    async def needed_versions(self):
        return self.needed

    async def next_export(self, wait):
        assert not wait
        return self.exports.pop() if self.exports else None

    async def version_state(self, version, state, reason):
        self.states.append((version, state, reason))

    async def raise_alarm(self, text):
        self.alarms.append(text)

    async def event(self, *what):
        self.events.append(what)

    async def served(self, *what):
        self.events.append(("served", *what))

    async def swapped(self, *what):
        pass


def export(root, version, predicted, probes=(PROBE,), serving=None, against=0):
    directory = root / "r" / "drafters" / f"v{version:06d}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text("{}")
    return Export(version, version * 10, version * 100, version - 1 if version else None, str(directory), predicted,
                  predicted, [], list(probes), serving and serving.acceptance_length, serving and serving.as_list(),
                  against if serving else None)


def make_rollout(root, monkeypatch, pool, bad=(), serving=0, parent=None, **options):
    """A rollout over fakes, and its coordinator; `bad` names versions that the offline check refuses."""
    def verify(directory, fingerprint):
        if directory.name in bad:
            raise UserError(f"drafter {directory}: model.safetensors has another hash than its manifest")
    monkeypatch.setattr(rollouts, "verify", verify)
    config = build({"name": "r", "run_root": str(root), "target": {"model": "x"},
                    "rollout": {"min_rounds": 100, "shadow_prompts": 2, **options}}, "test")
    coordinator = FakeCoordinator()
    rollout = Rollout(config, pool, coordinator, [[1]] * 8, "t@0", export(root, serving, 1.2),
                      None if parent is None else export(root, parent, 1.2))
    return rollout, coordinator


def folders(root) -> list[int]:
    """Numbers of the versions on the disk."""
    return sorted(int(path.name[1:]) for path in (root / "r" / "drafters").iterdir() if path.name.startswith("v"))
