"""A run directory as a run of some hours leaves it, made without a run: for the tests and pictures of the live page."""

import math
import random
from dataclasses import replace
from pathlib import Path

from torchspec_lite.ledger import Ledger
from torchspec_lite.metrics import Metrics
from torchspec_lite.snapshot import Alarm, Buffer, Pipeline, Replica, Snapshot, write_snapshot

STEPS, EVERY, STEP_S = 600, 50, 20.0
REJECTS = (
    ("no supervised token", 9),
    ("longer than max_length before the answer", 4),
    ("template error: role 'critic'", 2),
)


def make_run(run_dir: Path, now: float, live: bool = True) -> Snapshot:
    """Write metrics, ledger and status of a run that reaches `STEPS` at `now`; returns its snapshot."""
    run_dir.mkdir(parents=True, exist_ok=True)
    generator = random.Random(1)
    start = now - STEPS * STEP_S
    served = _metrics(run_dir, generator, start)
    with Path(run_dir / "config.yaml").open("w") as file:
        file.write(f"name: {run_dir.name}\n")
    _ledger(run_dir, start)
    snapshot = _snapshot(run_dir.name, start, now, served)
    if not live:
        snapshot = replace(snapshot, state="finished", pipeline=Pipeline(), alarms=())
    write_snapshot(run_dir, snapshot)
    return snapshot


def _al(step: float) -> float:
    return 1.25 + 1.2 * (1 - math.exp(-step / 200))


def _metrics(run_dir: Path, generator: random.Random, start: float) -> float:
    metrics = Metrics(run_dir)
    served = 0.0
    for step in range(1, STEPS + 1):
        time = start + step * STEP_S
        values = {
            "loss": 1.4 + 3.2 * math.exp(-step / 160) + generator.gauss(0, 0.06),
            "learning_rate": 1e-3 * min(1, step / 20) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / STEPS)) / 2),
            "grad_norm": 0.4 + generator.random() / 5,
            "tokens_trained_total": 2048.0 * step,
        }
        metrics.record(values, step=step, time=time)
        if step % 4 == 0:
            promoted = step // EVERY - (step // EVERY in (4, 9))  # versions 4 and 9 were not kept
            served = _al(promoted * EVERY) + generator.gauss(0, 0.02)
            metrics.record({"served_acceptance_length": served}, time=time)
            labels = {"version": promoted}
            metrics.record({"served_acceptance_length_by_version": served}, labels=labels, time=time)
        if step % EVERY == 0:
            for split, bonus in (("train", 0.12), ("held_out", 0.05), ("held_out_walked", 0.02)):
                value = {"predicted_acceptance_length": _al(step) + bonus}
                metrics.record(value, step=step, labels={"split": split}, time=time)
            metrics.record({"train_serve_gap": _al(step) + 0.02 - served}, step=step, time=time)
            for place in range(3):
                rate = (_al(step) - 1) * (0.52, 0.31, 0.17)[place]
                metrics.record({"served_acceptance_rate": rate}, labels={"position": place}, time=time)
                labels = {"position": place}
                metrics.record({"predicted_acceptance_rate": rate + 0.02}, step=step, labels=labels, time=time)
            for k in range(4):
                values = {
                    "feature_norm": 24 + 0.4 * k + generator.gauss(0, 0.2),
                    "sink_mass": 0.3 - 0.03 * k + 0.08 * math.exp(-step / 200) + generator.gauss(0, 0.004),
                    "own_mass": 0.07 * k + generator.gauss(0, 0.004),
                }
                metrics.record(values, step=step, labels={"k": k}, time=time)
    metrics.close()
    return served


def _ledger(run_dir: Path, start: float) -> None:
    ledger = Ledger(run_dir / "ledger.sqlite")
    ledger.add_samples([(f"chat-{i:04d}", i) for i in range(1200)], "train")
    ledger.add_samples([(f"held-{i:02d}", 5000 + i) for i in range(24)], "held_out")
    leases = ledger.lease("target-0", 900, rank=0, purpose="train")
    rejects = iter(leases[-sum(count for _, count in REJECTS) :])
    for reason, count in REJECTS:
        for _ in range(count):
            lease = next(rejects)
            ledger.rejected(lease.id, lease.attempt, reason)
    good = leases[: -sum(count for _, count in REJECTS)]
    ledger.streamed([(lease.id, lease.attempt, 180) for lease in good[:870]])
    ledger.trained([(lease.id, lease.attempt) for lease in good[:800]], step=STEPS)
    ledger.checkpointed(STEPS)
    ledger.trained([(lease.id, lease.attempt) for lease in good[800:840]], step=STEPS + 1)
    for version in range(1, STEPS // EVERY + 1):
        step = version * EVERY
        ledger.add_version(version, step, samples=version * 70, parent=version - 1 or None, predicted=_al(step) + 0.02)
        if version == 4:
            state, reason = "rolled_back", "AL 1.87 against 1.98 on 412 rounds: worse by 0.11 [0.04, 0.18]"
        elif version == 9:
            state, reason = "refused", "predicted AL 2.21 is 0.07 below the serving version's"
        elif version == STEPS // EVERY:
            state, reason = "canary", "on replica r1; 140 of 200 rounds"
        else:
            state, reason = "promoted", f"better by {_al(step) - _al(step - EVERY):.2f} on {400 + version} rounds"
        ledger.set_version_state(version, state, reason)
        ledger.add_event(state, reason, version=version, replica="r1" if state == "canary" else None)
    ledger.add_event("alarm", "replica r1: no answer for 6 s, restarted", replica="r1")
    with ledger._transaction() as db:  # these happened while the run ran, not now
        db.execute("UPDATE versions SET created = ? + step * ?", (start, STEP_S))
        db.execute("UPDATE events SET time = ? + version * ? * ? + 90 WHERE version NOTNULL", (start, EVERY, STEP_S))
    ledger.close()


def replica(name: str, **values) -> Replica:
    return Replica(name=name, state="ready", **values)


def _snapshot(name: str, start: float, now: float, served: float) -> Snapshot:
    mib = 2**20
    return Snapshot(
        run=name,
        state="running",
        started=start,
        updated=now,
        elapsed_s=now - start,
        prompts_done=855,
        prompts_total=1200,
        samples={"queued": 300, "leased": 15, "streamed": 30, "trained": 40, "durable": 800, "rejected": 15},
        step=STEPS + 1,
        tokens_streamed=156_600,
        tokens_trained=1_228_800,
        loss=1.4731,
        learning_rate=1e-4,
        predicted=_al(STEPS) + 0.02,
        served_before=1.27,
        served=served,
        version=12,
        serving_version=11,
        pipeline=Pipeline(
            target_workers=1,
            trainer_ranks=2,
            streamed_tokens_per_s=934.2,
            trained_tokens_per_s=918.7,
            target_wait=0.03,
            trainer_wait=0.41,
            sender=Buffer(bytes=3 * mib, budget_bytes=128 * mib, samples=2),
            receiver=Buffer(bytes=21 * mib, budget_bytes=256 * mib, samples=30, budget_samples=256),
        ),
        replicas=(
            replica("r0", version=11, acceptance_length=served, running=6, requests=5120, tokens_per_s=412.0),
            replica("r1", version=12, role="canary", acceptance_length=2.47, running=2, requests=811),
        ),
        alarms=(Alarm(time=now - 1500, text="replica r1: no answer for 6 s, restarted"),),
        links={"endpoint": "http://127.0.0.1:8000/v1"},
    )
