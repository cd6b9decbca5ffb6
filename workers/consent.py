"""Which served requests are sampled: chosen at random among those whose sender did not forbid it."""

import random
import time
from collections import deque
from contextlib import aclosing
from contextvars import ContextVar
from typing import NamedTuple

from workers.api_key import is_key
from workers.second_answers import SecondAnswers, forget_old
from workers.serving_capture import MARK

HEADER = b"x-torchspec-lite-capture"
PROMPTS_KEPT = 64
NO = frozenset({b"no", b"off", b"false", b"0"})
consent: ContextVar[bool | None] = ContextVar("consent", default=None)
"""Of the HTTP request being answered; None for what the pool asks of itself, which is never sampled."""


class Remembered(NamedTuple):
    at: float
    tokens: list[int]


class AsksConsent:
    """ASGI middleware: notes for each HTTP request whether it may be sampled.

    Not with the header `X-Torchspec-Lite-Capture: no`, nor with the opt-out API key.
    """

    def __init__(self, app, opt_out_key: str | None):
        self.app, self.opt_out = app, opt_out_key and opt_out_key.encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            consent.set(self._allowed(scope["headers"]))
        await self.app(scope, receive, send)

    def _allowed(self, headers) -> bool:
        for name, value in headers:
            name = name.lower()
            if name == HEADER and value.strip().lower() in NO:
                return False
            if name == b"authorization" and self.opt_out and is_key(value, self.opt_out):
                return False
        return True


class Sampling:
    """Chooses this share of an engine's requests for capture, as they come in, and forbids it for the others.

    Sampled ones read nothing from the prefix cache with `whole_prompts`, so that all their states are computed. Their
    newest prompts are remembered for `max_age_s`, to measure drafters on. `second` answers them once more, if set.
    """

    def __init__(self, fraction: float, whole_prompts: bool, max_age_s: float):
        self.fraction, self.whole_prompts, self.max_age_s = fraction, whole_prompts, max_age_s
        self.random = random.Random()
        self.requests = self.excluded = 0
        self.second: SecondAnswers | None = None
        self.prompts: deque[Remembered] = deque(maxlen=PROMPTS_KEPT)

    def mark_requests_of(self, engine) -> None:
        """Wrap `engine.generate`."""
        generate = engine.generate

        def marked(prompt, sampling_params, *args, **options):
            params = self._mark(sampling_params)
            answers = generate(prompt, params, *args, **options)
            if not params.extra_args[MARK] or "prompt_token_ids" not in prompt:
                return answers
            tokens = list(prompt["prompt_token_ids"])
            self.prompts.append(Remembered(time.monotonic(), tokens))
            return answers if self.second is None else self._then_again(answers, tokens, params.max_tokens)

        engine.generate = marked

    def recent(self, count: int) -> list[list[int]]:
        """Up to `count` prompts (token ids), newest first."""
        self.forget_old()
        return [prompt.tokens for prompt in reversed(self.prompts)][:count]

    def forget_old(self) -> None:
        """Let go of prompts older than `max_age_s`."""
        forget_old(self.prompts, self.max_age_s)

    def _mark(self, sampling_params):
        allowed = consent.get()
        self.requests += allowed is not None
        self.excluded += allowed is False
        chosen = bool(allowed) and self.random.random() < self.fraction
        params = sampling_params.clone()
        params.extra_args = {**(params.extra_args or {}), MARK: chosen}
        if chosen and self.whole_prompts:
            params.skip_reading_prefix_cache = True
        return params

    async def _then_again(self, answers, prompt: list[int], max_tokens: int | None):
        """The outputs of a request; one that was answered whole may be answered again."""
        async with aclosing(answers):
            async for output in answers:
                yield output
        self.second.remember(prompt, max_tokens)
