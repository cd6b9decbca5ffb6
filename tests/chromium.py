"""A small driver of headless Chromium for the tests: the DevTools protocol over a pipe, no port, no package."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
]  # fmt: skip
WAIT = """
new Promise((resolve, reject) => {
  const found = () => { try { return %(expression)s } catch (error) { return null } };
  const end = value => { watch.disconnect(); clearTimeout(timer); resolve(value) };
  const watch = new MutationObserver(() => { const value = found(); if (value) end(value) });
  const late = () => { watch.disconnect(); reject(new Error('the page never satisfied: ' + %(words)s)) };
  const timer = setTimeout(late, %(limit)d);
  watch.observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
  const value = found(); if (value) end(value);
})
"""


class Chromium:
    """`with Chromium() as browser: page = browser.open(url)`."""

    def __enter__(self):
        program = shutil.which("chromium")
        if program is None:
            raise RuntimeError("these tests need Debian's chromium: apt-get update && apt-get install -y chromium")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()

        def connect():  # Chromium reads commands from descriptor 3 and answers on 4
            high = [os.dup(fd) for fd in (commands, answers)]
            while min(high) <= 4:
                high = [os.dup(fd) for fd in high]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._folder.name}"],
            preexec_fn=connect,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number = b"", 0
        self.pages: dict[str, Page] = {}
        return self

    def __exit__(self, *_):
        os.close(self._to)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._folder.cleanup()

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        self.pages[session] = page
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.call("Page.navigate", {"url": url})
        return page

    def call(self, method: str, params: dict | None = None, session: str | None = None, timeout: float = 60.0) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if answer.get("sessionId") in self.pages:
                self.pages[answer["sessionId"]].take(answer)

    def pump(self, limit: float, words: str, done) -> None:
        """Take events until `done()`."""
        deadline = time.monotonic() + limit
        while not done():
            answer = self._read(deadline, words)
            if answer.get("sessionId") in self.pages:
                self.pages[answer["sessionId"]].take(answer)

    def _read(self, deadline: float, waiting_for: str) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._from, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError(f"Chromium does not answer {waiting_for}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


class Page:
    """One tab: `complaints` are its console errors and exceptions, `requests` the addresses it asked for."""

    def __init__(self, browser: Chromium, session: str):
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.loads = 0

    def take(self, event: dict) -> None:
        method, params = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(json.dumps(params["entry"])[:500])
        elif method == "Page.loadEventFired":
            self.loads += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(params["url"])

    def call(self, method: str, params: dict | None = None, timeout: float = 60.0) -> dict:
        return self._browser.call(method, params, self._session, timeout)

    def evaluate(self, expression: str, timeout: float = 60.0):
        params = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        result = self.call("Runtime.evaluate", params, timeout)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"].get("exception", {}).get("description", "script failed"))
        return result["result"].get("value")

    def wait(self, expression: str, limit: float = 20.0):
        """Wait until an expression of the page is true; its value. Wakes on the page's own changes."""
        script = WAIT % {"expression": expression, "words": json.dumps(expression), "limit": int(limit * 1000)}
        return self.evaluate(script, timeout=limit + 10)

    def wait_load(self, number: int, limit: float = 60.0) -> None:
        """Wait until the page has been loaded `number` times."""
        self._browser.pump(limit, f"with load {number} of the page", lambda: self.loads >= number)

    def text(self, key: str) -> str:
        """Text of the element that shows the value `key`."""
        return self.evaluate(f"document.querySelector('[data-value=\"{key}\"]').textContent")

    def resize(self, width: int, height: int) -> None:
        self.width = width
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", metrics)

    def screenshot(self, path: str) -> None:
        """The whole page, not only what a window of its height shows."""
        self.resize(self.width, int(self.call("Page.getLayoutMetrics")["cssContentSize"]["height"]))
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")
        shot = self.call("Page.captureScreenshot")
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))
