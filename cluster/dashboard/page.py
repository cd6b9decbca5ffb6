"""The live page: its layout, and the push of each change to every open browser."""

import asyncio
import logging
import time as clock
from collections.abc import Callable
from pathlib import Path

from nicegui import app, background_tasks, ui
from watchfiles import DefaultFilter, awatch

from cluster.dashboard import charts, pieces
from cluster.dashboard.view import Reader, View

PUSH_EVERY_S = 0.8
"""Least time between two pushes; with the snapshot's one second a change is on the page within two."""
IDLE_S = 5
"""The page is looked over this often when nothing changes, to notice a driver that has gone silent."""
HERE = Path(__file__).parent

KEY = (
    "<p class='key muted'><i class='dot'></i>promoted <i class='dot ring'></i>canary "
    "<i class='cross'>✕</i>rolled back <i class='cross'>◇</i>refused</p>"
)

Piece = tuple[Callable[[View], object], Callable[[object], None]]


class Board:
    """The newest view of one run directory and the open pages that show it."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.reader = Reader(run_dir)
        self.view = self.reader.read()
        self.pages: set[Page] = set()

    async def follow(self) -> None:
        """Wake on every change in the directory, read it and push what is new; ends with the process."""
        async for _ in awatch(
            self.run_dir, watch_filter=Shown(), debounce=200, rust_timeout=IDLE_S * 1000, yield_on_timeout=True
        ):
            started = clock.monotonic()
            self.view = await asyncio.to_thread(self.reader.read)
            for page in list(self.pages):
                page.refresh(self.view)
            spent = clock.monotonic() - started
            # changes pile up in the watcher meanwhile; a huge run is read less often rather than all the time
            await asyncio.sleep(max(PUSH_EVERY_S - spent, 2 * spent))

    def open(self) -> None:
        """Build the page for one browser."""
        page = Page(self.view)
        self.pages.add(page)
        ui.context.client.on_delete(lambda: self.pages.discard(page))


class Shown(DefaultFilter):
    """The files of a run directory that the page shows."""

    ignore_dirs = ()
    ignore_entity_patterns = ()

    def __call__(self, change, path: str) -> bool:
        name = Path(path).name
        return name in ("status.json", "ledger.sqlite", "ledger.sqlite-wal") or name.endswith((".tail", ".parquet"))


class Page:
    """One browser's page: pieces that are sent again only when they have changed."""

    def __init__(self, view: View):
        self.view = view
        self.pieces: list[Piece] = []
        self.shown: list[object] = []
        self._build()

    def refresh(self, view: View) -> None:
        self.view = view
        for place, (render, put) in enumerate(self.pieces):
            new = render(view)
            if new != self.shown[place]:
                self.shown[place] = new
                put(new)

    def _build(self) -> None:
        ui.add_head_html(f"<style>{(HERE / 'style.css').read_text()}</style>", shared=False)
        ui.add_head_html(f"<script>{(HERE / 'page.js').read_text()}</script>", shared=False)
        _html("<a class='skip' href='#acceptance'>Skip to the acceptance length</a>")
        with ui.element("header").props("role=banner"):
            self._text(pieces.header)
            _html("<button id='theme' type='button' onclick='nextTheme()'>Theme: auto</button>")
        with ui.element("div").classes("board"):  # NiceGUI's page is the `main` around it
            self._text(pieces.banner)
            with _card("acceptance", "Served acceptance length", "wide"):
                with ui.element("div").classes("hero"):
                    with ui.element("div"):
                        self._text(pieces.headline)
                    with ui.element("div"):
                        self._chart(charts.hero, pieces.describe_hero, "tall")
                        _html(KEY)
                self._text(pieces.progress)
            with _card("pipeline", "Pipeline", "wide"):
                self._text(pieces.sentence, "aria-live=polite")
                self._text(pieces.pipeline)
            with _card("by-version", "Predicted against served", "third", "by drafter version"):
                self._chart(charts.by_version, "Predicted and served acceptance length by version, in the table below")
            with _card("positions", "Acceptance by draft position", "third", "share of rounds accepted that far"):
                self._chart(charts.positions, _describe_positions)
            with _card("loss", "Loss", "third", "and learning rate"):
                self._chart(charts.loss, _describe_loss)
            with _card("rollout", "Rollout", "two-thirds"):
                self._text(pieces.rollout)
            with _card("events", "What happened", "third"):
                self._text(pieces.events)
            with _card("ledger", "Samples", "half"):
                self._text(pieces.ledger)
            with _card("replicas", "Serving replicas", "half"):
                self._text(pieces.replicas)
            with _card("traffic", "Learned from traffic", "wide", "what of the served requests is sampled; predictions are on recent ones"):
                self._text(pieces.traffic)
            for name, title, note in (
                ("feature_norm", "Feature norm", "of each unrolled step k; growth is drift"),
                ("sink_mass", "Attention on the first tokens", "of each step k"),
                ("own_mass", "Attention on drafted tokens", "of each step k"),
            ):
                with _card(name, title, "third", note):
                    self._chart(charts.drift(name), f"{title} {note}, over time")

    def _text(self, render: Callable[[View], str], props: str = "") -> None:
        html = render(self.view)
        element = ui.html(html, sanitize=False).props(props)  # safe: pieces escape what comes from the run
        self.pieces.append((render, element.set_content))
        self.shown.append(html)

    def _chart(self, render: Callable[[View], dict], words: str | Callable[[View], str], size: str = "") -> None:
        describe = words if callable(words) else lambda view: words
        with ui.element("div").classes(f"chart {size}") as frame:
            options = render(self.view)
            chart = ui.echart(dict(options), renderer="svg")
            _html("<p class='empty muted'>Nothing measured yet</p>")

        def put(new: dict) -> None:
            chart.options.clear()
            chart.options.update(new)
            chart.update()
            frame.classes(remove="bare") if new["series"] else frame.classes(add="bare")

        def label(text: str) -> None:
            frame.props["aria-label"] = text

        frame.props("role=img")
        frame.classes(add="" if options["series"] else "bare")
        self.pieces += [(render, put), (describe, label)]
        self.shown += [options, None]
        label(describe(self.view))


def _card(name: str, title: str, width: str, note: str = "") -> ui.element:
    card = ui.element("section").classes(f"card {width}").props(f"id={name} aria-labelledby=title-{name}")
    with card:
        _html(f"<h2 id='title-{name}'>{title}</h2>" + (f"<p class='note'>{note}</p>" if note else ""))
    return card


def _html(content: str) -> None:
    ui.html(content, sanitize=False)


def _describe_positions(view: View) -> str:
    lines = view.lines.get("served_acceptance_rate", {})
    rates = ", ".join(f"position {int(place) + 1} {lines[place].last:.2f}" for place in sorted(lines, key=int))
    return f"Served acceptance rate: {rates}" if rates else "Served acceptance rate: nothing is served yet"


def _describe_loss(view: View) -> str:
    line = view.line("loss")
    return f"Loss from {line.values[0]:.3f} to {line.last:.3f}" if line else "Loss: no step yet"


def build(run_dir: Path) -> Board:
    """Register the page of a run directory with NiceGUI, and its follower for when the server starts."""
    board = Board(run_dir)
    ui.page("/", title=f"{board.view.run} · torchspec-lite", dark=None)(board.open)
    app.on_startup(lambda: background_tasks.create(board.follow(), name="follow the run directory"))
    app.on_exception(lambda error: logging.getLogger(__name__).error("dashboard: %r", error))
    return board
