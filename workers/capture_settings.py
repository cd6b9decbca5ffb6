"""What a serving engine must know to capture: plain values, so that they can be sent to it."""

from dataclasses import dataclass

from torchspec_lite.config import Config
from torchspec_lite.target import TargetInfo


@dataclass(frozen=True)
class CaptureSettings:
    """`fingerprint`: of the target, which samples bear. `fraction`: share of requests without a mark that are captured.
    `longest`: tokens of the longest sample, the end of a longer request is kept. `layer_ids`: the drafter's, which the
    trainers expect. `max_age_s`: after so long without a trainer the engine forgets what waits and captures no more."""

    identity: str
    fingerprint: str
    layer_ids: tuple[int, ...]
    longest: int
    fraction: float
    budget_bytes: int
    max_tokens_per_s: float | None
    prefer_low: float
    max_age_s: float
    heartbeat_s: float
    wait_s: float
    shared_memory: bool


def capture_settings(config: Config, identity: str, target: TargetInfo, unmarked: float) -> CaptureSettings:
    """What a run's config says. `unmarked`: share of requests without a mark to capture; 0 where `workers.consent` marks
    them all."""
    traffic, stream = config.traffic, config.stream
    return CaptureSettings(
        identity=identity, fingerprint=target.fingerprint,
        layer_ids=tuple(config.capture.layer_ids or target.default_layer_ids()),
        longest=config.data.max_length, fraction=unmarked, budget_bytes=traffic.budget_mib << 20,
        max_tokens_per_s=traffic.max_tokens_per_s, prefer_low=traffic.prefer_low_acceptance, max_age_s=traffic.max_age_s,
        heartbeat_s=stream.heartbeat_s, wait_s=stream.wait_s, shared_memory=stream.shared_memory)
