"""A request whose replica dies before it has answered is asked of another replica, once.

Two halves. `EndsWithEngine` goes around a replica's application: once its engine is dead the replica's process ends,
since a replica that answers errors at once looks idle and would draw every request until the next health check.
`SecondTry` goes around Ray Serve's HTTP proxy, which hears of a dead process at once and then ends without an answer.
"""

import json
import logging
import os
from collections import deque

from starlette.middleware import Middleware

log = logging.getLogger("ray.serve")
PROXY_CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.second_try.middlewares"}
"""Environment that makes Ray Serve's proxies run `middlewares`."""
TRIES = 2
ENGINE_DEAD = 70


def middlewares() -> list[Middleware]:
    """What Ray Serve puts around its HTTP proxy."""
    return [Middleware(SecondTry)]


class SecondTry:
    """ASGI middleware: an application that ends without an answer is called once more with the same request.

    An answer begins with its first byte; until then its status is held back and the request is kept. After that
    nothing can be taken back: a stream that breaks off stays broken. A second failure is answered 503. Only one more
    try, since a request may be what kills replicas.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request, answer = _Request(receive), _Answer(send)
        for _ in range(TRIES):
            await self.app(scope | {"headers": list(scope["headers"])}, request.from_start(), answer.from_start())
            if answer.begun or request.gone:
                return
        body = json.dumps({"error": {"message": "the replicas that were asked died before they answered; try again",
                                     "type": "ServiceUnavailable", "code": 503}})
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body.encode()})


class _Request:
    """What a client has sent so far, to be read again. `gone`: the client has left."""

    def __init__(self, receive):
        self.receive, self.heard, self.gone = receive, [], False

    def from_start(self):
        again = deque(self.heard)

        async def read():
            if again:
                return again.popleft()
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.gone = True
            else:
                self.heard.append(message)
            return message
        return read


class _Answer:
    """Passes an answer on from its first byte, or its end."""

    def __init__(self, send):
        self.send, self.begun = send, False

    def from_start(self):
        held = []

        async def write(message):
            if not self.begun and message["type"] != "http.response.body":
                held.append(message)
                return
            if not self.begun and (message.get("body") or not message.get("more_body")):
                self.begun = True
                for earlier in held:
                    await self.send(earlier)
            if self.begun:
                await self.send(message)
        return write


class EndsWithEngine:
    """ASGI middleware of a replica: nothing is answered any more when its engine is dead, the process ends instead."""

    def __init__(self, app, engine):
        self.app, self.engine = app, engine

    async def __call__(self, scope, receive, send):
        async def answer(message):
            if self.engine.errored:
                log.error("the engine is dead; this replica ends and Ray Serve starts another")
                os._exit(ENGINE_DEAD)
            await send(message)
        await self.app(scope, receive, answer)
