"""What capturing costs: an engine that streams its states against the same engine without, and bytes on the wire.

Both engines write the same answers to the same prompts, in turns, so that a busy machine slows both alike; the ratio is
the median of the pairs'. A receiver in this process takes the samples and lets them go at once.
"""

import argparse
import asyncio
import json
import os
import statistics
import threading
import time
from dataclasses import dataclass

import psutil

from benchmarks.machine import machine
from torchspec_lite.config import Config, build
from torchspec_lite.sample import DTYPES
from torchspec_lite.stream import Expectation, Receiver, StreamError
from torchspec_lite.target import TargetInfo, describe
from torchspec_lite.target_folder import resolve_target
from workers.engine import engine_args, engine_env

PROMPT_TOKENS = 48
RECEIVE_LIMIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--target", default="smollm2", help="folder, hub name or smollm2")
    parser.add_argument("--pairs", type=int, default=5, help="rounds of each engine")
    parser.add_argument("--requests", type=int, default=16, help="requests at once")
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--cpus", type=float, default=1)
    options = parser.parse_args()
    # Before vLLM is imported, so its imports are further down.
    os.environ.update(engine_env(options.cpus, gpus=0))
    info = describe(resolve_target(options.target))
    config = build({
        "target": {"model": info.path, "max_model_len": 1024},
        "capture": {"max_num_seqs": options.requests, "cpus": options.cpus, "kv_cache_mib": 512},
    }, "benchmark")
    result = asyncio.run(measure(config, info, options)) | {"machine": machine()}
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in {**result["ratios"], **result["figures"]}.items():
            print(f"{name:36} {value:.4g}")


async def measure(config: Config, info: TargetInfo, options: argparse.Namespace) -> dict:
    started = time.monotonic()
    plain = PlainEngine(config, info)
    sink = Sink(config, info)
    captured = CaptureEngine(config, info, sink)
    await captured.worker.start()

    async def rate(engine, round: int) -> Rate:
        start, cpu = time.monotonic(), engine.cpu_seconds()
        answers = (engine.answer(place, round, options.answer_tokens) for place in range(options.requests))
        tokens = sum(await asyncio.gather(*answers))
        return Rate(tokens / (time.monotonic() - start), tokens / (engine.cpu_seconds() - cpu))

    try:
        await rate(plain, -1), await rate(captured, -1)
        pairs = []
        for round in range(options.pairs):
            # The order changes so that neither is always the one that follows the other.
            if round % 2:
                with_capture, without = await rate(captured, round), await rate(plain, round)
            else:
                without, with_capture = await rate(plain, round), await rate(captured, round)
            pairs.append((with_capture, without))
        await captured.worker.flush()
        sink.wait((options.pairs + 1) * options.requests)
        sender, = await captured.worker.sender_stats()
    finally:
        plain.close()
        await captured.worker.close()
        sink.receiver.close()

    def median(name: str, of: int) -> float:
        return statistics.median(vars(pair[of])[name] for pair in pairs)

    return {
        "ratios": {
            "capture_vs_plain": statistics.median(one.per_s / other.per_s for one, other in pairs),
            # The same by the engine's processor time, which a busy machine disturbs less.
            "capture_vs_plain_cpu_time": statistics.median(one.per_cpu_s / other.per_cpu_s for one, other in pairs),
            # All frames of the samples, headers and Arrow metadata included, against the tensors alone.
            "wire_overhead": sender["sent_bytes"] / sink.tensor_bytes,
        },
        "figures": {
            "output_tokens_per_s_with_capture": median("per_s", 0),
            "output_tokens_per_s_without": median("per_s", 1),
            "output_tokens_per_cpu_s_with_capture": median("per_cpu_s", 0),
            "output_tokens_per_cpu_s_without": median("per_cpu_s", 1),
            "bytes_per_token": sink.tensor_bytes / sink.tokens,
            "sender_blocked_s": sender["blocked_s"],
            "seconds": time.monotonic() - started,
        },
    }


@dataclass(frozen=True)
class Rate:
    """Output tokens per second, and per second of the engine process's own processor time."""

    per_s: float
    per_cpu_s: float


class PlainEngine:
    def __init__(self, config: Config, info: TargetInfo):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        capture = config.capture
        self._info = info
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(
            config.target, info.path, max_num_seqs=capture.max_num_seqs, kv_cache_mib=capture.kv_cache_mib,
            gpu_memory_utilization=capture.gpu_memory_utilization, gpus=0,
            max_num_batched_tokens=capture.max_num_batched_tokens, prefix_caching=False, seeds=False)))
        self._processes = psutil.Process().children(recursive=True)

    async def answer(self, place: int, round: int, tokens: int) -> int:
        from workers.ticket import sampling
        params = sampling(None, tokens, 0.0, None)
        params.ignore_eos = True
        async for output in self._engine.generate({"prompt_token_ids": prompt(place, self._info)}, params,
                                                  f"{round}/{place}"):
            pass
        return len(output.outputs[0].token_ids)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._processes)

    def close(self) -> None:
        self._engine.shutdown()
        self._engine = None


class CaptureEngine:
    """The product's target worker, streaming to the sink. Start it after the plain engine: it counts new processes."""

    def __init__(self, config: Config, info: TargetInfo, sink: "Sink"):
        from workers.target import ReceiverAddress, TargetWorker
        self._info, self._endpoint = info, sink.receiver.endpoint
        self._others = psutil.Process().children(recursive=True)
        self.worker = TargetWorker("benchmark", config, info, [], [ReceiverAddress(self._endpoint)])

    async def answer(self, place: int, round: int, tokens: int) -> int:
        from workers.ticket import Ticket, sampling
        ticket = Ticket(f"{round}/{place}", 1, place, "train", self._endpoint, None)
        params = sampling(ticket, tokens, 0.0, None)
        params.ignore_eos = True
        generated, outcome = await self.worker.capture(prompt(place, self._info), params, ticket)
        assert outcome.kind == "sent", outcome
        return len(generated)

    def cpu_seconds(self) -> float:
        return cpu_seconds([child for child in psutil.Process().children(recursive=True) if child not in self._others])


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


class Sink:
    """A receiver that lets every sample go at once and counts."""

    def __init__(self, config: Config, info: TargetInfo):
        expect = Expectation(info.fingerprint, info.default_layer_ids(), DTYPES[config.target.dtype],
                             info.hidden_size, config.target.max_model_len)
        self.receiver = Receiver("127.0.0.1", config.stream.budget_mib << 20, config.stream.max_samples, expect)
        self.tensor_bytes = self.tokens = self.samples = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, samples: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.samples >= samples, RECEIVE_LIMIT_S):
                raise TimeoutError(f"the receiver has {self.samples} of {samples} samples after {RECEIVE_LIMIT_S:g} s")

    def _run(self) -> None:
        try:
            while True:
                sample = self.receiver.get(RECEIVE_LIMIT_S)
                with self._changed:
                    self.samples += 1
                    self.tensor_bytes += sample.nbytes
                    self.tokens += sample.tokens
                    self._changed.notify_all()
                self.receiver.release(sample)
        except StreamError:
            return  # closed


def prompt(place: int, info: TargetInfo) -> list[int]:
    return [(37 * place + 11 * index) % (info.vocab_size - 200) + 100 for index in range(PROMPT_TOKENS)]


if __name__ == "__main__":
    main()
