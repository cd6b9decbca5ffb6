"""The live page: what it reads, says and draws, who may see it, and all of it in a real browser."""

import http.client
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chromium import Chromium
from synthetic_run import make_run

from cluster.dashboard import charts, pieces, run_dashboard, start_dashboard
from cluster.dashboard.serve import bind
from cluster.dashboard.view import POINTS, Line, Reader, Reject, Version, View, lines_of
from torchspec_lite.errors import UserError
from torchspec_lite.history import history_table, read_history
from torchspec_lite.ledger import Ledger
from torchspec_lite.metrics import Metrics
from torchspec_lite.snapshot import Alarm, Snapshot, read_snapshot, write_snapshot

SEVEN_CHARTS = "document.querySelectorAll('.chart svg').length == 7"


# What is read


def test_the_view_holds_what_the_directory_holds(tmp_path):
    snapshot = make_run(tmp_path / "run", time.time())
    view = Reader(tmp_path / "run").read()
    assert view.snapshot == snapshot and view.fault is None and not view.silent
    assert view.samples == {"queued": 300, "leased": 15, "streamed": 30, "trained": 40, "durable": 800, "rejected": 15}
    assert view.held_out == 24
    assert [(r.reason.split()[0], r.count) for r in view.rejects] == [("no", 9), ("longer", 4), ("template", 2)]
    assert all(len(reject.examples) == min(3, reject.count) for reject in view.rejects)
    assert [version.number for version in view.versions] == list(range(1, 13))
    assert view.versions[3].state == "rolled_back" and view.events[0].version == 12
    frame = read_history(tmp_path / "run", ["loss"])
    line = view.line("loss")
    assert line.last == frame["value"].iloc[-1] and len(line.values) <= POINTS + 1
    assert line.times[-1] == pytest.approx(frame["time"].iloc[-1].timestamp(), abs=1e-3)
    assert set(view.lines["feature_norm"]) == {"0", "1", "2", "3"}


def test_lines_are_thinned_by_the_mean(tmp_path):
    metrics = Metrics(tmp_path)
    for i in range(1001):
        metrics.record({"loss": float(i % 2)}, step=i, time=1000.0 + i)
    metrics.record({"loss": float("nan")}, time=3000.0)
    metrics.close()
    line = lines_of(history_table(tmp_path))["loss"][""]
    assert len(line.values) <= POINTS + 1 and line.times == tuple(sorted(line.times))
    assert line.last == 0.0 and line.times[-1] == 2000.0  # the newest as it is; what is no number is left out
    assert all(0.25 <= value <= 0.75 for value in line.values[1:-2])


def test_an_empty_directory_is_a_page_that_waits(tmp_path):
    view = Reader(tmp_path).read()
    assert view == View(run=tmp_path.name, now=view.now)
    for render in (pieces.header, pieces.headline, pieces.sentence, pieces.ledger, pieces.rollout, pieces.replicas):
        assert render(view)
    for chart in (charts.hero, charts.by_version, charts.positions, charts.loss, charts.drift("own_mass")):
        assert not any(series["data"] for series in chart(view)["series"])


def test_a_damaged_part_is_named_and_the_rest_shown(tmp_path):
    make_run(tmp_path / "run", time.time())
    (tmp_path / "run" / "status.json").write_text("{")
    (tmp_path / "run" / "ledger.sqlite").write_bytes(b"not a database at all" * 100)
    view = Reader(tmp_path / "run").read()
    assert "status.json" in view.fault and "ledger.sqlite" in view.fault and view.line("loss")
    assert "could not be read" in pieces.banner(view)


def test_a_driver_that_is_gone_is_told(tmp_path):
    make_run(tmp_path / "run", time.time() - 60)
    view = Reader(tmp_path / "run").read()
    assert view.silent and "No news from the driver" in pieces.banner(view) and "Silent" in pieces.header(view)


def test_words_from_the_run_are_escaped():
    evil = "<script>alert(1)</script>"
    alarms = (Alarm(time=0.0, text=evil),)
    snapshot = Snapshot(run=evil, state="failed", reason=evil, started=0.0, updated=0.0, alarms=alarms)
    versions = (Version(1, 1, 1, None, None, "refused", evil, 0.0, None),)
    rejects = (Reject(evil, 1, (evil,)),)
    view = View(evil, 0.0, snapshot, fault=evil, samples={"rejected": 1}, rejects=rejects, versions=versions)
    html = "".join(render(view) for render in (pieces.header, pieces.banner, pieces.ledger, pieces.rollout))
    assert "<script" not in html and html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6


# What is drawn


def test_version_markers_lie_on_the_served_line():
    served = Line((0.0, 10.0, 20.0), (1.0, 2.0, 1.5))
    versions = (
        Version(1, 1, 1, None, None, "promoted", None, created=3.0, decided=5.0),
        Version(2, 2, 1, 1, None, "rolled_back", None, created=15.0, decided=None),
        Version(3, 3, 1, 1, None, "canary", None, created=99.0, decided=None),
    )
    view = View(run="r", now=0.0, versions=versions, lines={"served_acceptance_length": {"": served}})
    markers = charts.hero(view)["series"][-1]
    assert [point["value"] for point in markers["data"]] == [[99000, 1.5], [15000, 1.75], [5000, 1.5]]
    assert [point["name"] for point in markers["data"]] == ["v3", "v2", "v1"]
    assert ["label" in point for point in markers["data"]] == [False, False, False]
    crowded = replace(view, versions=(*versions, Version(4, 4, 1, 3, None, "gated", None, created=98.0, decided=None)))
    newest = charts.hero(crowded)["series"][-1]["data"]
    assert [point["name"] for point in newest if "label" not in point] == ["v4", "v2", "v1"]
    assert len({point["symbol"] + point["itemStyle"]["color"] for point in markers["data"]}) == 3


def test_charts_name_every_draft_position_from_one():
    lines = {"served_acceptance_rate": {str(i): Line((0.0,), (0.9 - i / 20,)) for i in range(12)}}
    options = charts.positions(View(run="r", now=0.0, lines=lines))
    assert options["xAxis"]["data"] == [str(i) for i in range(1, 13)]
    assert options["series"][0]["data"][1] == 0.85 and options["series"][1]["data"] == [None] * 12


# Starting it, and who may see it


def test_a_taken_port_and_an_open_host_are_errors_a_person_can_mend(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*choose another dashboard.port"):
            start_dashboard(tmp_path, port=port)
    with pytest.raises(UserError, match="needs dashboard.token"):
        bind("0.0.0.0", 0, None)
    bind("0.0.0.0", 0, "secret").close()
    with pytest.raises(UserError, match="no run there"):
        run_dashboard(tmp_path / "nothing")


def ask(url, path="/", **headers):
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_token_opens_the_page_and_nothing_else_does(tmp_path):
    make_run(tmp_path / "run", time.time())
    handle = start_dashboard(tmp_path / "run", port=0, token="s3cret")
    try:
        handle.wait_ready()
        assert ask(handle.url)[0] == 401
        assert ask(handle.url, "/?token=wrong")[0] == 401
        assert ask(handle.url, "/_nicegui_ws/socket.io/?EIO=4&transport=polling")[0] == 401
        assert ask(handle.url, Authorization="Bearer wrong")[0] == 401
        assert ask(handle.url, Authorization="Bearer s3cret")[0] == 200
        status, headers, _ = ask(handle.url, "/?token=s3cret")
        assert status == 303 and headers["location"] == "/"
        assert "HttpOnly" in headers["set-cookie"] and "s3cret" not in headers["set-cookie"]
        status, _, body = ask(handle.url, Cookie=headers["set-cookie"].split(";")[0])
        assert status == 200 and b"s3cret" not in body
        assert ask(handle.url, Authorization="Bearer s3cret", Origin="http://evil.example")[0] == 403
        command = Path(f"/proc/{handle.process.pid}/cmdline").read_bytes()
        assert b"s3cret" not in command + Path(f"/proc/{handle.process.pid}/environ").read_bytes()
    finally:
        handle.close()
    assert "s3cret" not in handle.log.read_text()
    with pytest.raises(UserError, match="the dashboard ended"):
        handle.check()


def test_it_ends_when_its_parent_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from cluster.dashboard import start_dashboard\n"
        "handle = start_dashboard(Path(sys.argv[1]), port=0); handle.wait_ready()\n"
        "print(handle.process.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert select.select([child], [], [], 20)[0], "the dashboard outlived its parent"
    os.close(child)


# In a real browser


@pytest.fixture(scope="module")
def browser():
    with Chromium() as browser:
        yield browser


@pytest.fixture
def run_dir(tmp_path):
    make_run(tmp_path / "chat-traffic", time.time())
    return tmp_path / "chat-traffic"


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A dashboard of a run that nobody changes, for the tests that only look; (handle, run directory)."""
    run_dir = tmp_path_factory.mktemp("still") / "chat-traffic"
    snapshot = make_run(run_dir, time.time())
    write_snapshot(run_dir, replace(snapshot, updated=snapshot.updated + 3600))  # never silent
    handle = start_dashboard(run_dir, port=0)
    yield handle, run_dir
    handle.close()


def test_the_numbers_on_the_page_are_those_of_the_run(browser, still):
    dashboard, run_dir = still
    page = browser.open(dashboard.url)
    page.wait(SEVEN_CHARTS)
    snapshot = read_snapshot(run_dir)
    shown = {key: page.text(key) for key in (
        "served", "served_before", "serving_version", "version", "predicted", "gap", "loss", "step", "prompts",
        "tokens_per_s", "state", "waiting", "alarm")}  # fmt: skip
    gap = read_history(run_dir, ["train_serve_gap"])["value"].iloc[-1]
    assert shown["served"] == f"{snapshot.served:.2f}" and shown["served_before"] == "1.27"
    assert (shown["serving_version"], shown["version"]) == ("v11", "v12")
    assert shown["predicted"] == f"{snapshot.predicted:.2f}" and shown["gap"] == f"{gap:+.2f}".replace("-", "−")
    assert (shown["loss"], shown["step"], shown["prompts"]) == ("1.473", "601", "855 of 1,200, 30 in training")
    assert (shown["tokens_per_s"], shown["state"]) == ("919", "Running")
    assert shown["waiting"] == "Trainers wait for the target 41% of the time; add target workers (now 1)."
    assert "replica r1: no answer for 6 s" in shown["alarm"]
    ledger = Ledger(run_dir / "ledger.sqlite", read_only=True)
    account = ledger.account("train")
    ledger.close()
    for state in ("queued", "leased", "streamed", "trained", "durable", "rejected"):
        assert page.text(f"samples-{state}") == f"{account[state]:,}"
    versions = page.evaluate("[...document.querySelectorAll('#rollout tbody tr')].map(row => row.innerText)")
    assert versions[0].startswith("v12") and "canary" in versions[0] and "rolled back" in versions[8]
    drawn = page.evaluate("[...document.querySelectorAll('#acceptance svg text')].map(text => text.textContent)")
    assert {"v1", "v6", "v12", "served", "predicted"} <= set(drawn)
    replicas = page.evaluate("[...document.querySelectorAll('#replicas tbody td')].map(cell => cell.innerText)")
    assert replicas[:3] == ["r0", "ready", "v11"] and replicas[7:10] == ["r1", "ready canary", "v12"]
    assert page.complaints == []
    hosts = {urlsplit(url).netloc for url in page.requests if not url.startswith("data:")}
    assert hosts == {urlsplit(dashboard.url).netloc}  # no asset from anywhere else


def test_the_page_follows_the_run_within_two_seconds_in_every_browser(browser, run_dir):
    dashboard = start_dashboard(run_dir, port=0)
    try:
        follow(browser, dashboard, run_dir)
    finally:
        dashboard.close()


def follow(browser, dashboard, run_dir):
    pages = [browser.open(dashboard.url) for _ in range(2)]
    for page in pages:
        page.wait(SEVEN_CHARTS)
    ledger = Ledger(run_dir / "ledger.sqlite")
    delays = []
    for version in (13, 14, 15):
        started = time.monotonic()
        ledger.add_version(version, version * 50, samples=900, parent=version - 1, predicted=2.5)
        ledger.set_version_state(version, "promoted", "a better one")
        pages[0].wait(f"document.querySelector('#rollout [data-value=\"v{version}\"]')")
        delays.append(time.monotonic() - started)
        pages[1].wait(f"document.querySelector('#rollout [data-value=\"v{version}\"]')")
    ledger.close()
    assert sorted(delays)[1] < 2, delays
    label = "[...document.querySelectorAll('#acceptance svg text')].some(text => text.textContent == 'v15')"
    assert all(page.wait(label) for page in pages)
    assert "v15 promoted" in pages[0].evaluate("document.querySelector('#acceptance .chart').ariaLabel")
    snapshot = replace(read_snapshot(run_dir), served=2.71, serving_version=15, version=15, updated=time.time())
    write_snapshot(run_dir, snapshot)
    assert pages[0].wait("document.querySelector('[data-value=served]').textContent == '2.71'")
    metrics = Metrics(run_dir)
    metrics.record({"served_acceptance_length": 2.9})
    assert pages[0].wait("document.querySelector('#acceptance .chart').ariaLabel.includes('to 2.90')")
    metrics.close()
    pages[0].call("Page.reload")
    pages[0].wait_load(2)
    assert pages[0].wait("document.querySelector('[data-value=served]')?.textContent == '2.71'")
    pages[0].wait(SEVEN_CHARTS)
    assert [page.complaints for page in pages] == [[], []]


def test_open_pages_come_back_when_the_driver_restarts(browser, run_dir):
    first = start_dashboard(run_dir, port=0)
    page = browser.open(first.url)
    page.wait(SEVEN_CHARTS)
    first.close()
    write_snapshot(run_dir, replace(read_snapshot(run_dir), served=2.66, updated=time.time()))
    second = start_dashboard(run_dir, port=urlsplit(first.url).port)
    try:
        assert second.url == first.url
        page.wait_load(2)  # by itself
        assert page.wait("document.querySelector('[data-value=served]')?.textContent == '2.66'")
    finally:
        second.close()


def test_a_finished_run_can_be_looked_at(browser, tmp_path):
    make_run(tmp_path / "done", time.time() - 86_400, live=False)
    handle = start_dashboard(tmp_path / "done", port=0)
    try:
        page = browser.open(handle.url)
        page.wait(SEVEN_CHARTS)
        assert page.text("state") == "Finished" and page.text("waiting") == "The run has finished; nothing waits."
        assert not page.evaluate("Boolean(document.querySelector('.banner'))") and page.complaints == []
    finally:
        handle.close()
