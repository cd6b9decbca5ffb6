"""One training step of an EAGLE 3.1 drafter on SmolLM2-135M's shapes, beside a plain PyTorch one, in one run.

`python -m benchmarks.train_step --json` prints one JSON object; `--grid` measures every case of the table, `--memory`
the peak by document length. A step is all that a new sample costs: the target's statistics, forward, backward,
clipping and AdamW. Repetitions of all contestants and of a bf16 matrix product are interleaved and medians are given,
so that a busy machine slows all alike; at its turn each takes steps for a second before one counts, as in a training
run, where memory that another program's step gave back need not be fetched from the system again.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks.machine import machine
from benchmarks.plain_reference import PlainDrafter, PlainTrainer
from torchspec_lite.batch import Batch, pack, supervised_places
from torchspec_lite.config import DrafterConfigSection, TrainerConfig
from torchspec_lite.drafter import Drafter, init_drafter
from torchspec_lite.optim import make_optimizers, update
from torchspec_lite.sample import Sample
from torchspec_lite.target import FrozenHead, TargetInfo
from torchspec_lite.teacher import teacher_statistics
from torchspec_lite.unroll import unroll_loss

TARGET = TargetInfo("", "SmolLM2-135M shapes", "", 576, 1536, 30, 9, 3, 64, 49152, 1e-5, 100000.0,
                    {"rope_type": "default", "rope_theta": 100000.0}, 8192)
DECAY = 0.8
WARM_S = 1.0   # at least one step, and steps for this long, before one counts
SQUARE = 2048  # rows, columns and depth of the product that the machine's rate is taken from


@dataclass(frozen=True)
class Case:
    """`vocabulary` None: the target's. `supervised`: share of the tokens that are answer, behind the prompt."""

    vocabulary: int | None = 8192
    tokens: int = 512
    steps: int = 7
    supervised: float = 0.5
    dtype: str = "bfloat16"
    recompute: bool = False

    @property
    def name(self) -> str:
        return (f"D {self.vocabulary or 'full'}, T {self.tokens}, K {self.steps}, {self.supervised:.0%} supervised, "
                f"{self.dtype}{', recompute' if self.recompute else ''}")


HALF, LONG, QUARTER_PROMPT = Case(), Case(tokens=2048), Case(supervised=0.75)
GRID = [Case(vocabulary, tokens, steps, supervised, dtype)
        for vocabulary in (8192, None) for tokens in (512, 2048) for steps in (7, 4) for supervised in (1.0, 0.5)
        for dtype in ("bfloat16", "float32")]


def frozen_head(dtype: torch.dtype) -> FrozenHead:
    generator = torch.Generator().manual_seed(1)
    embed = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator).mul_(0.1).to(dtype)
    return FrozenHead(embed, torch.ones(TARGET.hidden_size), TARGET.rms_norm_eps, embed)


def fresh_drafter(case: Case, head: FrozenHead) -> Drafter:
    size = case.vocabulary or TARGET.vocab_size
    draft_ids = torch.linspace(0, TARGET.vocab_size - 1, size).round().long()
    options = DrafterConfigSection(draft_vocab_size=case.vocabulary)
    return init_drafter(TARGET, head, options, draft_ids, torch.Generator().manual_seed(2))


def make_sample(case: Case) -> Sample:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(case.tokens - 1, 4, TARGET.hidden_size, generator=generator).to(getattr(torch, case.dtype))
    mask = torch.zeros(case.tokens, dtype=torch.uint8)
    mask[round(case.tokens * (1 - case.supervised)):] = 1
    tokens = torch.randint(0, TARGET.vocab_size, (case.tokens,), generator=generator, dtype=torch.int32)
    return Sample("sample", 0, 0, "train", "", TARGET.default_layer_ids(), tokens, mask, states[:, :3], states[:, 3])


class Fast:
    """The product's training step."""

    def __init__(self, case: Case):
        self.case, self.head = case, frozen_head(getattr(torch, case.dtype))
        self.drafter, self.sample = fresh_drafter(case, self.head), make_sample(case)
        self.optimizers = make_optimizers(self.drafter, TrainerConfig())

    def batch(self) -> Batch:
        return pack([self.sample], [teacher_statistics(self.sample.last, self.sample.mask, self.head)])

    def step(self) -> float:
        result = unroll_loss(self.drafter, self.head, self.batch(), self.case.steps, DECAY, dtype=self.head.lm_head.dtype,
                             recompute=self.case.recompute)
        result.loss.backward()
        update(self.optimizers, 1e-4, 1.0)
        return float(result.loss.detach())


class Plain:
    """The plain reference's training step."""

    def __init__(self, case: Case):
        dtype = getattr(torch, case.dtype)
        head, sample = frozen_head(dtype), make_sample(case)
        self.trainer = PlainTrainer(PlainDrafter(fresh_drafter(case, head), dtype))
        pad = (0, 0, 0, 1)
        self.inputs = (head, sample.token_ids[None].long(), sample.mask[None],
                       torch.nn.functional.pad(sample.aux, (0, 0, *pad))[None],
                       torch.nn.functional.pad(sample.last, pad)[None], case.steps, DECAY)

    def step(self) -> float:
        return self.trainer.step(*self.inputs)


def least_work(case: Case) -> float:
    """Floating-point operations that the step's mathematics needs: products only, nothing computed twice."""
    info, mask = TARGET, make_sample(case).mask
    places = supervised_places(mask, torch.tensor([0, case.tokens]), case.steps)  # [K, T]
    later = places.flip(0).cummax(0).values.flip(0)                         # rows that a step must compute
    rows = later.sum(1).tolist()
    keys = int(later[0].nonzero().max()) + 1
    tokens = int((later.sum(0) + torch.arange(case.tokens)).max()) + 1
    pairs = int((later * torch.arange(1, case.tokens + 1)).sum())           # a row and a step-0 key that it sees
    targets = int((mask[:-1] & mask[1:]).sum()) - 1                         # the first of them no row can predict
    hidden, width = info.hidden_size, info.num_attention_heads * info.head_dim
    kv = 2 * info.num_key_value_heads * info.head_dim
    layer = width * hidden + 3 * hidden * info.intermediate_size            # o_proj, gate, up, down
    products = 2 * keys * 3 * hidden * hidden + 2 * tokens * hidden * (width + kv)  # frozen inputs: 2 products, not 3
    products += 3 * (keys * hidden * kv + rows[0] * hidden * width + sum(rows[1:]) * hidden * (width + kv))
    products += 3 * (sum(rows) * layer + 2 * pairs * width)
    products += 3 * int(places.sum()) * hidden * (case.vocabulary or info.vocab_size)
    return 2.0 * (products + targets * hidden * info.vocab_size)


def contest(contestants: dict, repetitions: int, clock=time.perf_counter) -> dict[str, float]:
    """Median seconds of each contestant's step behind others of its own; rounds of all are interleaved."""
    seconds = {name: [] for name in contestants}
    for _ in range(repetitions):
        for name, step in contestants.items():
            warm = clock()
            step()
            while clock() - warm < WARM_S:
                step()
            start = clock()
            step()
            seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def product_steps() -> dict:
    """A bf16 and an fp32 square product, whose rates are the machine's."""
    steps = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(SQUARE, SQUARE).to(dtype) for _ in range(2))
        steps[f"product {str(dtype).removeprefix('torch.')}"] = lambda a=a, b=b: a @ b
    return steps


def row(case: Case, seconds: float, rate: float) -> dict:
    work = least_work(case)
    return {"case": case.name, **asdict(case), "seconds": round(seconds, 4), "tokens_per_s": round(case.tokens / seconds),
            "gflop": round(work / 1e9, 1), "gflop_per_s": round(work / seconds / 1e9),
            "share_of_product_rate": round(work / seconds / rate, 3)}


def measure(cases: list[Case], plain: list[Case], repetitions: int, clock) -> tuple[list[dict], dict]:
    """Rows of all cases, and the machine's product rates in FLOP/s."""
    contestants = product_steps()
    contestants |= {f"fast {case.name}": Fast(case).step for case in cases}
    contestants |= {f"plain {case.name}": Plain(case).step for case in plain}
    seconds = contest(contestants, repetitions, clock)
    rates = {name.split()[1]: 2 * SQUARE**3 / taken for name, taken in seconds.items() if name.startswith("product")}
    rows = [{"way": way} | row(case, seconds[f"{way} {case.name}"], rates[case.dtype])
            for way, chosen in (("fast", cases), ("plain", plain)) for case in chosen]
    return rows, rates


def _peak(case: Case, way: str, threads: int, pipe) -> None:
    torch.set_num_threads(threads)
    contestant = (Fast if way == "fast" else Plain)(case)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    contestant.step()
    pipe.send((before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter() - start))


def peak_memory(case: Case, way: str) -> dict:
    """Peak resident memory of one step in a process of its own, MiB: `step` beyond weights and sample, `process` in all."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_peak, args=(case, way, torch.get_num_threads(), theirs))
    process.start()
    theirs.close()
    try:
        before, after, seconds = ours.recv()
    except EOFError:
        raise RuntimeError(f"{way} {case.name}: the process died before it answered (out of memory?)") from None
    finally:
        process.join()
    return {"way": way, "case": case.name, "tokens": case.tokens, "step_mib": (after - before) // 1024,
            "process_mib": after // 1024, "first_step_s": round(seconds, 1)}


def memory_table(longest: int) -> list[dict]:
    rows, tokens = [], 2048
    while tokens <= longest:
        for recompute in (False, True):
            rows.append(peak_memory(Case(tokens=tokens, recompute=recompute), "fast"))
        tokens *= 2
    return rows


def ratios(rows: list[dict]) -> dict:
    def seconds(way, case):
        return next(row["seconds"] for row in rows if row["way"] == way and row["case"] == case.name)

    quarter = next(row for row in rows if row["case"] == QUARTER_PROMPT.name)
    return {
        "half_supervised_vs_fp32": round(seconds("plain", replace(HALF, dtype="float32")) / seconds("fast", HALF), 2),
        "half_supervised_vs_bf16": round(seconds("plain", HALF) / seconds("fast", HALF), 2),
        "long_vs_bf16": round(seconds("plain", LONG) / seconds("fast", LONG), 2),
        "matmul_share": quarter["share_of_product_rate"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--grid", action="store_true", help="every case of the table, not only those of the ratios")
    parser.add_argument("--memory", action="store_true", help="peak memory by document length, up to --longest")
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="for a machine that others use: one thread, its CPU seconds")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.busy else os.cpu_count())
    clock = time.thread_time if options.busy else time.perf_counter
    cases, plain = [HALF, LONG, QUARTER_PROMPT], [HALF, replace(HALF, dtype="float32"), LONG]
    if options.grid:
        cases += [case for case in GRID if case not in cases]
        plain += [case for case in GRID if case.tokens == 512 and case.vocabulary and case not in plain]
    rows, rates = measure(cases, plain, options.repetitions, clock)
    report = {"machine": machine() | {"threads": torch.get_num_threads()}, "product_gflop_per_s": {name: round(rate / 1e9) for name, rate in rates.items()},
              "ratios": ratios(rows), "steps": rows}
    if options.memory:
        report["memory"] = memory_table(options.longest)
    if options.json:
        print(json.dumps(report))
        return
    print(json.dumps({key: value for key, value in report.items() if key not in ("steps", "memory")}, indent=1))
    for entry in rows:
        print(f"{entry['way']:5} {entry['case']:60} {entry['seconds']:8.3f} s {entry['tokens_per_s']:6} tokens/s "
              f"{entry['gflop_per_s']:5} GFLOP/s {entry['share_of_product_rate']:6.1%}")
    for entry in report.get("memory", []):
        print(f"{entry['case']:70} {entry['step_mib']:6} MiB a step, {entry['process_mib']:6} MiB in all")


if __name__ == "__main__":
    main()
