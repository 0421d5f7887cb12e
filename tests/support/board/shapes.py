"""Grafana's JSON of a board: its classic form, which every Grafana from 10 on reads.

A board is rows of panels. A row is 24 columns wide; panels flow from left to right, and
the next one begins a line when it does not fit. A panel has a title, a sentence that
Grafana shows behind an ``i``, and queries, each with a legend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Panel", "Query", "bar_gauge", "bars", "board", "lanes", "lines", "stat", "table", "variable"]

Json = dict[str, Any]

WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, AMBER, RED, BLUE = "green", "orange", "red", "blue"


class Query(NamedTuple):
    """``legend``: as ``{{label}}``; of a table: the name of its column."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """``shape``: what Grafana's JSON has of it beside place, title and queries.
    ``now``: only the newest values are asked for."""

    title: str
    text: str
    queries: tuple[Query, ...]
    width: int
    height: int
    shape: Json
    now: bool = False


# ------------------------------------------------------------ kinds of panels


def _steps(*steps: tuple[float | None, str]) -> Json:
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]}


def _words(words: Mapping[int, tuple[str, str]]) -> list[Json]:
    """Texts and colours in place of numbers."""
    if not words:
        return []
    shown = {
        str(number): {"text": text, "color": color, "index": i}
        for i, (number, (text, color)) in enumerate(words.items())
    }
    return [{"type": "value", "options": shown}]


def stat(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "none",
    width: int = 3,
    words: Mapping[int, tuple[str, str]] | None = None,
    none: str = "none",
    decimals: int | None = None,
) -> Panel:
    """One number now, large. ``none``: what is shown where there is none."""
    defaults: Json = {
        "unit": unit,
        "noValue": none,
        "mappings": _words(words or {}),
        "thresholds": _steps((None, "text")),
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    options = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto" if len(queries) == 1 else "value_and_name",
        "wideLayout": True,
    }
    shape = {"type": "stat", "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}
    return Panel(title, text, queries, width, 4, shape, now=True)


def lines(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "none",
    width: int = 8,
    stacked: bool = False,
    limit: float | None = None,
    most: float | None = None,
    style: str = "line",
) -> Panel:
    """Values over time. ``limit``: a dashed line, above which an alert fires."""
    custom: Json = {
        "drawStyle": style,
        "lineWidth": 1,
        "fillOpacity": 40 if stacked else (80 if style == "bars" else 0),
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "off" if limit is None else "dashed"},
    }
    defaults: Json = {"unit": unit, "min": 0, "custom": custom, "thresholds": _steps((None, GREEN))}
    if limit is not None:
        defaults["thresholds"] = _steps((None, GREEN), (limit, RED))
    if most is not None:
        defaults["max"] = most
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    shape = {"type": "timeseries", "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}
    return Panel(title, text, queries, width, 8, shape)


def bars(title: str, text: str, *queries: Query, unit: str = "short", width: int = 8) -> Panel:
    """What happened, by when: stacked bars."""
    panel = lines(title, text, *queries, unit=unit, width=width, stacked=True, style="bars")
    panel.shape["fieldConfig"]["defaults"]["noValue"] = "none"
    return panel


def bar_gauge(title: str, text: str, *queries: Query, low: Iterable[tuple[float | None, str]], width: int = 8) -> Panel:
    """Shares that are left, now. ``low``: the colours of a bar, by where they begin."""
    defaults = {"unit": "percentunit", "min": 0, "max": 1, "noValue": "no such rule", "thresholds": _steps(*low)}
    options = {
        "displayMode": "basic",
        "orientation": "horizontal",
        "showUnfilled": True,
        "valueMode": "color",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    shape = {"type": "bargauge", "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}
    return Panel(title, text, queries, width, 8, shape, now=True)


def lanes(title: str, text: str, *queries: Query, words: Mapping[int, tuple[str, str]], width: int = WIDTH) -> Panel:
    """A lane for each series, whose colour is its value."""
    custom = {"fillOpacity": 70, "lineWidth": 0}
    defaults = {"custom": custom, "mappings": _words(words), "thresholds": _steps((None, "text"))}
    options = {
        "alignValue": "left",
        "mergeValues": True,
        "rowHeight": 0.8,
        "showValue": "never",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    shape = {"type": "state-timeline", "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}
    return Panel(title, text, queries, width, 8, shape)


def table(title: str, text: str, *queries: Query, units: Mapping[str, str], width: int = WIDTH) -> Panel:
    """A line for each combination of labels, a column for each query. ``units``: of
    columns that have one."""
    values = ["Value"] if len(queries) == 1 else [f"Value #{_letter(i)}" for i in range(len(queries))]
    named = {value: query.legend for value, query in zip(values, queries, strict=True) if query.legend}
    hidden = {"Time": True, **({} if named else {"Value": True})}
    hidden |= dict.fromkeys(("__name__", "alertstate", "instance", "job", "run"), True)
    organize = {"excludeByName": hidden, "indexByName": {}, "renameByName": named}
    overrides = [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
        for name, unit in units.items()
    ]
    shape: Json = {
        "type": "table",
        "fieldConfig": {"defaults": {"noValue": "none", "custom": {"align": "auto"}}, "overrides": overrides},
        "options": {"cellHeight": "sm", "showHeader": True},
        "transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
    }
    return Panel(title, text, queries, width, 8, shape, now=True)


# ------------------------------------------------------------ the board


def variable(name: str, query: str, label: str, *, several: bool = True) -> Json:
    """A choice above the board, filled by ``label_values``."""
    found: Json = {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        "options": [],
        "hide": 0,
        "skipUrlSync": False,
        "regex": "",
    }
    if several:
        found |= {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return found


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _targets(panel: Panel) -> list[Json]:
    made = []
    for index, query in enumerate(panel.queries):
        target: Json = {
            "refId": _letter(index),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "instant": panel.now,
            "range": not panel.now,
            "format": "table" if panel.shape["type"] == "table" else "time_series",
        }
        if panel.shape["type"] != "table":
            target["legendFormat"] = query.legend or "__auto"
        made.append(target)
    return made


def _placed(rows: Iterable[tuple[str, Sequence[Panel]]]) -> list[Json]:
    made: list[Json] = []
    y = 0
    for title, panels in rows:
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        )
        x, y, tallest = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            made.append(
                {
                    "id": len(made) + 1,
                    "title": panel.title,
                    "description": panel.text,
                    "datasource": SOURCE,
                    "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
                    "targets": _targets(panel),
                    **panel.shape,
                }
            )
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return made


def board(
    uid: str,
    title: str,
    text: str,
    *,
    variables: Sequence[Json],
    marks: Sequence[tuple[str, str, Query]],
    rows: Iterable[tuple[str, Sequence[Panel]]],
) -> Json:
    """The whole. ``marks``: name, colour and query of what all graphs have marked."""
    choice = {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
    }
    annotations = [
        {
            "name": name,
            "datasource": SOURCE,
            "enable": True,
            "hide": False,
            "iconColor": color,
            "target": {"expr": query.expr, "refId": "Anno", "interval": "15s"},
            "titleFormat": name,
            "textFormat": query.legend,
        }
        for name, color, query in marks
    ]
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["replicas"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "refresh": "10s",
        "templating": {"list": [choice, *variables]},
        "annotations": {"list": annotations},
        "panels": _placed(rows),
    }
