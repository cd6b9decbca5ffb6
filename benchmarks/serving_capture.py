"""What it costs to learn from served requests: output tokens/s of a replica that captures 10 % or all of them against one
that captures none.

Two replicas with the same drafter answer the same prompts in turns, so that a busy machine slows both alike: one started
without capture (as a pool whose traffic.fraction is 0), one started for it, whose fraction changes from round to round.
A receiver in this process takes the samples and lets them go at once. Ratios are medians over the rounds.
`second_answers_vs_plain`: all captured, and up to half as many requests again of the engine's own for the trainers
(`traffic.second_answers`); only users' tokens count.

In bf16 the order in which requests meet in a batch changes rounding, with capture or without: `answers_equal` of
`answers_compared` answers are the same with all requests captured as with none, and `widest_parting` is by how many nats
at most the target preferred its first token to its second where two answers part.
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

SHARES = {"plain": None, "capture10": 0.1, "capture100": 1.0, "second_answers": 1.0}


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
            "serve": {"max_num_seqs": 2 * options.requests, "cpus": options.cpus, "port": 0},
            "traffic": {"fraction": fraction, "prefer_low_acceptance": 0.0, "second_answers": int(fraction > 0),
                        "second_answers_below": options.requests * 3 // 2}}, "benchmark")
        return await Replica.start(config, str(target), options.drafter, name), config

    plain, _ = await replica("plain", 0.0)
    captured, config = await replica("captured", 1.0)
    sink = Sink(config, info)
    prompts = demo_prompts(target, options.requests * (options.rounds + 1))
    rates, answers = {name: [] for name in SHARES}, {name: [] for name in SHARES}
    try:
        await captured.capture([ReceiverAddress(sink.receiver.endpoint)])
        for round in range(-1, options.rounds):  # the first one warms up
            part = prompts[(round + 1) * options.requests:(round + 2) * options.requests]
            names = list(SHARES)
            shift = round % len(names)
            for name in names[shift:] + names[:shift]:
                one = plain if SHARES[name] is None else captured
                one.sampling.fraction = SHARES[name] or 0.0
                captured.second_answers(name == "second_answers")
                rate, written = await rate_of(one, part, options.answer_tokens)
                captured.second_answers(False)
                await asyncio.gather(*captured.sampling.second.answering)  # none runs beside the next one's requests
                if round >= 0:
                    rates[name].append(rate)
                    answers[name] += written
        found = await captured.traffic()
        pairs = list(zip(prompts[options.requests:], answers["plain"], answers["capture100"]))
        margins = [await margin(plain, *pair) for pair in pairs if pair[1] != pair[2]]
    finally:
        plain.close()
        captured.close()
        sink.receiver.close()

    def ratio(name: str) -> float:
        return statistics.median(with_it / without for with_it, without in zip(rates[name], rates["plain"]))

    return {
        "ratios": {f"{name}_vs_plain": ratio(name) for name in SHARES if name != "plain"},
        "figures": {f"tokens_per_s_{name}": statistics.median(values) for name, values in rates.items()} | {
            "requests_sampled": found["sampled"], "second_answers": found["second_answers"],
            "requests_sent": found["sent"], "tokens_sent": found["sent_tokens"],
            "bytes_per_token": found["sent_bytes"] / max(1, found["sent_tokens"]),
            "left_out": sum(found["left_out"].values()), "answers_compared": len(pairs),
            "answers_equal": len(pairs) - len(margins), "widest_parting": max(margins, default=0.0)},
    }


async def rate_of(replica, prompts: list[list[int]], answer_tokens: int) -> tuple[float, list[list[int]]]:
    """Output tokens per second of greedy answers to prompts sent together, and the answers."""
    async def one(prompt: list[int]) -> list[int]:
        return list((await answer(replica, prompt, max_tokens=answer_tokens, ignore_eos=True)).token_ids)

    start = time.monotonic()
    written = await asyncio.gather(*(asyncio.create_task(one(prompt)) for prompt in prompts))
    return sum(map(len, written)) / (time.monotonic() - start), written


async def answer(replica, prompt: list[int], **options):
    """vLLM's greedy completion of a prompt, of a user who lets it be captured."""
    from vllm import SamplingParams

    from workers.consent import consent
    consent.set(True)
    params = SamplingParams(temperature=0.0, detokenize=False, **options)
    async for output in replica.engine.generate({"prompt_token_ids": prompt}, params, f"{id(prompt)}-{time.monotonic_ns()}"):
        pass
    return output.outputs[0]


async def margin(replica, prompt: list[int], one: list[int], other: list[int]) -> float:
    """By how many nats the target prefers its first token to its second where two answers part."""
    position = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
    (best,) = (await answer(replica, prompt + one[:position], max_tokens=1, logprobs=2)).logprobs
    first, second = sorted((entry.logprob for entry in best.values()), reverse=True)[:2]
    return first - second


def demo_prompts(target: Path, count: int) -> list[list[int]]:
    tokenizer, dataset = load_tokenizer(target), Dataset(resolve_files(["demo"], "train", cache_dir()))
    return [render_prompt(tokenizer, dataset.get(id), 400) for id in dataset.ids[:count]]


if __name__ == "__main__":
    main()
