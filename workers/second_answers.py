"""Prompts of sampled requests, answered once more for the trainers alone, where the engine has room for it."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm import SamplingParams

from torchspec_lite.sample import MIN_ANSWER_TOKENS
from workers.scheduler import SECOND_PRIORITY
from workers.serving_capture import MARK, SECOND

TEMPERATURE = 1.0
"""At which the target's answers differ from the one that the user got."""
BETWEEN_S = 0.1
KEPT = 64
log = logging.getLogger(__name__)


@dataclass
class Asked:
    """A prompt that waits to be answered again."""

    at: float
    prompt: list[int]
    max_tokens: int
    left: int


def forget_old(prompts: deque, max_age_s: float) -> None:
    """Let go of what came (`at`, oldest first) longer ago than `max_age_s`."""
    oldest = time.monotonic() - max_age_s
    while prompts and prompts[0].at < oldest:
        prompts.popleft()


class SecondAnswers:
    """Answers each remembered prompt `times` times while fewer than `below` requests run, newest prompts first.

    What a trainer learns from few requests is limited by their number; other answers of the target to the same prompts
    are more of the same traffic (benchmarks/recipes.md). `load` gives the requests that run or wait now, second
    answers included; `generate` is the engine's own, past the marking of users' requests. Prompts are in memory only, 64
    at most and for `max_age_s`.
    """

    def __init__(self, generate: Callable, load: Callable[[], int], name: str, times: int, below: int, longest: int,
                 max_age_s: float):
        self.generate, self.load, self.name = generate, load, name
        self.times, self.below, self.longest, self.max_age_s = times, below, longest, max_age_s
        self.wanted = False
        self.prompts: deque[Asked] = deque(maxlen=KEPT)
        self.answering: set[asyncio.Task] = set()
        self.task = asyncio.get_running_loop().create_task(self._run())

    def remember(self, prompt: list[int], max_tokens: int | None) -> None:
        """A sampled request was answered."""
        most = min(self.longest - len(prompt), max_tokens or self.longest)
        if most >= MIN_ANSWER_TOKENS:
            self.prompts.append(Asked(time.monotonic(), prompt, most, self.times))

    def want(self, wanted: bool) -> None:
        """Whether training has use for second answers just now; until told, it has not."""
        self.wanted = wanted

    def close(self) -> None:
        for task in (self.task, *self.answering):
            task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BETWEEN_S)  # vLLM tells nobody when a request ends
            if self.wanted:
                self.begin()
            else:
                forget_old(self.prompts, self.max_age_s)

    def begin(self) -> None:
        """Ask for as many answers as there is room for."""
        forget_old(self.prompts, self.max_age_s)
        # A request counts as running only after the engine's next step.
        room = self.below - max(self.load(), len(self.answering))
        while room > 0 and self.prompts:
            asked = self.prompts[-1]
            asked.left -= 1
            if not asked.left:
                self.prompts.pop()
            task = asyncio.get_running_loop().create_task(self._answer(asked))
            self.answering.add(task)
            task.add_done_callback(self.answering.discard)
            room -= 1

    async def _answer(self, asked: Asked) -> None:
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=asked.max_tokens, skip_reading_prefix_cache=True,
                                detokenize=False, extra_args={MARK: SECOND})
        try:
            async for _ in self.generate({"prompt_token_ids": asked.prompt}, params, f"{self.name}-{uuid.uuid4().hex}",
                                         priority=SECOND_PRIORITY):
                pass
        except Exception as error:  # whatever it is, no user's request is concerned
            log.warning("a second answer was given up: %s", type(error).__name__)
