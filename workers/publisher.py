"""What a trainer rank publishes: a checkpoint, and a drafter version of the same weights, predicted on and told of."""

from collections.abc import Callable
from dataclasses import replace

import torch

from torchspec_lite.acceptance import Prediction
from torchspec_lite.config import Config
from torchspec_lite.drafter import Drafter
from torchspec_lite.export import export, load_drafter, versions
from torchspec_lite.learner import Learner
from torchspec_lite.parity import ParityProbe, make_probe
from torchspec_lite.sample import DTYPES, Sample
from torchspec_lite.target import FrozenHead, TargetInfo
from torchspec_lite.teacher import TeacherStatistics
from workers.reports import Export
from workers.served import Look, ServedTraffic

KEEP_CHECKPOINTS = 3
PROBES = 4
Predict = Callable[[Drafter, list[tuple[Sample, TeacherStatistics]]], Prediction | None]


class Publisher:
    """Every rank has one and calls every method as often as the others; rank 0 writes the versions.

    `head` is on the CPU, where versions are read back, `device_head` where drafters are tried. `held_out` are rank 0's
    samples to predict on, by id. `version` is the newest one's number and `step` the optimizer step of the newest checkpoint.
    """

    def __init__(self, config: Config, info: TargetInfo, head: FrozenHead, device_head: FrozenHead, coordinator,
                 held_out: dict[str, tuple[Sample, TeacherStatistics]], predict: Predict):
        self.config, self.info, self.head, self.device_head = config, info, head, device_head
        self.coordinator, self.held_out, self.predict = coordinator, held_out, predict
        self.checkpoints, self.drafters = config.run_dir / "checkpoints", config.run_dir / "drafters"
        self.dtype = DTYPES[config.target.dtype]
        self.version, self.step = 0, -1

    def publish(self, learner: Learner, samples: int, trained_s: float, served: ServedTraffic | None) -> None:
        """A checkpoint, then a drafter version made of the same weights. Samples become durable between the two.

        `samples`: those that have had all their passes. `served`: no version when it is not predicted to be better on present
        traffic than the one that serves.
        """
        drafter, group = learner.exportable(), learner.group
        look = served.look(drafter) if served is not None and drafter is not None else None  # rank 0
        unworthy, rest = group.sum(torch.tensor([
            float(look is not None and look.decision != "export"), float(look is not None and look.decision == "rest")])).tolist()
        if rest:  # what was learned since the last version was worth nothing
            learner.restart(look and look.serving_drafter)
        version = self.version + bool(learner.step and not unworthy)
        # Every sample this step used must be in the ledger as trained before a checkpoint claims it.
        self.coordinator.settle()
        group.sum(torch.zeros(1))
        extra = {"version": version, "samples": samples, "trained_s": trained_s, "target": self.info.fingerprint}
        learner.save(self.checkpoints, extra, KEEP_CHECKPOINTS)
        if drafter is not None:
            self.coordinator.call("checkpointed", learner.step)
            if not unworthy:
                self._export(look.drafter if look else drafter, version, learner.step, samples, look)
        group.sum(torch.zeros(1))
        self.version, self.step = version, learner.step
        if learner.device.type == "cuda":
            torch.cuda.empty_cache()  # others on this GPU may want what the tried drafters took

    def resume(self, learner: Learner, version: int, samples: int) -> None:
        """Go on after a checkpoint of that version and so many samples; a version that it names and that was not written, since
        the trainers ended between the two, is written now."""
        self.step = learner.step
        there = max(versions(self.drafters), default=-1) if learner.group.rank == 0 else 0
        there = int(learner.group.sum(torch.tensor([there]))[0])
        self.version = max(there, version)  # there are more where the newest checkpoints were broken
        if there < version:
            drafter = learner.exportable()
            if drafter is not None and self.coordinator.call("find_export", self.version) is None:
                self._export(drafter, self.version, learner.step, samples, None)

    def _export(self, drafter: Drafter, version: int, step: int, samples: int, look: Look | None) -> None:
        prediction = self.predict(drafter, list(self.held_out.values())) if look is None else look.candidate
        if prediction is not None:
            self.coordinator.tell("drift", step, {
                name: list(getattr(prediction, name)) for name in ("feature_norm", "sink_mass", "own_mass")})
        walked = prediction.walked if prediction is not None else None
        parent = version - 1 if version else None
        path = export(drafter, self.drafters, version, self.dtype, self.info, step, samples, parent, walked)
        self.coordinator.call("exported", Export(
            version, step, samples, parent, str(path),
            prediction.acceptance_length if prediction is not None else None, walked,
            list(prediction.walk.per_position) if prediction is not None else [], self._probes(load_drafter(path, self.info, self.head)),
            *((look.serving.walked, look.serving.walk.as_list(), look.serving_version) if look else ())))

    def _probes(self, drafter: Drafter) -> list[ParityProbe]:
        device, drafts = self.device_head.lm_head.device, self.config.serve.num_speculative_tokens
        drafter = drafter.to(device, self.dtype)
        samples = [replace(sample, token_ids=sample.token_ids.to(device), aux=sample.aux.to(device))
                   for sample, _ in list(self.held_out.values())[:PROBES]]
        return [make_probe(drafter, self.device_head, sample, drafts, self.dtype) for sample in samples]
