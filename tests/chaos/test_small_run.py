"""Faults in a run of real processes: after any of them each sample is trained once, and with a fixed order the weights
are those of an undisturbed run, bit for bit."""

import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.harms import dies_before_version_2, jumping_clock, small_disk
from tests.chaos.small_run import Failed, SmallRun, small_config
from tests.tiny import make_tiny_target
from torchspec_lite.export import versions
from torchspec_lite.ledger import Ledger

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SEED = int(os.environ.get("CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
SIGNALS = {"kill -9": signal.SIGKILL, "stopped a while": signal.SIGSTOP}
KINDS = ("target", "trainer", "coordinator")
PROMPTS = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    make_tiny_target(folder / "target")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The last drafter of a run to which nothing happens."""
    config = small_config(folder, "undisturbed", PROMPTS * ROUNDS, ordered=True)
    with SmallRun(config) as run:
        account = run.finish()
    assert account["durable"] == account["all"] == PROMPTS * ROUNDS
    return last_drafter(config)


def last_drafter(config) -> dict[str, torch.Tensor]:
    found = versions(config.run_dir / "drafters")
    return load_file(found[max(found)] / "model.safetensors")


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def count(config, account) -> tuple[int, int]:
    """Samples lost and samples trained more often than they should be, by the ledger's own rows."""
    with closing(Ledger(config.run_dir / "ledger.sqlite", read_only=True)) as ledger:
        passes = dict(ledger._db.execute("SELECT id, COUNT(*) FROM passes GROUP BY id"))
        durable = [row.id for row in ledger.rows("durable") if row.purpose == "train"]
    lost = account["all"] - account["durable"] - account["rejected"] - account["queued"]
    return lost, sum(passes[id] != config.trainer.reuse for id in durable)


def assert_nothing_left(run) -> None:
    """No process of the run, and no memory file of one, is there any more."""
    assert [pid for pid in run.started if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in run.started)]
    assert not [link for link in map(read_link, Path("/proc/self/fd").iterdir()) if "memfd:torchspec-lite" in link]


def read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def disturb(run, table, kinds, prompts) -> list[str]:
    """Each kind and signal ROUNDS times, in random order, spread over the run by its progress."""
    chance = random.Random(SEED)
    faults = [(kind, how) for kind in kinds for how in SIGNALS] * ROUNDS
    chance.shuffle(faults)
    happened = []
    for place, (kind, how) in enumerate(faults):
        due = (place + chance.random()) * prompts / (len(faults) + 1)
        run.until(lambda: run.settled() >= due or run.summary is not None, f"{due:.0f} samples")
        took = run.harm_one(kind, SIGNALS[how], chance)
        if took is not None:
            who = f"one trainer of {run.config.trainer.ranks}" if kind == "trainer" else kind
            happened.append(f"{who}: {how}")
            table.add(happened[-1], took)
    return happened


def test_faults_do_not_change_the_weights(folder, undisturbed, table):
    print(f"seed {SEED}")
    config = small_config(folder, "disturbed", PROMPTS * ROUNDS, ordered=True)
    with SmallRun(config) as run:
        happened = disturb(run, table, KINDS, PROMPTS * ROUNDS)
        account = run.finish()
    lost, twice = count(config, account)
    table.end(happened, lost, twice)
    assert (account["durable"], lost, twice) == (PROMPTS * ROUNDS, 0, 0), f"seed {SEED}: {account}"
    assert len(happened) == len(KINDS) * len(SIGNALS) * ROUNDS, f"seed {SEED}: only {happened} hit the run"
    assert same(last_drafter(config), undisturbed), f"seed {SEED}"
    assert_nothing_left(run)


def test_one_trainer_of_two(folder, table):
    config = small_config(folder, "ranks", PROMPTS * ROUNDS, ranks=2, reuse=2)
    with SmallRun(config) as run:
        happened = disturb(run, table, ["trainer"], PROMPTS * ROUNDS)
        account = run.finish()
    lost, twice = count(config, account)
    table.end(happened, lost, twice)
    assert (account["durable"], lost, twice) == (PROMPTS * ROUNDS, 0, 0), f"seed {SEED}: {account}"
    assert len(happened) == len(SIGNALS) * ROUNDS
    assert_nothing_left(run)


def test_everything_is_killed_at_once_and_resumed(folder, undisturbed, table):
    config = small_config(folder, "resumed", PROMPTS * ROUNDS, ordered=True)
    with SmallRun(config) as first:
        first.until(lambda: first.settled() > PROMPTS // 3, "a third of the samples")
    assert_nothing_left(first)
    begin = time.monotonic()
    with SmallRun(config) as second:
        second.until_trained("everything")
        table.add("everything: kill -9, resumed", time.monotonic() - begin)
        account = second.finish()
    lost, twice = count(config, account)
    table.end(["everything: kill -9, resumed"], lost, twice)
    assert (account["durable"], lost, twice) == (PROMPTS * ROUNDS, 0, 0)
    assert same(last_drafter(config), undisturbed)
    assert_nothing_left(second)


def test_a_version_whose_checkpoint_alone_was_written_is_made_up_for(folder, undisturbed):
    config = small_config(folder, "no-version", PROMPTS * ROUNDS, ordered=True)
    with SmallRun(config, dies_before_version_2) as run:
        account = run.finish()
    assert (config.run_dir / "died").exists() and account["durable"] == PROMPTS * ROUNDS
    found = versions(config.run_dir / "drafters")
    assert list(found) == list(range(max(found) + 1)) and same(last_drafter(config), undisturbed)


def test_a_run_whose_newest_checkpoint_is_broken_goes_on_from_the_one_before(folder, undisturbed):
    config = small_config(folder, "broken", PROMPTS * ROUNDS, ordered=True)
    with SmallRun(config) as first:
        first.finish()
    newest = max((config.run_dir / "checkpoints").glob("step_*"))
    next(newest.glob("*.distcp")).write_bytes(b"")
    with SmallRun(config) as second:
        account = second.finish()
    lost, twice = count(config, account)
    assert (account["durable"], lost, twice) == (PROMPTS * ROUNDS, 0, 0)
    assert same(last_drafter(config), undisturbed)
    assert newest.is_dir() and newest.with_name(f"broken-{newest.name}").is_dir()


@pytest.mark.parametrize("place", ["drafters", "checkpoints"])
def test_a_full_disk_stops_the_run_with_a_reason_and_it_resumes(folder, undisturbed, table, place):
    config = small_config(folder, f"full-{place}", PROMPTS * ROUNDS, ordered=True)
    with small_disk(config.run_dir / place) as (harm, make_room):
        with SmallRun(config, harm) as run, pytest.raises(Failed) as told:
            run.finish()
        assert "no space left on the disk while writing" in str(told.value) and place in str(told.value)
        make_room()
        begin = time.monotonic()
        with SmallRun(config) as run:
            run.until_trained("the run")
            table.add(f"full disk under {place}", time.monotonic() - begin)
            account = run.finish()
        lost, twice = count(config, account)
        table.end([f"full disk under {place}"], lost, twice)
        assert (account["durable"], lost, twice) == (PROMPTS * ROUNDS, 0, 0)
        assert same(last_drafter(config), undisturbed)
        assert not list(config.run_dir.glob(f"{place}/.*"))  # nothing half-written is left


def test_a_clock_that_jumps_changes_nothing(folder, undisturbed, table):
    config = small_config(folder, "clock", PROMPTS * ROUNDS, ordered=True)
    begin = time.monotonic()
    with SmallRun(config, jumping_clock) as run:
        account = run.finish()
    lost, twice = count(config, account)
    table.add("clock jumps by days, all the time", time.monotonic() - begin)
    table.end(["clock jumps by days, all the time"], lost, twice)
    assert (account["durable"], lost, twice) == (PROMPTS * ROUNDS, 0, 0)
    assert same(last_drafter(config), undisturbed)
