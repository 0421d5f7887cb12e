"""The figure of ``bench_goodput.py``, as SVG, from its JSON."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["draw"]

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 180, 50, 60
COLOURS = {"warm": "#2f855a", "cold": "#2b6cb0", "torchrun": "#c53030", "torchft": "#b7791f"}
NAMES = {"warm": "replicas, warm", "cold": "replicas, cold"}
LABEL_GAP = 16.0
"""Least distance of two labels, in pixels."""


def apart(places: Mapping[str, float], gap: float = LABEL_GAP) -> dict[str, float]:
    """The same places from top to bottom, moved down where two would touch."""
    found: dict[str, float] = {}
    last = float("-inf")
    for name, place in sorted(places.items(), key=lambda one: one[1]):
        last = found[name] = max(place, last + gap)
    return found


def draw(result: Mapping[str, Any]) -> str:
    """Goodput over the share of rollouts that is lost in an hour: a line for each
    contender, through the medians, with the range of the repetitions.

    :param result: what the benchmark writes.
    """
    outcomes = result["outcomes"]
    medians: dict[str, dict[float, float]] = {
        name: {float(percent): share for percent, share in by_percent.items() if share is not None}
        for name, by_percent in result["medians"].items()
    }
    percents = sorted({percent for by_percent in medians.values() for percent in by_percent})
    right = max(percents[-1], 1.0)

    def x(percent: float) -> float:
        return LEFT + percent / right * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)

    parts = [*_frame(result["plan"]), *_axes(percents, x, y)]
    for name, by_percent in medians.items():
        colour = COLOURS.get(name, "#4a5568")
        points = " ".join(f"{x(percent):.1f},{y(share):.1f}" for percent, share in sorted(by_percent.items()))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for percent, share in sorted(by_percent.items()):
            shares = [one["goodput"] for one in outcomes if (one["contender"], one["percent"]) == (name, percent)]
            low, high = y(min(shares)), y(max(shares))
            at = f"{x(percent):.1f}"
            parts.append(f'<path d="M{at} {low:.1f}L{at} {high:.1f}" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(f'<circle cx="{at}" cy="{y(share):.1f}" r="4" fill="{colour}"/>')
    ends = {name: y(by_percent[max(by_percent)]) for name, by_percent in medians.items()}
    for name, place in apart(ends).items():
        last = medians[name][max(medians[name])]
        text = f"{NAMES.get(name, name)}: {last:.2f}"
        parts.append(_text(WIDTH - RIGHT + 14, place + 4.5, text, f'fill="{COLOURS.get(name, "#4a5568")}"'))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(text)}</text>'


def _frame(plan: Mapping[str, Any]) -> Iterable[str]:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1a202c"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t d" {font}>'
    yield '<title id="t">Goodput under faults</title>'
    text = "The useful share of a run's time, over the share of its rollouts that is killed or frozen in an hour."
    yield f'<desc id="d">{text}</desc>'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    scale = f"{plan['rollouts']} rollouts; an hour of faults in {plan['hour_s']:g} s, what each costs uncompressed"
    yield _text(LEFT, 20, "Useful share of the time", 'font-weight="bold"')
    yield _text(LEFT, 38, scale, 'font-size="12" fill="#4a5568"')


def _axes(percents: Iterable[float], x: Any, y: Any) -> Iterable[str]:
    for tenth in range(0, 11, 2):
        at = f"{y(tenth / 10):.1f}"
        yield f'<path d="M{LEFT} {at}L{WIDTH - RIGHT} {at}" stroke="#e2e8f0"/>'
        yield _text(LEFT - 10, y(tenth / 10) + 4.5, f"{tenth / 10:.1f}", 'text-anchor="end"')
    for percent in percents:
        at = f"{x(percent):.1f}"
        yield f'<path d="M{at} {HEIGHT - BOTTOM}L{at} {HEIGHT - BOTTOM + 5}" stroke="#a0aec0"/>'
        yield _text(x(percent), HEIGHT - BOTTOM + 20, f"{percent:g} %", 'text-anchor="middle"')
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield _text(middle, HEIGHT - 16, "rollouts lost in an hour", 'text-anchor="middle"')
