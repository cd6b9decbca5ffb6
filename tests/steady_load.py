"""Steady requests to a pool, whole and streamed, each answer held against the target's own."""

import asyncio
import json
import threading

import httpx

GAP_S = 0.15
REQUEST_LIMIT_S = 120
AT_EACH_END = 4
LATER_ONES = 8


class SteadyLoad:
    """Requests by the clock from a thread of its own while the `with` block runs, and a few before and after.

    `ended`: answers that were right. `failures`: what else happened, in words. `broken`: streams that ended early after
    their first byte, which no server can take back.
    """

    def __init__(self, url: str, model: str, texts: list[tuple[list[int], list[int]]]):
        self.url, self.model, self.texts = url, model, texts
        self.ended, self.failures, self.broken = 0, [], []
        self.open, self.newest = set(), 0  # numbers of the requests without an answer, and of the last answered one
        self.stopping, self.news = threading.Event(), threading.Condition()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._send()))

    def __enter__(self) -> "SteadyLoad":
        self.thread.start()
        self._wait_for_answers()
        return self

    def __exit__(self, *_) -> None:
        self._wait_for_answers()
        self.stopping.set()
        self.thread.join(REQUEST_LIMIT_S)
        if self.thread.is_alive():
            self.failures.append(f"requests were not answered within {REQUEST_LIMIT_S} s")

    def wait_for_stuck(self) -> None:
        """Until a request has no answer though several later ones have: it is with a replica that does not work."""
        self._wait(lambda: self.open and min(self.open) < self.newest - LATER_ONES, "one that others overtake")

    def _wait_for_answers(self) -> None:
        most = self.ended + AT_EACH_END
        self._wait(lambda: self.ended >= most, f"{AT_EACH_END} answers")

    def _wait(self, condition, what: str) -> None:
        with self.news:
            if not self.news.wait_for(lambda: condition() or self.failures, REQUEST_LIMIT_S):
                self.failures.append(f"waited {REQUEST_LIMIT_S} s for {what}")

    async def _send(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (httpx.AsyncClient(base_url=self.url, timeout=REQUEST_LIMIT_S, limits=limits) as client,
                    asyncio.TaskGroup() as requests):
            number = 0
            while not self.stopping.is_set():
                requests.create_task(self._numbered(client, number))
                number += 1
                await asyncio.sleep(GAP_S)

    async def _numbered(self, client: httpx.AsyncClient, number: int) -> None:
        """Of each two rounds over the texts one is streamed."""
        turn, place = divmod(number, len(self.texts))
        self.open.add(number)
        await self._request(client, *self.texts[place], turn % 2 == 1)
        with self.news:
            self.open.remove(number)
            self.newest = max(self.newest, number)
            self.news.notify_all()

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
        except (httpx.HTTPError, KeyError, ValueError) as error:
            (self.broken if got else self.failures).append(f"{type(error).__name__}: {error}")
            return
        if not finished and got:
            self.broken.append(f"{len(got)} of {len(answer)} tokens")
        elif got != answer:
            self.failures.append(f"answered {got}, the target says {answer}")
        else:
            self.ended += 1
