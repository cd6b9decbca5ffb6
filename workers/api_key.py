"""The API key of a replica, asked for everywhere: vLLM's own check covers some paths only (not `/invocations`)."""

import hmac
import json

OPEN = frozenset({"/health", "/ping", "/version", "/metrics", "/metrics/"})
"""What load balancers and Prometheus ask without a key; none of it says what anybody asked or was answered."""


class NeedsKey:
    """ASGI middleware: `Authorization: Bearer KEY`, one of `api_keys`, on every path but OPEN and on every method but
    OPTIONS, else 401."""

    def __init__(self, app, api_keys: list[str]):
        self.app, self.expected = app, [key.encode() for key in api_keys]

    async def __call__(self, scope, receive, send):
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        body = json.dumps({"error": {"message": "this endpoint needs its API key", "type": "Unauthorized", "code": 401}})
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body.encode()})

    def _may_pass(self, scope) -> bool:
        if scope["path"] in OPEN or scope.get("method") == "OPTIONS":
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return bool(given) and any(is_key(given[0], known) for known in self.expected)


def is_key(authorization: bytes, key: bytes) -> bool:
    """Whether an `Authorization` header's value is `Bearer KEY`, the scheme in any case and any spaces around the key."""
    scheme, _, given = authorization.strip().partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key)
