"""Measure a drafter as it will serve: acceptance by vLLM's own counters, speed with and without it, equal outputs.

The engine runs in a process of its own (`python -m workers.evaluate FOLDER`), which gets the environment an engine
needs from its birth and gives all memory back at its end.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from torchspec_lite.chat import Reject, load_tokenizer, render_prompt
from torchspec_lite.config import TargetConfig
from torchspec_lite.conversations import Dataset
from torchspec_lite.errors import UserError
from torchspec_lite.export import MANIFEST, verify
from torchspec_lite.target import describe
from workers.engine import engine_args, engine_env
from workers.parent import end_with

EXTENSION = "workers.hot_swap.ServingExtension"
KV_CACHE_MIB = 512
BLOCK_ROUNDS = 4
"""Prompts of one timed block, in multiples of the concurrency: with and without take turns, so that a busy machine
slows both."""
NEAR_TIE_STEPS = 8
"""Two logits this many steps of the engine's data type apart are a near-tie: batch shapes change rounding by that."""
MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
COUNTERS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_draft_tokens": "drafted",
            "vllm:spec_decode_num_accepted_tokens": "accepted"}


@dataclass(frozen=True)
class Request:
    """What a child process measures. `drafter` None: the target alone. `compare`: answers another engine drafted."""

    target: str
    dtype: str
    drafter: str | None
    prompts: list[list[int]]
    num_speculative_tokens: int
    max_tokens: int
    concurrency: int
    gpus: int
    compare: list[list[int]] | None = None


def evaluate(drafter: Path, target: Path, prompts: list[Path], *, num_speculative_tokens: int = 3,
             max_tokens: int = 128, concurrency: int = 8, limit: int | None = None, dtype: str = "bfloat16") -> dict:
    """Serve conversations greedily with a drafter and without it, and compare.

    drafter: servable folder; target: model folder; prompts: conversation JSONL files, of each the first `limit`.
    Returns: acceptance_length (1 + accepted / draft rounds), per_position (share of rounds in which at least i + 1
    drafts were accepted), tokens_per_s and tokens_per_s_without (output tokens), speedup, outputs_equal, near_ties
    (outputs that part where the target's two best logits are within rounding), differences (each parting), failed (some
    output parts elsewhere), and what was measured: prompts, skipped, drafts, tokens, engines.
    On a CPU one engine does both in turns, its drafter switched off and on, and `speedup` is the median over blocks of
    prompts; elsewhere two engines run one after the other and it is the ratio of the two rates.
    Raises UserError when a folder, a file or the pair of them is unfit.
    """
    if not (Path(drafter) / "config.json").is_file():
        raise UserError(f"drafter {drafter}: no config.json there; give a drafter folder, like "
                        "runs/NAME/drafters/v000001")
    info = describe(target)
    if (Path(drafter) / MANIFEST).is_file():
        verify(Path(drafter), info.fingerprint)
    token_ids, skipped = _render(Path(target), [Path(path) for path in prompts], limit)
    request = {"target": str(Path(target).absolute()), "dtype": dtype, "drafter": str(Path(drafter).absolute()),
               "prompts": token_ids, "num_speculative_tokens": num_speculative_tokens, "max_tokens": max_tokens,
               "concurrency": concurrency, "gpus": int(torch.cuda.is_available())}
    measured = _run_child(request)
    if "without_s" not in measured:
        measured |= _run_child(request | {"drafter": None, "compare": measured["answers"]})
    return _summary(measured, request, skipped)


def render(result: dict) -> str:
    """The result of `evaluate` for people."""
    positions = "  ".join(f"{place}: {rate:.1%}" for place, rate in enumerate(result["per_position"], 1))
    equal = "all equal to the target's own" if result["outputs_equal"] else (
        f"{result['near_ties']} of {result['prompts']} part from the target's own at a near-tie of its two best logits")
    if result["failed"]:
        equal = "SOME OUTPUTS ARE NOT THE TARGET'S: " + json.dumps(
            [parting for parting in result["differences"] if not parting["near_tie"]][:3])
    return "\n".join([
        f"acceptance length   {result['acceptance_length']:.3f}   ({result['drafts']} rounds of "
        f"{result['num_speculative_tokens']} drafts, {result['prompts']} prompts, greedy)",
        f"accepted at         {positions}",
        f"output tokens/s     {result['tokens_per_s']:.1f} with the drafter, {result['tokens_per_s_without']:.1f} without"
        f": {result['speedup']:.2f}x at {result['concurrency']} requests at once",
        f"outputs             {equal}",
    ])


def _render(target: Path, files: list[Path], limit: int | None) -> tuple[list[list[int]], dict[str, str]]:
    tokenizer = load_tokenizer(target)
    token_ids, skipped = [], {}
    for path in files:
        dataset = Dataset([path])
        for id in dataset.ids[:limit]:
            try:
                token_ids.append(render_prompt(tokenizer, dataset.get(id)))
            except Reject as reject:
                skipped[id] = str(reject)
    if not token_ids:
        raise UserError(f"no prompt to answer in {', '.join(map(str, files))}: {skipped or 'no lines'}")
    return token_ids, skipped


def _run_child(request: dict) -> dict:
    # A core stays free: OpenMP threads that wait for one which has no core spin, and the engine crawls.
    environment = os.environ | engine_env(max(1, len(os.sched_getaffinity(0)) - 1), request["gpus"])
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory(prefix="torchspec-lite-eval-") as folder:
        Path(folder, "request.json").write_text(json.dumps(request))
        with open(Path(folder, "log"), "w+") as log:
            # The pipe closes when this process ends, however it ends, and the child ends with it.
            child = subprocess.Popen([sys.executable, "-m", "workers.evaluate", folder], env=environment,
                                     stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
            try:
                child.wait()
            finally:
                child.stdin.close()
                child.wait()
            if child.returncode:
                log.seek(0)
                raise UserError(f"vLLM could not serve target {request['target']} with drafter {request['drafter']}; "
                                "the end of its log:\n" + "".join(log.readlines()[-25:]))
        return json.loads(Path(folder, "result.json").read_text())


def _summary(measured: dict, request: dict, skipped: dict) -> dict:
    drafts, differences = measured["drafts"], measured["differences"]
    speeds = [measured["tokens"] / measured["with_s"], measured["tokens_without"] / measured["without_s"]]
    return {
        "acceptance_length": 1 + measured["accepted"] / drafts if drafts else 1.0,
        "per_position": [count / drafts if drafts else 0.0 for count in measured["per_position"]],
        "tokens_per_s": speeds[0],
        "tokens_per_s_without": speeds[1],
        "speedup": measured["speedup"] if "speedup" in measured else speeds[0] / speeds[1],
        "outputs_equal": not differences,
        "near_ties": sum(parting["near_tie"] for parting in differences),
        "differences": differences,
        "failed": any(not parting["near_tie"] for parting in differences),
        "prompts": len(request["prompts"]),
        "skipped": skipped,
        "drafts": drafts,
        "tokens": measured["tokens"],
        "engines": measured["engines"],
        "num_speculative_tokens": request["num_speculative_tokens"],
        "max_tokens": request["max_tokens"],
        "concurrency": request["concurrency"],
        "dtype": request["dtype"],
    }


class _Engine:
    """One vLLM engine in this process, and the times and answers it gave with its drafter and without."""

    def __init__(self, request: Request):
        from vllm import LLM
        self.request = request
        needed = max(map(len, request.prompts)) + request.max_tokens + request.num_speculative_tokens + 1
        target = TargetConfig(model=request.target, dtype=request.dtype, max_model_len=max(needed, 64))
        args = engine_args(target, request.target, max_num_seqs=request.concurrency, kv_cache_mib=KV_CACHE_MIB,
                           gpu_memory_utilization=0.9, gpus=request.gpus, max_num_batched_tokens=None,
                           prefix_caching=False, seeds=False)
        args.pop("enable_log_requests")
        if request.drafter is not None:
            args["speculative_config"] = {"method": "eagle3", "model": request.drafter,
                                          "num_speculative_tokens": request.num_speculative_tokens}
            args["worker_extension_cls"] = EXTENSION
        self.llm = LLM(**args, disable_log_stats=False, logprobs_mode="raw_logits")

    def can_switch(self) -> bool:
        return self.request.drafter is not None and all(self.llm.collective_rpc("drafting", args=(False,)))

    def answer(self, prompts: list[list[int]], **options) -> tuple[list, float]:
        from vllm import SamplingParams
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": self.request.max_tokens} | options)
        begin = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs], time.perf_counter() - begin

    def answers(self, block: list[list[int]], drafting: bool | None) -> tuple[list[list[int]], float]:
        """Answers to a block and the seconds it took; `drafting` None leaves the drafter as it is."""
        if drafting is not None:
            self.llm.collective_rpc("drafting", args=(drafting,))
        outputs, seconds = self.answer(block)
        return [list(output.token_ids) for output in outputs], seconds

    def counters(self) -> dict:
        counts = {name: 0 for name in COUNTERS.values()}
        counts["per_position"] = [0] * self.request.num_speculative_tokens
        for metric in self.llm.get_metrics():
            if metric.name in COUNTERS:
                counts[COUNTERS[metric.name]] += metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                counts["per_position"] = list(metric.values)
        return counts

    def parting(self, place: int, alone: list[int], drafted: list[int]) -> dict:
        """Where two answers to a prompt part, and whether the target's two best logits are a near-tie there."""
        position = next((i for i, pair in enumerate(zip(alone, drafted)) if pair[0] != pair[1]),
                        min(len(alone), len(drafted)))
        (output,), _ = self.answer([self.request.prompts[place] + alone[:position]], max_tokens=1, logprobs=2)
        best = sorted(((entry.logprob, token) for token, entry in output.logprobs[0].items()), reverse=True)[:2]
        (first, _), (second, _) = best
        step = 2.0 ** (math.floor(math.log2(max(abs(first), 1e-6))) - MANTISSA_BITS[self.request.dtype])
        tokens = [answer[position] if position < len(answer) else None for answer in (alone, drafted)]
        return {"prompt": place, "position": position, "tokens": tokens, "logits": [first, second],
                "near_tie": first - second <= NEAR_TIE_STEPS * step and {token for _, token in best} == set(tokens)}


def _measure(request: Request) -> dict:
    engine = _Engine(request)
    switch = engine.can_switch()
    size = BLOCK_ROUNDS * request.concurrency
    blocks = [request.prompts[start:start + size] for start in range(0, len(request.prompts), size)]
    modes = [False, True] if switch else [None]
    for mode in modes:
        engine.answers(blocks[0][:request.concurrency], mode)
    before = engine.counters()
    answers, rates, seconds = {mode: [] for mode in modes}, {mode: [] for mode in modes}, dict.fromkeys(modes, 0.0)
    for number, block in enumerate(blocks):
        for mode in modes if number % 2 else modes[::-1]:
            found, took = engine.answers(block, mode)
            answers[mode] += found
            seconds[mode] += took
            rates[mode].append(sum(map(len, found)) / took)
    after = engine.counters()
    alone, drafted = answers[modes[0]], answers[modes[-1]]
    result = {"engines": 1 if switch else 2}
    if switch:
        result["speedup"] = statistics.median(on / off for off, on in zip(rates[False], rates[True], strict=True))
    if request.drafter is not None:
        result |= {name: after[name] - before[name] for name in COUNTERS.values()}
        result["per_position"] = [b - a for a, b in zip(before["per_position"], after["per_position"], strict=True)]
        result |= {"with_s": seconds[modes[-1]], "tokens": sum(map(len, drafted)), "answers": drafted}
    if switch or request.drafter is None:
        if switch:
            engine.llm.collective_rpc("drafting", args=(False,))
        else:
            drafted = request.compare
        result |= {"without_s": seconds[modes[0]], "tokens_without": sum(map(len, alone)), "differences": [
            engine.parting(place, *pair) for place, pair in enumerate(zip(alone, drafted, strict=True))
            if pair[0] != pair[1]]}
    return result


if __name__ == "__main__":
    end_with(sys.stdin.fileno())
    place = Path(sys.argv[1])
    asked = Request(**json.loads((place / "request.json").read_text()))
    (place / "result.json").write_text(json.dumps(_measure(asked)))
