"""Training state: what resumes is what was saved, on any number of ranks; what is broken is skipped by name."""

import dataclasses
import errno
import json
import logging
import os
import random
import shutil
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchspec_lite import checkpoint
from torchspec_lite.drafter import Drafter, DrafterConfig
from torchspec_lite.errors import UserError

CONFIG = DrafterConfig(
    hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=64, vocab_size=40,
    draft_vocab_size=10, target_hidden_size=16, layer_ids=(1, 2, 3), fc_norm=True, norm_output=True)
DRAFT_IDS = torch.arange(10) * 3 + 1


def fresh(seed):
    torch.manual_seed(seed)
    drafter = Drafter(CONFIG, DRAFT_IDS)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return drafter


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))


def train(model, optimizer, steps):
    """A step whose gradient depends on the weights alone, the same on every rank."""
    for _ in range(steps):
        optimizer.zero_grad()
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = parameter.detach().sin() * (i + 1)
        optimizer.step()


def save(folder, step, drafter, optimizer, extra=None, tensors=None, keep=3):
    return checkpoint.save(folder, step, CONFIG, drafter, [optimizer], {"last_step": step}, extra or {},
                           tensors or {}, keep)


def test_resume_goes_on_exactly(tmp_path):
    drafter = fresh(0)
    optimizer = optimizer_of(drafter)
    train(drafter, optimizer, 3)
    average = {"lm_head": drafter.lm_head.detach() * 2}
    torch.manual_seed(5)
    random.seed(6)
    random.gauss(0, 1)  # leaves a second normal number waiting inside the generator
    path = save(tmp_path, 3, drafter, optimizer, {"buffer": [{"id": "a", "uses": 1}], "tokens": 12}, average)
    assert path == tmp_path / "step_000003"
    expected_numbers = torch.rand(4), random.random(), random.gauss(0, 1)
    train(drafter, optimizer, 2)

    other = fresh(1)
    state = checkpoint.read(path)
    assert state.config == CONFIG and torch.equal(state.vocabulary(), DRAFT_IDS)
    restarted = optimizer_of(other)
    restored = {"lm_head": torch.zeros(10, 16)}
    loaded = checkpoint.load(checkpoint.newest(tmp_path), CONFIG, other, [restarted], restored)
    assert loaded == state and (loaded.step, loaded.ranks) == (3, 1)
    assert loaded.schedule == {"last_step": 3}
    assert loaded.extra == {"buffer": [{"id": "a", "uses": 1}], "tokens": 12}
    assert torch.equal(restored["lm_head"], average["lm_head"])
    numbers = torch.rand(4), random.random(), random.gauss(0, 1)
    assert torch.equal(numbers[0], expected_numbers[0]) and numbers[1:] == expected_numbers[1:]
    train(other, restarted, 2)
    for (name, value), again in zip(drafter.named_parameters(), other.parameters()):
        assert torch.equal(value, again), name


def test_only_the_newest_are_kept_and_leftovers_go(tmp_path):
    drafter = fresh(0)
    optimizer = optimizer_of(drafter)
    left = tmp_path / ".step_000001.partial"
    left.mkdir()
    for step in (1, 2, 10, 1000000):
        save(tmp_path, step, drafter, optimizer, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_1000000"]
    assert checkpoint.newest(tmp_path).name == "step_1000000"
    with pytest.raises(UserError, match="already there"):
        save(tmp_path, 10, drafter, optimizer)
    assert checkpoint.check(tmp_path / "step_000010").step == 10


def truncate(path):
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-7])


def flip(path):
    data = next(path.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def rename(path):
    path.rename(path.with_name("step_000031"))


@pytest.mark.parametrize("damage, reason", [
    (truncate, "not the file that was written"),
    (flip, "not the file that was written"),
    (lambda path: (path / ".metadata").unlink(), "files differ"),
    (lambda path: (path / "whole.json").write_text("{"), "whole.json is not readable"),
    (lambda path: (path / "whole.json").unlink(), "whole.json is not readable"),
    (lambda path: (path / "state.json").write_text("{}"), "state.json is not the file"),
    (rename, "holds step 30"),
])
def test_a_broken_one_is_skipped_by_name(tmp_path, caplog, damage, reason):
    drafter = fresh(0)
    optimizer = optimizer_of(drafter)
    for step in (10, 20, 30):
        save(tmp_path, step, drafter, optimizer)
    damage(tmp_path / "step_000030")
    caplog.clear()
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000020"
    warning, = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert reason in warning.message and "step_00003" in warning.message
    save(tmp_path, 30, drafter, optimizer)  # the run comes to this step again
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000030"
    assert (tmp_path / "broken-step_000030").is_dir() == (damage is not rename)
    with pytest.raises(UserError, match="never written over"):
        save(tmp_path, 30, drafter, optimizer)


def test_none_at_all(tmp_path):
    assert checkpoint.newest(tmp_path / "checkpoints") is None
    (tmp_path / ".step_000005.partial").mkdir()
    (tmp_path / "step_x").mkdir()
    assert checkpoint.newest(tmp_path) is None


def test_full_disk_that_torch_tells_without_an_error_number(tmp_path, monkeypatch):
    """As on a real full disk: torch's zip writer raises a RuntimeError about a position."""
    def write(*arguments, **options):
        raise RuntimeError("unexpected pos 704 vs 598")

    drafter = fresh(0)
    optimizer = optimizer_of(drafter)
    monkeypatch.setattr(torch, "save", write)
    with pytest.raises(RuntimeError, match="unexpected pos"):
        save(tmp_path, 1, drafter, optimizer)  # there is room: not explained away
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 4096))
    with pytest.raises(UserError, match="no space left on the disk while writing step_000001"):
        save(tmp_path, 1, drafter, optimizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_leaves_the_older_one(tmp_path, monkeypatch, code):
    drafter = fresh(0)
    optimizer = optimizer_of(drafter)
    save(tmp_path, 1, drafter, optimizer)

    def full(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="no space left on the disk while writing step_000002"):
        save(tmp_path, 2, drafter, optimizer)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_another_drafter_is_refused(tmp_path):
    drafter = fresh(0)
    path = save(tmp_path, 1, drafter, optimizer_of(drafter))
    wider = dataclasses.replace(CONFIG, intermediate_size=32)
    with pytest.raises(UserError, match="intermediate_size was 24, the run asks for 32"):
        checkpoint.load(path, wider, drafter, [optimizer_of(drafter)], {})
    with pytest.raises(UserError, match="holds no average"):
        checkpoint.load(path, CONFIG, drafter, [optimizer_of(drafter)], {"average": torch.zeros(2)})
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"schema": 2}))
    with pytest.raises(UserError, match="another version"):
        checkpoint.read(path)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_ranks(ranks, work, *arguments):
    """Run work(rank, *arguments) in `ranks` processes joined by gloo."""
    # A fork server imports torch once for all of this file's processes.
    multiprocessing.get_context("forkserver").set_forkserver_preload([
        "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torchspec_lite.checkpoint"])
    multiprocessing.start_processes(
        _join, (ranks, free_port(), work, arguments), nprocs=ranks, start_method="forkserver")


def _join(rank, ranks, port, work, arguments):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        work(rank, *arguments)
    finally:
        dist.destroy_process_group()


def wrapped(kind, drafter):
    if kind == "fsdp":
        return fully_shard(drafter, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return DistributedDataParallel(drafter) if kind == "ddp" else drafter


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _save_and_go_on(rank, kind, folder):
    model = wrapped(kind, fresh(0))
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    torch.manual_seed(100 + rank)
    save(folder, 2, model, optimizer)
    numbers = torch.rand(3)
    train(model, optimizer, 2)
    values = [whole(p).detach() for p in model.parameters()]
    torch.save({"numbers": numbers, "values": values}, folder / f"after_{rank}.pt")


def _resume_and_compare(rank, kind, folder):
    model = wrapped(kind, fresh(1))
    optimizer = optimizer_of(model)
    path = checkpoint.newest(folder)
    assert path == folder / "step_000002"
    torch.manual_seed(7)
    state = checkpoint.load(path, CONFIG, model, [optimizer], {})
    after = torch.load(folder / f"after_{min(rank, state.ranks - 1)}.pt")
    torch.manual_seed(7) if rank >= state.ranks else None
    numbers = torch.rand(3)
    if rank < state.ranks:
        assert torch.equal(numbers, after["numbers"])
    train(model, optimizer, 2)
    for value, expected in zip(model.parameters(), after["values"]):
        torch.testing.assert_close(whole(value), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("saved, resumed", [
    ((2, "fsdp"), (1, "plain")), ((1, "plain"), (2, "fsdp")), ((2, "fsdp"), (3, "ddp"))])
def test_resume_on_another_number_of_ranks(tmp_path, saved, resumed):
    for (ranks, kind), work in ((saved, _save_and_go_on), (resumed, _resume_and_compare)):
        if kind == "plain":
            work(0, kind, tmp_path)  # no process group at all
        else:
            on_ranks(ranks, work, kind, tmp_path)


def _one_rank_fails(rank, folder):
    model = wrapped("fsdp", fresh(0))
    if rank == 1:
        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")
        os.fsync = full
    with pytest.raises(UserError):
        save(folder, 1, model, optimizer_of(model))


def test_a_rank_that_fails_stops_all(tmp_path):
    on_ranks(2, _one_rank_fails, tmp_path)
    assert list(tmp_path.iterdir()) == []
