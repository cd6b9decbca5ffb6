"""Steady requests to a pool, whole and streamed, each answer held against the target's own."""

import asyncio
import json
import threading

import httpx

GAP_S = 0.15
REQUEST_LIMIT_S = 120


class SteadyLoad:
    """Requests by the clock from a thread of its own while the `with` block runs.

    `ended`: answers that were right. `failures`: what else happened, in words. `broken`: streams that ended early after
    their first byte, which no server can take back.
    """

    def __init__(self, url: str, model: str, texts: list[tuple[list[int], list[int]]]):
        self.url, self.model, self.texts = url, model, texts
        self.ended, self.failures, self.broken = 0, [], []
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._send()))

    def __enter__(self) -> "SteadyLoad":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stopping.set()
        self.thread.join(REQUEST_LIMIT_S)
        if self.thread.is_alive():
            self.failures.append(f"requests were not answered within {REQUEST_LIMIT_S} s")

    async def _send(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (httpx.AsyncClient(base_url=self.url, timeout=REQUEST_LIMIT_S, limits=limits) as client,
                    asyncio.TaskGroup() as requests):
            number = 0
            while not self.stopping.is_set():
                requests.create_task(self._request(client, *self.texts[number % len(self.texts)], number % 2 == 1))
                number += 1
                await asyncio.sleep(GAP_S)

    async def _request(self, client: httpx.AsyncClient, prompt: list[int], answer: list[int], stream: bool) -> None:
        asked = {"model": self.model, "prompt": prompt, "max_tokens": len(answer), "temperature": 0, "stream": stream,
                 "return_token_ids": True}
        got, finished = [], False
        try:
            async with client.stream("POST", "/v1/completions", json=asked) as response:
                response.raise_for_status()
                if stream:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            piece = json.loads(line.removeprefix("data: "))["choices"][0]
                            got += piece["token_ids"]
                            finished |= piece["finish_reason"] is not None
                else:
                    got, finished = json.loads(await response.aread())["choices"][0]["token_ids"], True
        except httpx.HTTPError as error:
            (self.broken if got else self.failures).append(f"{type(error).__name__}: {error}")
            return
        if not finished and got:
            self.broken.append(f"{len(got)} of {len(answer)} tokens")
        elif got != answer:
            self.failures.append(f"answered {got}, the target says {answer}")
        else:
            self.ended += 1
