"""An open-loop load on an OpenAI-compatible endpoint: requests arrive by the clock, whether or not others ended."""

import asyncio
import json
import math
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import httpx
import psutil

REQUEST_LIMIT_S = 300.0


@dataclass
class Load:
    """Streamed completions of prompts (token ids), `rate` a second on average, Poisson arrivals from a fixed seed.

    What happened is kept by the name of the period in which a request arrived.
    """

    url: str
    model: str
    prompts: list[list[int]]
    max_tokens: int
    rate: float
    failures: list[str] = field(default_factory=list)
    ended: dict[str, list[tuple[float, list[float]]]] = field(default_factory=lambda: defaultdict(list))
    arrivals: random.Random = field(default_factory=lambda: random.Random(0))

    async def run(self, period: str, seconds: float) -> None:
        """Send for so many seconds; returns when all these requests have ended."""
        begin, due, tasks = time.monotonic(), 0.0, []
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_LIMIT_S, limits=limits) as client:
            while (due := due + self.arrivals.expovariate(self.rate)) < seconds:
                await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
                tasks.append(asyncio.create_task(self._request(client, period, self.arrivals.choice(self.prompts))))
            await asyncio.gather(*tasks)

    def latencies(self, period: str) -> list[float]:
        """Seconds from sending to the last token, of each request that ended well."""
        return [seconds for seconds, _ in self.ended[period]]

    def gaps(self, period: str) -> list[float]:
        """Seconds between two pieces of one streamed answer, over all answers."""
        return [gap for _, gaps in self.ended[period] for gap in gaps]

    async def _request(self, client: httpx.AsyncClient, period: str, prompt: list[int]) -> None:
        asked = {"model": self.model, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0, "stream": True}
        begin, pieces, finished = time.monotonic(), [], False
        try:
            async with client.stream("POST", "/v1/completions", json=asked) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        pieces.append(time.monotonic())
                        finished |= json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] is not None
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            self.failures.append(f"{period}: {type(error).__name__}: {error}")
            return
        if not finished:
            self.failures.append(f"{period}: the stream ended after {len(pieces)} pieces without a finish reason")
            return
        gaps = [later - earlier for earlier, later in zip(pieces, pieces[1:])]
        self.ended[period].append((time.monotonic() - begin, gaps))


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` percent of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def process_memory() -> dict[str, int]:
    """Bytes of anonymous memory of all processes under this one, by what they call themselves.

    Not proportional set sizes: those grow when a stranger that maps the same libraries ends.
    """
    sizes = defaultdict(int)
    for process in psutil.Process().children(recursive=True):
        try:
            name = PurePath((process.cmdline() or [process.name()])[0]).name
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (psutil.NoSuchProcess, OSError):
            continue
        # Ray adds the method that runs to its processes' names.
        sizes[name.partition(".")[0]] += sum(int(line.split()[1]) << 10 for line in status.splitlines()
                                             if line.startswith("RssAnon:"))
    return dict(sizes)
