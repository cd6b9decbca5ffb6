"""What a drafter gains in serving, and what swapping drafters costs those who are being served.

Without --soak: output tokens/s with the drafter against without it, at 1, 4 and 16 requests at once (`speedup_c…`), in
one engine whose drafter is switched off and on in turns, so that a busy machine slows both; and from which acceptance
length on drafting pays at each (`break_even`, for the config), whatever this drafter reaches.

With --soak: an open-loop load (requests arrive by the clock, whether or not others have ended) on a pool, with a swap
of every replica each --swap-every seconds in every second period and none in the others (`failed_requests`,
`p99_with_swaps_vs_without`, `memory_growth`).
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from benchmarks.load import Load, percentile, process_memory
from benchmarks.machine import machine
from torchspec_lite.break_even import break_even, pays_up_to
from torchspec_lite.chat import load_tokenizer, render_prompt
from torchspec_lite.config import build
from torchspec_lite.conversations import Dataset, resolve_files
from torchspec_lite.export import version_path
from torchspec_lite.target_folder import cache_dir, resolve_target

CONCURRENCIES = (1, 4, 16)
WARM_UP_S = 20.0
PERIODS = 4
MEMORY_EVERY_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--drafter", required=True, help="drafter folder, like runs/demo/drafters/v000003")
    parser.add_argument("--target", default="smollm2", help="folder, hub name or smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--prompts", nargs="+", default=["demo"],
                        help="conversation JSONL files; demo: its held-out ones")
    parser.add_argument("--limit", type=int, default=24, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES, help="requests at once to measure at")
    parser.add_argument("--soak", action="store_true", help="hold a load while drafters are swapped")
    parser.add_argument("--minutes", type=float, default=20, help="length of the soak")
    parser.add_argument("--rate", type=float, default=0.5, help="requests that arrive in a second of the soak")
    parser.add_argument("--swap-every", type=float, default=30, help="seconds between swaps")
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    # What Ray and vLLM write goes to standard error, so that the result stands alone.
    standard_output = os.dup(1)
    os.dup2(2, 1)
    target = resolve_target(options.target)
    files = resolve_files(options.prompts, "held_out", cache_dir())
    result = soak(options, target, files) if options.soak else speedups(options, target, files)
    result |= {"machine": machine()}
    os.dup2(standard_output, 1)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in {**result["ratios"], **result["figures"]}.items():
            print(f"{name:32} {value}")


def speedups(options: argparse.Namespace, target: Path, files: list[Path]) -> dict:
    """Ratios speedup_c1, speedup_c4, speedup_c16; what drafting needs to pay at each, and up to where it does."""
    from workers.evaluate import evaluate
    ratios, figures = {}, {}
    for concurrency in options.concurrency:
        found = evaluate(Path(options.drafter), target, files, limit=options.limit, max_tokens=options.max_tokens,
                         num_speculative_tokens=options.num_speculative_tokens, concurrency=concurrency,
                         dtype=options.dtype)
        if found["failed"]:
            raise SystemExit(f"outputs with the drafter are not the target's: {found['differences'][:3]}")
        ratios[f"speedup_c{concurrency}"] = found["speedup"]
        figures |= {f"{name}_c{concurrency}": found[name] for name in
                    ("tokens_per_s", "tokens_per_s_without", "acceptance_length", "near_ties", "prompts")}
    table = {concurrency: round(break_even(figures[f"acceptance_length_c{concurrency}"], ratios[f"speedup_c{concurrency}"]), 3)
             for concurrency in options.concurrency}
    figures["serve.break_even"] = table
    figures["drafting_pays_up_to"] = pays_up_to(table, figures[f"acceptance_length_c{options.concurrency[0]}"])
    return {"ratios": ratios, "figures": figures}


def soak(options: argparse.Namespace, target: Path, files: list[Path]) -> dict:
    """Figures of an open-loop load with swaps and without, in periods that take turns."""
    import ray

    from cluster import pool as serving
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent.parent),
                                                os.environ.get("PYTHONPATH", "")])
    tokenizer = load_tokenizer(target)
    prompts = [render_prompt(tokenizer, dataset.get(id)) for dataset in (Dataset([path]) for path in files)
               for id in dataset.ids[:options.limit]]
    config = build({
        "target": {"model": str(target), "dtype": options.dtype, "max_model_len": 2048},
        "serve": {"port": 0, "replicas": options.replicas, "cpus": 0.5, "model_name": "target",
                  "num_speculative_tokens": options.num_speculative_tokens},
    }, "benchmark")
    with tempfile.TemporaryDirectory(prefix="torchspec-lite-soak-") as folder:
        versions = [str(shutil.copytree(options.drafter, version_path(Path(folder), number))) for number in (1, 2)]
        ray.init(address="local", num_cpus=max(2, options.replicas), include_dashboard=False,
                 object_store_memory=80 << 20, log_to_driver=False)
        try:
            pool = serving.start(config, str(target), versions[0], folder)
            return asyncio.run(_hold(options, pool, versions, prompts))
        finally:
            serving.stop(config)
            ray.shutdown()


async def _hold(options, pool, versions, prompts) -> dict:
    load = Load(pool.url, "target", prompts, options.max_tokens, options.rate)
    await load.run("warm-up", WARM_UP_S)
    memory: list[dict[str, int]] = []
    watching = asyncio.create_task(_watch_memory(memory))
    pauses, swaps = [], 0
    length = options.minutes * 60 / PERIODS
    for period in range(PERIODS):
        swapping = period % 2 == 1
        loading = asyncio.create_task(load.run("with" if swapping else "without", length))
        while swapping:
            await asyncio.wait([loading], timeout=options.swap_every)
            if loading.done():
                break
            for name in await pool.replicas():
                swaps += 1
                pauses.append((await pool.swap(name, versions[swaps % 2]))["load_ms"])
        await loading
    watching.cancel()
    totals = [sum(sizes.values()) for sizes in memory]
    with_swaps, without = load.latencies("with"), load.latencies("without")
    return {
        "ratios": {
            "failed_requests": len(load.failures),
            "swaps": swaps,
            "p99_with_swaps_vs_without": percentile(with_swaps, 99) / percentile(without, 99),
            "memory_growth": _late_growth(totals),
        },
        "figures": {
            "requests": len(with_swaps) + len(without),
            "failures": load.failures[:3],
            "p50_s_without": percentile(without, 50), "p99_s_without": percentile(without, 99),
            "p50_s_with_swaps": percentile(with_swaps, 50), "p99_s_with_swaps": percentile(with_swaps, 99),
            "token_gap_p99_s_without": percentile(load.gaps("without"), 99),
            "token_gap_p99_s_with_swaps": percentile(load.gaps("with"), 99),
            "swap_pause_ms_median": statistics.median(pauses) if pauses else None,
            "swap_pause_ms_p99": percentile(pauses, 99) if pauses else None,
            "memory_mib": [round(total / 2**20) for total in totals],
            "memory_mib_by_process": {name: [round(sizes.get(name, 0) / 2**20) for sizes in memory] for name in memory[-1]},
            "minutes": options.minutes, "rate": options.rate, "replicas": options.replicas,
        },
    }


async def _watch_memory(samples: list[dict[str, int]]) -> None:
    while True:
        samples.append(process_memory())
        await asyncio.sleep(MEMORY_EVERY_S)


def _late_growth(totals: list[int]) -> float:
    """Growth from the second quarter of the soak to the last, by their medians: the first quarter touches memory that is
    then used again."""
    quarter = len(totals) // PERIODS
    return statistics.median(totals[-quarter:]) / statistics.median(totals[quarter:2 * quarter]) - 1


if __name__ == "__main__":
    main()
