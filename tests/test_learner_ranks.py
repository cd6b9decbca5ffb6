"""Several trainer ranks, real processes: the drafter whole on each or split over them, one rank's weights either way."""

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.test_learner import make_learner, make_samples, options
from tests.tiny import make_tiny_target
from torchspec_lite import checkpoint
from torchspec_lite.learner import Learner
from torchspec_lite.sharding import whole
from torchspec_lite.target import describe
from workers.group import Group, join_store, open_store

WAIT_S = 150


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return describe(make_tiny_target(tmp_path_factory.mktemp("target")))


@dataclass(frozen=True)
class Job:
    """What one group of ranks does."""

    target: str
    folder: Path       # results, and checkpoints under `checkpoints`
    values: dict       # of TrainerConfig
    resume: bool       # go on from the newest checkpoint there
    save: bool
    shares: list       # for each step the samples' numbers, by rank
    broken: int | None = None  # number of a sample with an infinite state


def learner_of(job, info, group):
    learner = make_learner(info, group, **job.values)
    if not job.resume:
        return learner
    path = checkpoint.newest(job.folder / "checkpoints")
    state = checkpoint.read(path)
    resumed = Learner(Learner.empty_drafter(state.config, state.vocabulary()), learner.head, options(**job.values), group)
    resumed.load(path)
    return resumed


@torch.no_grad()
def work(job, rank, group):
    """Train the job's steps and return all that one wants to know of the learner, whole."""
    info = describe(job.target)
    learner = learner_of(job, info, group)
    samples = make_samples(info, learner.head)
    if job.broken is not None:
        samples[job.broken][0].aux[4] = float("inf")
    with torch.enable_grad():
        results = [learner.train([samples[i] for i in share[rank]], 0.1) for share in job.shares]
    if job.save:
        learner.save(job.folder / "checkpoints", {}, keep=2)
    exported = learner.exportable()
    assert (exported is None) == (rank > 0)
    moments = [whole(value).clone() for optimizer in learner.optimizers for state in optimizer.state.values()
               for _, value in sorted(state.items())]
    return {"weights": {name: whole(value).clone() for name, value in learner.drafter.named_parameters()},
            "averages": {name: whole(value).clone() for name, value in learner._averages().items()},
            "exported": None if exported is None else dict(exported.named_parameters()), "moments": moments,
            "here": sum((value.to_local() if isinstance(value, DTensor) else value).numel() for value in learner.parameters),
            "results": results, "tokens": learner.tokens, "skipped": learner.skipped}


def process(job, rank, ranks, pipe):
    torch.set_num_threads(1)
    if rank == 0:
        store = open_store("127.0.0.1", ranks)
        pipe.send(store.port)
    else:
        store = join_store("127.0.0.1", pipe.recv(), ranks)
    group = Group(rank, ranks, "gloo", store)
    torch.save(work(job, rank, group), job.folder / f"rank{rank}.pt")
    group.close()


def run(job, ranks):
    """What each rank's `work` returned."""
    if ranks == 1:
        return [work(job, 0, Group(0, 1, "gloo", None))]
    # A fork server imports torch once for all of this file's processes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_learner", "torchspec_lite.sharding"])
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [context.Process(target=process, args=(job, rank, ranks, pipes[rank][1])) for rank in range(ranks)]
    for one in processes:
        one.start()
    assert pipes[0][0].poll(WAIT_S), f"rank 0 did not open its store within {WAIT_S} s"
    port = pipes[0][0].recv()
    for pipe, _ in pipes[1:]:
        pipe.send(port)
    for rank, one in enumerate(processes):
        one.join(WAIT_S)
        if one.exitcode != 0:
            for other in processes:
                other.kill()
            pytest.fail(f"rank {rank}: exit code {one.exitcode} (None: not done within {WAIT_S} s)")
    return [torch.load(job.folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def furthest(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


# Uneven micro-batches (64 tokens each), a rank with nothing, then the other one.
TWO_SHARES = [[[0, 2, 4], [1, 3, 5]], [[0, 1, 2, 3, 4, 5], []], [[], [1, 5]]]
ONE_SHARE = [[sorted(a + b)] for a, b in TWO_SHARES]


def apart(ours, theirs, start):
    """Largest distance of any weight, as a share of how far training moved it."""
    return max(float((ours[name] - theirs[name]).norm() / (theirs[name] - start[name]).norm()) for name in start)


# Gradients are summed in another order (fp32), then AdamW divides by small second moments. Muon makes its matrices
# orthogonal in bf16: there one rank with other micro-batches is already 1 % off.
@pytest.mark.parametrize("values, tolerance", [
    ({"shard": "ddp"}, 1e-3), ({"shard": "fsdp", "ema": 0.9}, 1e-3),
    ({"shard": "fsdp", "optimizer": "muon", "clip_norm": 0.05}, 0.1)], ids=["ddp", "fsdp", "fsdp-muon-clipped"])
def test_two_ranks_give_the_weights_of_one(target, tmp_path, values, tolerance):
    first, second = run(Job(target.path, tmp_path, values, False, False, TWO_SHARES), 2)
    [alone] = run(Job(target.path, tmp_path, values, False, False, ONE_SHARE), 1)
    assert same(first["weights"], second["weights"]) and same(first["averages"], second["averages"])
    [fresh] = run(Job(target.path, tmp_path, values, False, False, []), 1)
    assert apart(first["weights"], alone["weights"], fresh["weights"]) < tolerance
    for ours, theirs, single in zip(first["results"], second["results"], alone["results"], strict=True):
        assert ours == theirs
        assert ours.loss == pytest.approx(single.loss, rel=tolerance / 10)
        assert ours.grad_norm == pytest.approx(single.grad_norm, rel=tolerance)
        assert ours.grad_norm > values.get("clip_norm", 0)
    assert first["tokens"] == alone["tokens"]
    if "ema" in values:
        assert same(first["exported"], {name: value for name, value in first["averages"].items() if name != "updates"})
        assert not same(first["exported"], first["weights"])
    else:
        assert same(first["exported"], first["weights"])
    share = (first["here"] / alone["here"], second["here"] / alone["here"])
    assert share == pytest.approx((0.5, 0.5), abs=0.02) if values["shard"] == "fsdp" else share == (1, 1)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(target, tmp_path):
    values = {"shard": "fsdp"}
    fresh, _ = run(Job(target.path, tmp_path, values, False, False, []), 2)
    ranks = run(Job(target.path, tmp_path, values, False, False, [[[0], [1]]], broken=1), 2)
    for rank in ranks:
        assert rank["skipped"] == 1 and rank["results"][0].skipped and same(rank["weights"], fresh["weights"])


@pytest.mark.parametrize("saved, resumed", [
    ((2, "fsdp"), (1, "ddp")), ((1, "ddp"), (2, "fsdp")), ((2, "fsdp"), (2, "ddp")), ((2, "ddp"), (3, "fsdp"))])
def test_a_checkpoint_is_the_same_on_other_ranks(target, tmp_path, saved, resumed):
    """Every weight, moment and average bit for bit, and training goes on from it."""
    shares = [[list(range(rank, 6, saved[0])) for rank in range(saved[0])]] * 2
    wrote = run(Job(target.path, tmp_path, {"shard": saved[1], "ema": 0.9}, False, True, shares), saved[0])[0]
    job = Job(target.path, tmp_path, {"shard": resumed[1], "ema": 0.9}, True, False, [])
    for rank in run(job, resumed[0]):
        assert same(rank["weights"], wrote["weights"]) and same(rank["averages"], wrote["averages"])
        assert len(rank["moments"]) == len(wrote["moments"]) > 0
        assert all(map(torch.equal, rank["moments"], wrote["moments"]))
        assert rank["tokens"] == wrote["tokens"]
    shares = [[list(range(rank, 6, resumed[0])) for rank in range(resumed[0])]]
    after = run(Job(target.path, tmp_path, {"shard": resumed[1], "ema": 0.9}, True, False, shares), resumed[0])[0]
    assert 0 < furthest(after["weights"], wrote["weights"]) < 0.1
    assert after["results"][0].loss < wrote["results"][0].loss
