"""Who may see the page: everybody on this machine over loopback, else whoever has the token."""

import hashlib
import hmac
from http.cookies import SimpleCookie
from urllib.parse import parse_qs, urlencode, urlsplit

from torchspec_lite.keys import is_loopback



class Access:
    """ASGI middleware. With a token: `Authorization: Bearer TOKEN`, or `?token=TOKEN` once, then a cookie.

    Without one: only requests addressed to a loopback name, so that no web site can reach the page by a name of its own
    that points here. In both cases a browser's socket must come from this page's own origin.
    """

    def __init__(self, app, token: str | None):
        self.app, self.token = app, token
        self.cookie = "torchspec_lite"
        if token is not None:
            # what the cookie holds proves the token without being it; the name tells runs on other ports apart
            self.proof = hmac.new(token.encode(), b"dashboard cookie", hashlib.sha256).hexdigest()
            self.cookie += "_" + hashlib.sha256(self.proof.encode()).hexdigest()[:8]

    async def __call__(self, scope, receive, send):
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return await _refuse(scope, send, 403, "This page answers only to itself.")
        if self.token is None:
            if not is_loopback(urlsplit("//" + headers.get("host", "")).hostname or ""):
                return await _refuse(scope, send, 403, "Open this page as http://127.0.0.1 or give it a token.")
            return await self.app(scope, receive, send)
        if self._has_proof(headers):
            return await self.app(scope, receive, send)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        given = query.pop("token", [""])[0]
        if scope["type"] == "http" and hmac.compare_digest(given.encode(), self.token.encode()):
            where = scope["path"] + ("?" + urlencode(query, doseq=True) if query else "")
            cookie = f"{self.cookie}={self.proof}; Path=/; HttpOnly; SameSite=Strict"
            return await _answer(send, 303, "", [(b"location", where.encode()), (b"set-cookie", cookie.encode())])
        return await _refuse(scope, send, 401, "This page needs its token: open it once with ?token=…")

    def _has_proof(self, headers: dict[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(bearer.strip().encode(), self.token.encode()):
            return True
        cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self.proof.encode())


async def _refuse(scope, send, status: int, words: str) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    await _answer(send, status, words, [])


async def _answer(send, status: int, words: str, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words.encode()})
