"""Who may ask a replica: vLLM's own application behind the key, without an engine."""

import asyncio

import httpx
import pytest

from cluster.pool import check_exposure
from torchspec_lite.errors import UserError
from workers.api_key import NeedsKey


async def everything(scope, receive, send):
    """An application that answers any path."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


def ask(path: str, method: str = "POST", **headers) -> httpx.Response:
    async def answer():
        transport = httpx.ASGITransport(NeedsKey(everything, ["hush", "hidden"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await client.request(method, path, headers=headers)
    return asyncio.run(answer())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/invocations", "/tokenize", "/anything", "/health/../v1/models",
                                  "//health", "/metricsx"])
def test_every_path_needs_the_key(path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "hush"}, {"Authorization": "Basic hush"},
                    {"Authorization": "Bearer "}):
        refused = ask(path, **headers)
        assert refused.status_code == 401 and "secret" not in refused.text
    assert ask(path, Authorization="Bearer hush").text == "secret"
    assert ask(path, Authorization="bearer hush").text == "secret"


def test_health_and_metrics_do_not():
    assert ask("/health", "GET").status_code == ask("/metrics", "GET").status_code == 200
    assert ask("/v1/models", "OPTIONS").status_code == 200  # a browser's question before the question


def test_a_web_socket_without_the_key_is_closed():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(NeedsKey(everything, ["hush", "hidden"])({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_an_open_address_needs_a_key_with_letters():
    check_exposure("127.0.0.1", None)
    check_exposure("0.0.0.0", "hush")
    for nothing in (None, ""):
        with pytest.raises(UserError, match="serve.api_key"):
            check_exposure("0.0.0.0", nothing)
