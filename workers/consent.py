"""Which served requests are sampled: chosen at random among those whose sender did not forbid it."""

import hmac
import random
from contextvars import ContextVar

from workers.serving_capture import MARK

HEADER = b"x-torchspec-lite-capture"
NO = frozenset({b"no", b"off", b"false", b"0"})
consent: ContextVar[bool | None] = ContextVar("consent", default=None)
"""Of the HTTP request being answered; None for what the pool asks of itself, which is never sampled."""


class AsksConsent:
    """ASGI middleware: notes for each HTTP request whether it may be sampled.

    Not with the header `X-Torchspec-Lite-Capture: no`, nor with the opt-out API key.
    """

    def __init__(self, app, opt_out_key: str | None):
        self.app, self.opt_out = app, opt_out_key and f"Bearer {opt_out_key}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            consent.set(self._allowed(scope["headers"]))
        await self.app(scope, receive, send)

    def _allowed(self, headers) -> bool:
        for name, value in headers:
            name = name.lower()
            if name == HEADER and value.strip().lower() in NO:
                return False
            if name == b"authorization" and self.opt_out and hmac.compare_digest(value.strip(), self.opt_out):
                return False
        return True


def sample_requests(engine, fraction: float, whole_prompts: bool, seed: int | None = None) -> dict[str, int]:
    """Mark this share of the engine's requests for capture as they come in, and forbid it for the others.

    Returns live counts {requests, excluded}. Marked requests read nothing from the prefix cache with `whole_prompts`, so
    that all their states are computed.
    """
    choose, counts, generate = random.Random(seed), {"requests": 0, "excluded": 0}, engine.generate

    def marked(prompt, sampling_params, *args, **options):
        allowed = consent.get()
        counts["requests"] += allowed is not None
        counts["excluded"] += allowed is False
        chosen = bool(allowed) and choose.random() < fraction
        params = sampling_params.clone()
        params.extra_args = {**(params.extra_args or {}), MARK: chosen}
        if chosen and whole_prompts:
            params.skip_reading_prefix_cache = True
        return generate(prompt, params, *args, **options)

    engine.generate = marked
    return counts
