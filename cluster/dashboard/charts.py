"""The page's charts as ECharts options: pure functions of a `View`.

Colours are the page's CSS variables (the charts are drawn as SVG), so one set of options serves light and dark.
"""

from bisect import bisect_left

from cluster.dashboard.view import Line, Version, View

ACCENT, INK, MUTED, FAINT, CARD, WARN = (
    f"var(--{name})" for name in ("accent", "ink", "muted", "line", "card", "warn")
)
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MARKERS = {
    # state: (words, symbol, size, fill, border)
    "promoted": ("promoted", "circle", 10, ACCENT, CARD),
    "canary": ("canary", "circle", 10, CARD, ACCENT),
    "rolled_back": ("rolled back", "path://M0,2L2,0L5,3L8,0L10,2L7,5L10,8L8,10L5,7L2,10L0,8L3,5Z", 10, WARN, WARN),
    "refused": ("refused", "diamond", 8, CARD, WARN),
    "gated": ("passed the gate", "circle", 6, CARD, MUTED),
    "exported": ("exported", "circle", 5, MUTED, MUTED),
}
STATE_WORDS = {state: words for state, (words, *_) in MARKERS.items()}


def hero(view: View) -> dict:
    """Served acceptance length over time, every drafter version a marker on it."""
    served, predicted = view.line("served_acceptance_length"), predicted_line(view)
    series = []
    if predicted:
        series.append(_curve("predicted", predicted, MUTED, width=1.5, dashed=True))
    if live := view.line("live_acceptance_length"):
        series.append(_curve("live", live, INK, width=1))
    if served:
        area = {"color": ACCENT, "opacity": 0.07, "origin": "start"}
        series.append(_curve("served", served, ACCENT, width=2.5) | {"areaStyle": area})
    carrier = served or predicted
    points = _markers(view.versions, carrier) if carrier else []
    if points:
        series.append(
            {
                "type": "scatter",
                "name": "versions",
                "data": points,
                "z": 5,
                "label": {
                    "show": True,
                    "position": "top",
                    "formatter": "{b}",
                    "color": MUTED,
                    "fontSize": 11,
                    "distance": 6,
                    "textBorderColor": CARD,
                    "textBorderWidth": 3,
                },
                "labelLayout": {"hideOverlap": True},
                "tooltip": {"show": False},
            }
        )
    options = _time_chart(series, digits=2)
    options["legend"]["data"] = [one["name"] for one in reversed(series) if one["name"] != "versions"]
    options["grid"]["top"] = 34
    return options


def by_version(view: View) -> dict:
    """Predicted and served acceptance length of each version: their distance is the train/serve gap."""
    served = view.lines.get("served_acceptance_length_by_version", {})
    shown = view.versions[-24:]
    rows = [
        ("served", ACCENT, [_last(served.get(str(version.number))) for version in shown]),
        ("predicted", MUTED, [_rounded(version.predicted) for version in shown]),
    ]
    series = []
    for name, color, values in rows:
        style = {"color": color, "width": 2, "type": "solid" if name == "served" else "dashed"}
        series.append(
            {"type": "line", "name": name, "data": values, "lineStyle": style, "itemStyle": {"color": color}}
            | {"symbol": "circle", "symbolSize": 6, "connectNulls": True}
        )
    options = _base(series, digits=2)
    options["xAxis"] = _axis("category") | {"data": [f"v{version.number}" for version in shown]}
    return options


def positions(view: View) -> dict:
    """Joint acceptance rate of each draft position, served beside predicted."""
    served, predicted = (view.lines.get(f"{kind}_acceptance_rate", {}) for kind in ("served", "predicted"))
    labels = sorted(set(served) | set(predicted), key=int)
    series = [
        {
            "type": "bar",
            "name": name,
            "data": [_last(lines.get(label), 4) for label in labels],
            "itemStyle": {"color": color, "opacity": opacity, "borderRadius": [3, 3, 0, 0]},
            "barMaxWidth": 22,
            "barGap": "15%",
        }
        for name, lines, color, opacity in (("served", served, ACCENT, 1), ("predicted", predicted, MUTED, 0.5))
    ]
    options = _base(series, digits=2)
    options["xAxis"] = _axis("category") | {"data": [str(int(label) + 1) for label in labels]}
    options["yAxis"] = _axis("value") | {"min": 0, "max": 1, "interval": 0.25}
    return options


def loss(view: View) -> dict:
    """Training loss, with the learning rate on an axis of its own."""
    series = []
    if line := view.line("loss"):
        series.append(_curve("loss", line, ACCENT, width=2, digits=4))
    if line := view.line("learning_rate"):
        series.append(_curve("learning rate", line, MUTED, width=1.2, dashed=True, digits=7) | {"yAxisIndex": 1})
    options = _time_chart(series, digits=None)
    right = _axis("value") | {"splitLine": {"show": False}}
    right["axisLabel"][":formatter"] = "v => v === 0 ? '0' : v.toExponential(0)"
    options["yAxis"] = [_axis("value") | {"scale": True}, right]
    return options


def drift(name: str):
    """A chart of one drift diagnostic, a line for each unrolled step."""

    def chart(view: View) -> dict:
        lines = view.lines.get(name, {})
        series = []
        for place, label in enumerate(sorted(lines, key=int)):
            curve = _curve(f"k={label}", lines[label], ACCENT, width=1.8, digits=4)
            curve["lineStyle"]["opacity"] = curve["itemStyle"]["opacity"] = max(0.25, 0.72**place)
            series.append(curve)
        return _time_chart(series, digits=3)

    return chart


def predicted_line(view: View) -> Line | None:
    """The prediction made as serving drafts (walked); the one over rows where there is no other."""
    lines = view.lines.get("predicted_acceptance_length", {})
    return lines.get("held_out_walked") or lines.get("held_out") or lines.get("train")


def on_line(line: Line, time: float) -> float:
    """Height of a line at a time, held flat beyond its ends."""
    right = bisect_left(line.times, time)
    if right == 0:
        return line.values[0]
    if right == len(line.times):
        return line.values[-1]
    (before, low), (after, high) = ((line.times[i], line.values[i]) for i in (right - 1, right))
    return low + (high - low) * (time - before) / (after - before) if after > before else high


def _markers(versions: tuple[Version, ...], carrier: Line) -> list[dict]:
    """Every version, newest first; a name is left away where a newer version's would be in its place."""
    points = [_marker(version, carrier) for version in reversed(versions)]
    moments = [point["value"][0] for point in points]
    room = 0.035 * (max(*moments, carrier.times[-1] * 1000) - min(*moments, carrier.times[0] * 1000)) if points else 0
    named: list[int] = []
    for point, moment in zip(points, moments):
        if any(abs(moment - other) < room for other in named):
            point["label"] = {"show": False}
        else:
            named.append(moment)
    return points


def _marker(version: Version, carrier: Line) -> dict:
    words, symbol, size, fill, border = MARKERS[version.state]
    time = version.decided or version.created
    return {
        "name": f"v{version.number}",
        "value": [round(time * 1000), round(on_line(carrier, time), 4)],
        "symbol": symbol,
        "symbolSize": size,
        "itemStyle": {"color": fill, "borderColor": border, "borderWidth": 2},
    }


def _curve(name: str, line: Line, color: str, width: float, dashed: bool = False, digits: int = 4) -> dict:
    return {
        "type": "line",
        "name": name,
        "data": [[round(t * 1000), round(v, digits)] for t, v in zip(line.times, line.values)],
        "showSymbol": len(line.times) == 1,
        "symbolSize": 6,
        "lineStyle": {"color": color, "width": width, "type": "dashed" if dashed else "solid", "cap": "round"},
        "itemStyle": {"color": color},
        "emphasis": {"disabled": True},
    }


def _time_chart(series: list[dict], digits: int | None) -> dict:
    options = _base(series, digits)
    options["xAxis"] = _axis("time") | {"splitLine": {"show": False}}
    options["xAxis"]["axisLabel"] |= {"hideOverlap": True, "alignMinLabel": "left", "alignMaxLabel": "right"}
    return options


def _base(series: list[dict], digits: int | None) -> dict:
    tooltip = {
        "trigger": "axis",
        "confine": True,
        "backgroundColor": CARD,
        "borderColor": FAINT,
        "padding": [8, 12],
        "textStyle": {"color": INK, "fontSize": 12, "fontFamily": FONT},
        "axisPointer": {"lineStyle": {"color": MUTED, "type": "solid", "width": 1}, "shadowStyle": {"color": FAINT}},
    }
    if digits is not None:
        tooltip[":valueFormatter"] = f"v => v == null ? '–' : Number(v).toFixed({digits})"
    return {
        "animation": False,
        "textStyle": {"fontFamily": FONT},
        "grid": {"left": 6, "right": 14, "top": 34, "bottom": 6, "containLabel": True},
        "tooltip": tooltip,
        "legend": {
            "right": 6,
            "top": 0,
            "icon": "roundRect",
            "itemWidth": 14,
            "itemHeight": 3,
            "itemGap": 14,
            "textStyle": {"color": MUTED, "fontSize": 12},
            "selectedMode": False,
        },
        "yAxis": _axis("value") | {"scale": True},
        "series": series,
    }


def _axis(kind: str) -> dict:
    return {
        "type": kind,
        "axisLine": {"show": kind != "value", "lineStyle": {"color": FAINT}},
        "axisTick": {"show": False},
        "splitLine": {"show": kind == "value", "lineStyle": {"color": FAINT}},
        "axisLabel": {"color": MUTED, "fontSize": 11},
        "splitNumber": 4,
    }


def _last(line: Line | None, digits: int = 3) -> float | None:
    return None if line is None else round(line.last, digits)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
