"""A trainer rank without an engine: what it begins with, when it steps, where it predicts."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.chaos.small_run import made_up, small_config
from tests.test_learner import make_learner
from tests.tiny import make_tiny_target
from tests.trainer_rig import MOST_LOOKS, Meeting, RealLine, Told, make_trainer, samples, taking
from torchspec_lite import checkpoint, compiling
from torchspec_lite.config import DrafterConfigSection
from torchspec_lite.drafter import init_drafter
from torchspec_lite.errors import UserError
from torchspec_lite.export import export, load_drafter, versions
from torchspec_lite.sample_order import read_order
from torchspec_lite.target import describe, load_head
from torchspec_lite.vocab import choose_draft_vocab
from workers.first_drafter import deciding_samples


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return describe(make_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Nobody waits: a sample is there or it is not."""
    monkeypatch.setattr("workers.trainer.FEW_S", 0.0)
    monkeypatch.setattr("cluster.coordinator.LONG_POLL_S", 0.01)


@pytest.fixture
def configure(tmp_path, info):
    def configure(prompts=20, name="r", drafter=None, **trainer):
        config = small_config(tmp_path, name, prompts, **trainer)
        return config.model_copy(update={
            "target": config.target.model_copy(update={"model": info.path}),
            "drafter": config.drafter.model_copy(update=drafter or {})})
    return configure


def begun(trainer):
    """A trainer with a fresh drafter, nothing published."""
    trainer.learner = make_learner(trainer.info, trainer.group, batch_tokens=trainer.options.batch_tokens)
    trainer._publish = lambda **options: None
    return trainer


def drafter_of(info, layers):
    return init_drafter(info, load_head(info, torch.float32), DrafterConfigSection(), torch.arange(0, 512, 2),
                        torch.Generator().manual_seed(0), layers)


def feed(line, info):
    """Leases one sample after another and makes it up."""
    def next():
        leases = line.call("lease", "w", 1)
        return made_up(leases[0], info) if leases else None
    return next


# What a run begins with


@pytest.mark.parametrize("came", [0, 3], ids=["none came", "some came"])
def test_a_run_stopped_before_its_vocabulary_is_known_leaves_none(configure, info, closing, came):
    """Ctrl-C while the engine loads, or just after; `--resume` then chooses the vocabulary from the first samples."""
    config = configure(max_steps=1)
    read_order(config, config.run_dir).queue(config.run_dir / "ledger.sqlite", config.trainer.reuse)
    line = closing(RealLine(config))
    given, source = [], feed(line, info)

    def few():
        if len(given) == 2 + came:  # the two held-out ones first
            line.call("stop", "stopped by hand")
            return None
        given.append(source())
        return given[-1]

    trainer = make_trainer(config, info, line, few)
    result = trainer.train(trainer.group)
    assert (result["step"], result["version"], result["tokens"], result["trace"]) == (0, None, 0, None)
    assert checkpoint.newest(config.run_dir / "checkpoints") is None and not versions(config.run_dir / "drafters")
    line.call("settle")
    account = line.call("account")["samples"]
    assert account["queued"] == account["all"] == 20 and not line.call("versions")
    line.close()

    line = closing(RealLine(config))
    resumed = make_trainer(config, info, line, feed(line, info))
    assert resumed.train(resumed.group)["version"] == 1
    first = samples(info, range(deciding_samples(config)))
    counts = [sum(torch.bincount(one.token_ids[one.mask == kind].long(), minlength=512) for one in first) for kind in (1, 0)]
    expected = choose_draft_vocab(*counts, 256, [0, 1, 2])
    assert len(first) == 8 and torch.equal(resumed.learner.drafter.draft_ids, expected)
    assert not torch.equal(expected, torch.arange(256))
    assert checkpoint.read(checkpoint.newest(config.run_dir / "checkpoints")).extra["target"] == info.fingerprint


def test_a_run_that_no_one_stops_begins_with_what_comes(configure, info):
    """Fewer samples than decide the vocabulary, and none is outstanding."""
    trainer = make_trainer(configure(max_steps=1), info, Told(), taking(samples(info, range(3))))
    assert trainer.train(trainer.group)["version"] == 1


def test_the_drafter_to_start_from_says_which_layers_are_taken(configure, info, tmp_path):
    """All of the rank's: what its receiver takes, what it trains, what its versions say, and what it resumes with."""
    folder = export(drafter_of(info, (0, 2, 3)), tmp_path / "old", 7, torch.float32, info, 1, 1, None, None)
    config = configure(drafter={"init_from": str(folder)})
    trainer = make_trainer(config, info, Told())
    assert trainer.train(trainer.group)["version"] == 0
    resumed = make_trainer(config.model_copy(update={"drafter": config.drafter.model_copy(update={"init_from": None})}), info, Told())
    assert resumed.train(resumed.group)["version"] == 0
    written = load_drafter(versions(config.run_dir / "drafters")[0])
    for one in (trainer, resumed):
        assert one._expect().layer_ids == one.learner.drafter.config.layer_ids == written.config.layer_ids == (0, 2, 3)


@pytest.mark.parametrize("change, words", [
    ({"fc_norm": False}, "drafter.fc_norm: .* has true, the config asks for false; set drafter.fc_norm=true"),
    ({"draft_vocab_size": None}, "drafter.draft_vocab_size: .* has 256, the config asks for 512; set drafter.draft_vocab_size=256")])
def test_a_checkpoint_of_another_drafter_is_refused(configure, info, change, words):
    config = configure(max_steps=1)
    trainer = make_trainer(config, info, Told(), taking(samples(info, range(9))))
    trainer.train(trainer.group)
    other = config.model_copy(update={"drafter": config.drafter.model_copy(update=change)})
    with pytest.raises(UserError, match=words):
        make_trainer(other, info, Told()).train(trainer.group)


def test_a_checkpoint_of_another_target_is_refused_but_an_old_one_says_nothing(configure, info, tmp_path):
    config = configure(max_steps=1)
    trainer = make_trainer(config, info, Told(), taking(samples(info, range(9))))
    trainer.train(trainer.group)
    another = describe(make_tiny_target(tmp_path / "another", seed=5))
    with pytest.raises(UserError, match=f"trained on target {info.fingerprint}, but target.model is {another.fingerprint}"):
        make_trainer(config, another, Told()).train(trainer.group)
    path = checkpoint.newest(config.run_dir / "checkpoints")
    extra = checkpoint.read(path).extra
    del extra["target"]
    trainer.learner.step += 1  # a newer one, as it was written before
    trainer.learner.save(path.parent, extra, 3)
    assert make_trainer(config, another, Told()).train(trainer.group)["step"] == trainer.learner.step


# When it steps


def test_ranks_meet_while_one_waits_for_its_first_samples(configure, info):
    """Rank 1's come when all have met three times: until then each would fail who waits without meeting the other."""
    config, meeting = configure(ranks=2), Meeting(2)
    held = [samples(info, range(0, 4)), samples(info, range(4, 8))]

    def late():
        return held[1].popleft() if held[1] and meeting.met >= 3 else None

    lines = [Told(outstanding=lambda first, rank: 0), Told(outstanding=lambda first, rank: len(held[1]))]
    trainers = [make_trainer(config, info, lines[rank], [taking(held[0]), late][rank], rank, meeting.rank(rank)) for rank in (0, 1)]
    assert meeting.run(*(trainer._first_samples_came for trainer in trainers)) == [True, True]
    assert [sorted(entry.sample.ordinal for entry in trainer.buffer.entries.values()) for trainer in trainers] == [
        [0, 1, 2, 3], [4, 5, 6, 7]]
    assert 4 <= meeting.met < 10


def test_no_step_is_taken_while_a_rank_waits_for_its_batch_but_the_ranks_meet(configure, info):
    """A pause of the capture: rank 0 has its batch, rank 1's comes when all have met five times."""
    config, meeting = configure(ranks=2), Meeting(2)
    held = [samples(info, range(0, 30)), samples(info, range(30, 60))]

    def late():
        return held[1].popleft() if held[1] and meeting.met >= 5 else None

    lines = [Told(outstanding=lambda *_, rank=rank: len(held[rank])) for rank in (0, 1)]
    trainers = [begun(make_trainer(config, info, lines[rank], [taking(held[0]), late][rank], rank, meeting.rank(rank)))
                for rank in (0, 1)]
    steps = [[], []]

    def work(rank):
        trainer = trainers[rank]
        while trainer._step():
            steps[rank].append((meeting.met, trainer.learner.step, trainer.learner.tokens))

    meeting.run(lambda: work(0), lambda: work(1))
    waited = [step for step in steps[0] if step[1] == 0]
    assert [met for met, *_ in waited] == [1, 2, 3, 4, 5] and steps[0] == steps[1]
    assert next(tokens for _, step, tokens in steps[0] if step == 1) > 2 * 100  # of at most 128 a rank: both took a whole batch
    for trainer in trainers:
        assert trainer.learner.tokens == sum(12 + ordinal * 7 % 20 for ordinal in range(60)) and trainer.samples_done == 60
        assert not trainer.buffer.entries
    ours, theirs = (dict(trainer.learner.drafter.named_parameters()) for trainer in trainers)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_rank_alone_waits_for_its_batch(configure, info):
    """It meets nobody, and a step of fewer samples would be another one."""
    held, looks = samples(info, range(12)), []

    def now_and_then():
        looks.append(len(held))
        return held.popleft() if held and len(looks) % 7 == 0 else None

    trainer = begun(make_trainer(configure(ordered=True), info, Told(outstanding=lambda *_: len(held)), now_and_then))
    entries = trainer._next_entries()
    assert [entry.sample.ordinal for entry in entries] == [0, 1, 2, 3, 4, 5] and 7 * 6 <= len(looks) < 7 * MOST_LOOKS
    # 12, 19, 26, 13, 20, 27 tokens are 117; the next, of 14, would pass 128, so it is what fills the buffer to a batch.
    assert len(trainer.buffer) == 7 and trainer.buffer.tokens == 131


def test_only_optimizer_steps_count_for_the_trace(configure, info):
    held = samples(info, range(8))
    trainer, traced = begun(make_trainer(configure(), info, Told(coming=1), lambda: None)), []
    trainer.trace = SimpleNamespace(step=lambda: traced.append(trainer.learner.step))
    assert trainer._step() and trainer._step() and not traced  # nothing drawn, but more may come
    trainer.receiver.next = taking(held)
    assert trainer._step() and traced == [1]


# Where it predicts, and without what


def test_nothing_of_a_trainer_without_compile_asks_for_a_kernel(configure, info, monkeypatch):
    def fast(function, *like):
        raise AssertionError(f"a fast form of {function.__name__} was asked for")

    monkeypatch.setattr(compiling, "_fast", fast)
    monkeypatch.setattr(compiling, "_kernel", fast)
    held = samples(info, [-1, -2], "held_out") + samples(info, range(9))
    line = Told()
    trainer = make_trainer(configure(max_steps=2, compile=False), info, line, taking(held))
    assert trainer.train(trainer.group)["step"] == 2
    assert [export.predicted_walked is not None for (export,) in line.of("exported")] == [True, True]
    trainer.options.compile = True
    with pytest.raises(AssertionError, match="summary"):
        trainer._teach(samples(info, [3])[0])


def test_drafters_are_tried_where_training_is_done(configure, info, monkeypatch):
    """Not on the CPU, where all ranks would wait for minutes; there they are only read."""
    trainer = make_trainer(configure(max_steps=1), info, Told(),
                           taking(samples(info, [-1], "held_out") + samples(info, range(9))))
    assert trainer.device_head is not trainer.head  # even where both are on a CPU
    seen = []

    def spy(place):
        function = getattr(sys.modules[place], name := {"workers.trainer": "predict", "workers.publisher": "make_probe"}[place])
        monkeypatch.setattr(f"{place}.{name}", lambda drafter, head, *more, **options: seen.append(
            (name, head is trainer.device_head)) or function(drafter, head, *more, **options))

    spy("workers.trainer")
    spy("workers.publisher")
    trainer.train(trainer.group)
    assert set(seen) == {("predict", True), ("make_probe", True)} and len(seen) == 4
