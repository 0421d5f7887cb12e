"""Expressions of PromQL against the reference: which metrics they ask for, by which
labels, and which labels the result has.

A query for a metric that is not there, or by a label that it does not have, is no error
of Prometheus: its result is empty, and an alert that never fires, a graph that stays
empty. So the labels of a result are worked out here, as Prometheus does it, from those
that ``docs/reference/metrics.md`` gives for each metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser as promql

from tests.support.root import ROOT

__all__ = ["BadQuery", "filled", "labels_of", "metrics_in", "reference", "unfiltered"]

Labels = frozenset[str]

REFERENCE = ROOT / "docs" / "reference" / "metrics.md"
TARGET = frozenset({"job", "instance"})
"""Labels that a scrape adds."""
OF_PROMETHEUS = {
    "up": frozenset({"run"}),
    "ALERTS": frozenset({"alertname", "alertstate", "severity", "run", "group", "replica", "channel", "node"}),
}
"""Series that Prometheus makes itself. ``run`` is a label of the target, which
services/supervisor/prometheus.yml gives it."""
_SETS = ("and", "or", "unless")
_KEEP_ALL = ("topk", "bottomk")
_ENTRY = re.compile(r"^## `(?P<name>\w+)`$.*?^- type: (?P<type>\w+)\n- labels: (?P<labels>.*?)$", re.M | re.S)


class BadQuery(ValueError):
    """An expression asks for what is not there."""


def reference() -> dict[str, Labels]:
    """The labels of each series that the reference promises, with those of a scrape."""
    known = {name: labels | TARGET for name, labels in OF_PROMETHEUS.items()}
    for entry in _ENTRY.finditer(REFERENCE.read_text()):
        labels = frozenset(re.findall(r"`(\w+)`", entry["labels"])) | TARGET
        if entry["type"] == "histogram":
            known |= {f"{entry['name']}_{end}": labels for end in ("sum", "count")}
            known[f"{entry['name']}_bucket"] = labels | {"le"}
        else:
            known[entry["name"]] = labels
    return known


def filled(text: str, values: Mapping[str, str]) -> str:
    """An expression of a board with values in place of its variables."""
    for name, value in values.items():
        text = text.replace(f"${name}", value)
    if "$" in text:
        raise BadQuery(f"{text}: no value for a variable")
    return text


def unfiltered(text: str) -> str:
    """Without a comparison at its end: its sides are there, whatever they are."""
    return re.sub(r" (==|!=|<=?|>=?) [\d.]+$", "", text.strip())


def metrics_in(text: str) -> set[str]:
    """Names of all series that an expression asks for."""
    return {one.name for one in _selectors(promql.parse(text)) if one.name is not None}


def labels_of(text: str, known: Mapping[str, Labels]) -> Labels:
    """The labels of the result of an expression.

    :raises BadQuery: a metric or label is not there, or two sides do not match.
    """
    try:
        return _labels(promql.parse(text), known)
    except (BadQuery, ValueError) as error:
        raise BadQuery(f"{text}: {error}") from error


def _selectors(expr: promql.Expr) -> Iterator[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def visit(one: promql.Expr) -> None:
        if isinstance(one, promql.VectorSelector):
            found.append(one)
        elif isinstance(one, promql.MatrixSelector):
            found.append(one.vector_selector)

    promql.walk(expr, visit)
    yield from found


def _labels(expr: promql.Expr, known: Mapping[str, Labels]) -> Labels:
    match expr:
        case promql.VectorSelector():
            return _of_selector(expr, known)
        case promql.MatrixSelector():
            return _of_selector(expr.vector_selector, known)
        case promql.AggregateExpr():
            return _of_aggregate(expr, _labels(expr.expr, known))
        case promql.BinaryExpr():
            return _of_binary(expr, known)
        case promql.Call():
            found = frozenset().union(*(_labels(one, known) for one in expr.args))
            if expr.func.name != "histogram_quantile":
                return found
            return found - _there(frozenset({"le"}), found)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(expr.expr, known)
        case _:
            raise BadQuery(f"no rule for {type(expr).__name__}")


def _there(wanted: Labels, found: Labels) -> Labels:
    if not wanted <= found:
        raise BadQuery(f"no label {', '.join(sorted(wanted - found))} (there are {', '.join(sorted(found))})")
    return wanted


def _of_selector(one: promql.VectorSelector, known: Mapping[str, Labels]) -> Labels:
    if one.name is None or one.name not in known:
        raise BadQuery(f"no metric {one.name}")
    _there(frozenset(matcher.name for matcher in one.matchers.matchers), known[one.name])
    return known[one.name]


def _of_aggregate(one: promql.AggregateExpr, found: Labels) -> Labels:
    if str(one.op) in _KEEP_ALL:
        return found
    if one.modifier is None:
        return frozenset()
    named = _there(frozenset(one.modifier.labels), found)
    return named if one.modifier.type == promql.AggModifierType.By else found - named


def _of_binary(one: promql.BinaryExpr, known: Mapping[str, Labels]) -> Labels:
    left, right = _labels(one.lhs, known), _labels(one.rhs, known)
    modifier: Any = one.modifier
    on = None if modifier is None or modifier.matching is None else frozenset(modifier.matching.labels)
    if on is not None:
        _there(on, left)
        _there(on, right)
    if modifier is not None and modifier.group_labels is not None:
        return left | _there(frozenset(modifier.group_labels), right)
    if str(one.op) in _SETS:
        return left & right if str(one.op) == "or" else left
    if not left or not right:  # a number, or a whole
        return left | right
    if on is None and left != right:
        raise BadQuery(f"the sides have different labels: {sorted(left ^ right)}")
    return left if on is None else on
