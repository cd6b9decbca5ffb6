"""What it costs to learn from served requests: output tokens/s of a replica that captures 10 % or all of them against one
that captures none.

Two replicas with the same drafter answer the same prompts in turns, so that a busy machine slows both alike: one started
without capture (as a pool whose traffic.fraction is 0), one started for it, whose fraction changes from round to round.
A receiver in this process takes the samples and lets them go at once. Ratios are medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

from benchmarks.capture import Sink
from benchmarks.machine import machine
from torchspec_lite.chat import load_tokenizer, render_prompt
from torchspec_lite.config import build
from torchspec_lite.conversations import Dataset, resolve_files
from torchspec_lite.target import describe
from torchspec_lite.target_folder import cache_dir, resolve_target
from workers.engine import engine_env
from workers.target_address import ReceiverAddress

SHARES = {"plain": None, "capture10": 0.1, "capture100": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--drafter", required=True, help="drafter folder, like runs/demo/drafters/v000003")
    parser.add_argument("--target", default="smollm2", help="folder, hub name or smollm2")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each share")
    parser.add_argument("--requests", type=int, default=8, help="requests at once")
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--cpus", type=float, default=1)
    options = parser.parse_args()
    standard_output = os.dup(1)
    os.dup2(2, 1)
    # Before vLLM is imported.
    os.environ.update(engine_env(options.cpus, gpus=0))
    result = asyncio.run(measure(options)) | {"machine": machine()}
    os.dup2(standard_output, 1)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in {**result["ratios"], **result["figures"]}.items():
            print(f"{name:36} {value:.4g}")


async def measure(options: argparse.Namespace) -> dict:
    from workers.server import Replica
    target = resolve_target(options.target)
    info = describe(target)

    async def replica(name: str, fraction: float) -> Replica:
        config = build({
            "target": {"model": str(target), "max_model_len": 1024}, "drafter": {"init_from": options.drafter},
            "serve": {"max_num_seqs": options.requests, "cpus": options.cpus, "port": 0},
            "traffic": {"fraction": fraction, "prefer_low_acceptance": 0.0}}, "benchmark")
        return await Replica.start(config, str(target), options.drafter, name), config

    plain, _ = await replica("plain", 0.0)
    captured, config = await replica("captured", 1.0)
    sink = Sink(config, info)
    prompts = demo_prompts(target, options.requests * (options.rounds + 1))
    rates = {name: [] for name in SHARES}
    try:
        await captured.capture([ReceiverAddress(sink.receiver.endpoint)])
        for round in range(-1, options.rounds):  # the first one warms up
            part = prompts[(round + 1) * options.requests:(round + 2) * options.requests]
            names = list(SHARES)
            for name in names[round % 3:] + names[:round % 3]:
                one = plain if SHARES[name] is None else captured
                one.sampling.fraction = SHARES[name] or 0.0
                rate = await rate_of(one, part, options.answer_tokens)
                if round >= 0:
                    rates[name].append(rate)
        found = await captured.traffic()
    finally:
        plain.close()
        captured.close()
        sink.receiver.close()

    def ratio(name: str) -> float:
        return statistics.median(with_it / without for with_it, without in zip(rates[name], rates["plain"]))

    return {
        "ratios": {"capture10_vs_plain": ratio("capture10"), "capture100_vs_plain": ratio("capture100")},
        "figures": {f"tokens_per_s_{name}": statistics.median(values) for name, values in rates.items()} | {
            "requests_sampled": found["sampled"], "requests_sent": found["sent"], "tokens_sent": found["sent_tokens"],
            "bytes_per_token": found["sent_bytes"] / max(1, found["sent_tokens"]),
            "left_out": sum(found["left_out"].values())},
    }


async def rate_of(replica, prompts: list[list[int]], answer_tokens: int) -> float:
    """Output tokens per second of greedy answers to prompts sent together."""
    from vllm import SamplingParams

    from workers.consent import consent

    async def answer(prompt: list[int]) -> int:
        consent.set(True)
        params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        async for output in replica.engine.generate({"prompt_token_ids": prompt}, params, f"{id(prompt)}-{time.monotonic_ns()}"):
            written = len(output.outputs[0].token_ids)
        return written

    start = time.monotonic()
    tokens = sum(await asyncio.gather(*(asyncio.create_task(answer(prompt)) for prompt in prompts)))
    return tokens / (time.monotonic() - start)


def demo_prompts(target: Path, count: int) -> list[list[int]]:
    tokenizer, dataset = load_tokenizer(target), Dataset(resolve_files(["demo"], "train", cache_dir()))
    return [render_prompt(tokenizer, dataset.get(id), 400) for id in dataset.ids[:count]]


if __name__ == "__main__":
    main()
