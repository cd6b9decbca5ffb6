"""Draft rounds of one engine, counted per drafter version."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.loggers import StatLoggerBase

SETTLE_STEPS = 2


@dataclass
class VersionStats:
    """Cumulative counts of one drafter version in one engine: take the difference of two readings for a period.

    drafts: draft rounds verified. drafted, accepted: draft tokens. per_position[i]: rounds in which at least i + 1
    drafts were accepted, so a round's acceptance is distributed as the differences say.
    """

    version: str
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification yields, 1 + accepted / drafts; 1.0 before the first round."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


class DraftCounter(StatLoggerBase):
    """vLLM stat logger that files each engine step's draft rounds under the drafter version that drafted them.

    `begin_swap` before the engine changes its drafter and `end_swap` after: the rounds between, and those of the first
    two steps after (drafted before the change, verified after it), are counted under no version (`unattributed`).
    """

    def __init__(self, version: str, positions: int):
        self.versions = {version: VersionStats(version, per_position=[0] * positions)}
        self.version = version
        self.running = self.waiting = self.unattributed = 0
        self.generated = self.requests = 0
        self._settling = 0
        self._swapping = False

    def begin_swap(self) -> None:
        self._swapping = True

    def end_swap(self, version: str) -> None:
        """Count for `version` from here on: the new one, or the old one when the swap failed."""
        positions = len(self.versions[self.version].per_position)
        self.versions.setdefault(version, VersionStats(version, per_position=[0] * positions))
        self.version, self._swapping, self._settling = version, False, SETTLE_STEPS

    def snapshot(self) -> dict:
        """All counts as plain values: {version, running, waiting, requests, generated, unattributed, versions: [...]}.

        requests: those that ended; generated: tokens; both since the start.
        """
        versions = [asdict(stats) for stats in self.versions.values()]
        return {"version": self.version, "running": self.running, "waiting": self.waiting, "requests": self.requests,
                "generated": self.generated, "unattributed": self.unattributed, "versions": versions}

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx: int = 0) -> None:
        """Called by vLLM after each engine step."""
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens
            self.requests += len(iteration_stats.finished_requests)
        if scheduler_stats is None:
            return
        self.running = scheduler_stats.num_running_reqs
        self.waiting = scheduler_stats.num_waiting_reqs
        rounds = scheduler_stats.spec_decoding_stats
        if rounds is None or rounds.num_drafts == 0:
            return
        if self._swapping or self._settling:
            self._settling = max(0, self._settling - (not self._swapping))
            self.unattributed += rounds.num_drafts
            return
        stats = self.versions[self.version]
        stats.drafts += rounds.num_drafts
        stats.drafted += rounds.num_draft_tokens
        stats.accepted += rounds.num_accepted_tokens
        for position, accepted in enumerate(rounds.num_accepted_tokens_per_pos):
            stats.per_position[position] += accepted

    def log_engine_initialized(self) -> None:
        """Nothing to say at start."""


class DraftMetrics(Collector):
    """The counter's figures for Prometheus, beside vLLM's own: per replica, version and position."""

    def __init__(self, counter: DraftCounter, replica: str):
        self.counter = counter
        self.replica = replica

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        prefix = "torchspec_lite_serve_"
        now = GaugeMetricFamily(prefix + "drafter", "1 for the drafter version in use", labels=("replica", "version"))
        now.add_metric((self.replica, self.counter.version), 1)
        yield now
        labels = ("replica", "version")
        drafts = CounterMetricFamily(prefix + "drafts", "Draft rounds verified", labels=labels)
        accepted = CounterMetricFamily(prefix + "accepted_tokens", "Draft tokens accepted", labels=labels)
        positions = CounterMetricFamily(prefix + "accepted_at_position", "Rounds accepted up to this position",
                                        labels=(*labels, "position"))
        for stats in self.counter.versions.values():
            names = (self.replica, stats.version)
            drafts.add_metric(names, stats.drafts)
            accepted.add_metric(names, stats.accepted)
            for position, count in enumerate(stats.per_position):
                positions.add_metric((*names, str(position)), count)
        yield from (drafts, accepted, positions)
