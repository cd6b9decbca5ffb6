"""Which recipe learns most from the same stream: acceptance on prompts never trained on, by tokens and processor time.

`python -m benchmarks.recipes --samples FILE` captures configs/demo.yaml's prompts once with the product's target
worker, then plays them to each recipe in the run's order, through the trainer's own buffer, learner and learning
rates. A recipe is a quoted list of overrides of that config, `'trainer.learning_rate=3e-3 trainer.reuse=2'`; without
any, RECIPES are compared. Ratios are acceptance lengths against the first recipe's. Processor seconds are counted, not
time on the wall, so that a busy machine matters little.
"""

import argparse
import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.machine import machine
from torchspec_lite.acceptance import predict
from torchspec_lite.chat import load_tokenizer
from torchspec_lite.config import Config, load
from torchspec_lite.conversations import Dataset, resolve_files
from torchspec_lite.drafter import init_drafter
from torchspec_lite.learner import Learner
from torchspec_lite.lease import Lease
from torchspec_lite.reuse import Entry, ReuseBuffer
from torchspec_lite.sample import DTYPES, Expectation, Sample, supervised
from torchspec_lite.stream import Receiver, StreamTimeout
from torchspec_lite.target import FrozenHead, TargetInfo, describe, load_head
from torchspec_lite.target_folder import cache_dir, resolve_target
from torchspec_lite.teacher import TeacherStatistics, teacher_statistics
from torchspec_lite.vocab import choose_draft_vocab
from workers.engine import engine_env
from workers.group import Group

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
RECIPES = ["", "trainer.batch_tokens=2048", "trainer.batch_tokens=256", "trainer.learning_rate=5e-4",
           "trainer.learning_rate=2e-3", "trainer.optimizer=muon", "trainer.loss=log_acceptance", "trainer.reuse=1"]
CHECKS = (0.25, 0.5, 0.75, 1.0)  # shares of the stream after which acceptance is measured

Known = tuple[Sample, TeacherStatistics]


@dataclass(frozen=True)
class Check:
    """Acceptance length as serving would have it, after so many streamed tokens (those in the buffer included),
    trained tokens (each pass counts) and seconds of processor time in optimizer steps."""

    streamed: int
    trained: int
    steps: int
    cpu_s: float
    acceptance_length: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", help="each one a quoted list of overrides, '' for the config as it is")
    parser.add_argument("--samples", type=Path, required=True, help="captured samples; made if the file is missing")
    parser.add_argument("--held-out", action="append", default=[], help="conversation file to measure on (several: "
                        "repeat); without: the demo's own")
    parser.add_argument("--held-out-prompts", type=int, default=20, help="of each held-out file")
    parser.add_argument("--prompts", type=int, default=900, help="training prompts to capture")
    parser.add_argument("--tokens", type=int, help="streamed tokens to play (without: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    # Before vLLM is imported, which is where samples are captured.
    os.environ.update(engine_env(options.threads, gpus=0))
    torch.set_num_threads(options.threads)
    config = load(CONFIG, [f"data.max_prompts={options.prompts}"])
    info = describe(resolve_target(config.target.model))
    if not options.samples.exists():
        captured = asyncio.run(capture(config, info, options.held_out or ["demo"], options.held_out_prompts))
        torch.save([vars(sample) for sample in captured], options.samples)
    head = load_head(info, DTYPES[config.target.dtype])
    known = [(sample, teacher_statistics(sample.last, supervised(sample, "all").mask, head))
             for sample in (Sample(**fields) for fields in torch.load(options.samples))]
    held_out = [pair for pair in known if pair[0].purpose == "held_out"]
    train = sorted((pair for pair in known if pair[0].purpose == "train"), key=lambda pair: pair[0].ordinal)
    train = beginning(train, options.tokens)
    results = []
    for recipe in options.recipes or RECIPES:
        checks = play(load(CONFIG, recipe.split()), info, head, train, held_out)
        results.append({"recipe": recipe, "checks": [asdict(check) for check in checks]})
        if not options.json:
            print(f"{recipe or CONFIG.name:60}", *(f"{c.acceptance_length:.3f} ({c.streamed} tokens, {c.cpu_s:.0f} s)"
                                                   for c in checks), sep="  ", flush=True)
    if options.json:
        first = results[0]["checks"][-1]["acceptance_length"]
        ratios = {result["recipe"] or CONFIG.name: round(result["checks"][-1]["acceptance_length"] / first, 3)
                  for result in results}
        print(json.dumps({"ratios": ratios, "results": results, "machine": machine()}))


def beginning(samples: list[Known], tokens: int | None) -> list[Known]:
    """The first samples that hold `tokens` tokens together; None: all."""
    held = 0
    for place, (sample, _) in enumerate(samples):
        if tokens is not None and held >= tokens:
            return samples[:place]
        held += sample.tokens
    return samples


def play(config: Config, info: TargetInfo, head: FrozenHead, train: list[Known], held_out: list[Known]) -> list[Check]:
    """Train a fresh drafter on the stream as workers.trainer does on one that never lets it wait."""
    options = config.trainer
    torch.manual_seed(options.seed)
    drafter = init_drafter(info, head, config.drafter, vocabulary(config, info, train),
                           torch.Generator().manual_seed(options.seed))
    learner = Learner(drafter, head, options, Group(0, 1, "gloo", None))
    buffer = ReuseBuffer(options.reuse, options.reuse_buffer_mib << 20, options.seed, options.ordered)
    enough = options.batch_tokens * (2 * options.reuse - 1)
    stream, streamed, done, cpu_s, passed, checks = iter(train), 0, 0, 0.0, 0, []
    while True:
        while buffer.tokens < enough and buffer.has_room() and (pair := next(stream, None)) is not None:
            buffer.add(Entry(*pair))
            streamed += pair[0].tokens
        entries = buffer.draw(options.batch_tokens)
        if not entries:
            return checks
        before = time.process_time()
        learner.train([(supervised(entry.sample, options.supervise), entry.statistics) for entry in entries],
                      done / len(train))
        cpu_s += time.process_time() - before
        done += len(buffer.count_pass(entries))
        due = sum(done / len(train) >= share for share in CHECKS)
        if due > passed:
            passed = due
            samples, statistics = zip(*held_out)
            prediction = predict(learner.exportable(), head, samples, config.serve.num_speculative_tokens,
                                 DTYPES[config.target.dtype], statistics)
            checks.append(Check(streamed, learner.tokens, learner.step, cpu_s, prediction.walked))


def vocabulary(config: Config, info: TargetInfo, train: list[Known]) -> torch.Tensor:
    counts = torch.zeros(2, info.vocab_size, dtype=torch.int64)                   # prompt's, answer's
    for sample, _ in train[:config.drafter.vocab_samples]:
        for kind in (0, 1):
            counts[kind] += torch.bincount(sample.token_ids[sample.mask == kind].long(), minlength=info.vocab_size)
    special = [id for id in load_tokenizer(info.path).all_special_ids if id < info.vocab_size]
    return choose_draft_vocab(counts[1], counts[0], config.drafter.draft_vocab_size, special)


class Leases:
    """A coordinator of one target worker: every conversation once, in order."""

    def __init__(self, leases: list[Lease]):
        self._leases = leases
        self.sent = 0

    async def lease(self, worker: str, n: int) -> list[Lease] | None:
        taken, self._leases = self._leases[:n], self._leases[n:]
        return taken or None

    async def captured(self, id: str, attempt: int, tokens: int) -> None:
        self.sent += 1

    async def rejected(self, id: str, attempt: int, reason: str, detail: str) -> None:
        print(f"{id} is left out: {reason}: {detail}", flush=True)

    async def failed(self, id: str, attempt: int, detail: str) -> None:
        raise RuntimeError(f"sample {id} did not get away: {detail}")


async def capture(config: Config, info: TargetInfo, held_out: list[str], held_out_prompts: int) -> list[Sample]:
    """Samples of the config's training prompts and of the first `held_out_prompts` of each held-out file."""
    from workers.target import ReceiverAddress, TargetWorker
    files = resolve_files(config.data.train, "train", cache_dir())
    ids = Dataset(files).order(config.seed, 1, config.data.max_prompts)
    leases = [Lease(id, place, 1, "train", 0) for place, id in enumerate(ids)]
    for file in resolve_files(held_out, "held_out", cache_dir()):
        files.append(file)
        leases[:0] = [Lease(id, 0, 1, "held_out", 0) for id in Dataset([file]).ids[:held_out_prompts]]
    expect = Expectation(info.fingerprint, info.default_layer_ids(), DTYPES[config.target.dtype], info.hidden_size,
                         config.data.max_length)
    receiver = Receiver(config.stream.host, config.stream.budget_mib << 20, config.stream.max_samples, expect)
    worker = TargetWorker("recipes", config, info, files, [ReceiverAddress(receiver.endpoint)])
    try:
        await worker.start()
        work = asyncio.create_task(worker.run(source := Leases(leases)))
        samples = []
        while not work.done() or len(samples) < source.sent:
            try:
                sample = await asyncio.to_thread(receiver.get, 1.0)
            except StreamTimeout:
                continue
            samples.append(sample.clone())
            receiver.release(sample)
        await work
        return samples
    finally:
        await worker.close()
        receiver.close()


if __name__ == "__main__":
    main()
