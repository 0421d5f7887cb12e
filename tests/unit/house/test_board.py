"""The Grafana board and the alerts ask for metrics and labels that exist, and for all
of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import board
from tests.support.board import queries
from tests.support.root import ROOT

GRAFANA = ROOT / "services" / "grafana"
PAGES = ROOT / "docs" / "alerts"
BOARD = json.loads(board.text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "services" / "supervisor" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
KNOWN = queries.reference()
FILL = {"__rate_interval": "1m", "__range": "1h", "run": "grpo", "group": ".*", "channel": ".*"}


def asked(panel: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each expression of a panel, and its legend."""
    for target in panel.get("targets", ()):
        yield queries.filled(target["expr"], FILL), target.get("legendFormat", "")


ASKED = [(panel["title"], *one) for panel in BOARD["panels"] for one in asked(panel)]


def test_the_board_is_that_of_the_code() -> None:
    assert board.PAGE.read_text() == board.text(), "run `make board`"


@pytest.mark.parametrize(
    ("title", "expr", "legend"), ASKED, ids=[f"{title}-{i}" for i, (title, *_) in enumerate(ASKED)]
)
def test_a_query_of_the_board_asks_for_what_there_is(title: str, expr: str, legend: str) -> None:
    labels = queries.labels_of(expr, KNOWN)
    assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, title
    assert 'run="grpo"' in expr, "another run's numbers would be shown"


def test_the_choices_of_the_board_are_labels_of_metrics() -> None:
    names = []
    for choice in BOARD["templating"]["list"]:
        if choice["type"] != "query":
            continue
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", choice["query"]["query"]).groups()  # type: ignore[union-attr] # asserted by the next line
        assert label in queries.labels_of(queries.filled(metric, FILL), KNOWN)
        names.append(choice["name"])
    assert names == ["run", "group", "channel"]
    for mark in BOARD["annotations"]["list"]:
        labels = queries.labels_of(queries.filled(mark["target"]["expr"], FILL), KNOWN)
        assert set(re.findall(r"{{(\w+)}}", mark["textFormat"])) <= labels


def test_panels_do_not_overlap_and_fill_the_width() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


@pytest.mark.parametrize(
    ("expr", "wrong"),
    [
        ("replicas_no_such_thing > 0", "no metric replicas_no_such_thing"),
        ('replicas_slots{gruppe="a"}', "no label gruppe"),
        ("sum by (replica) (replicas_slots)", "no label replica"),
        ("sum by (le) (replicas_slots)", "no label le"),
        ("replicas_slots_in_use / replicas_slots", "different labels"),
        ("replicas_slots_in_use / on (node) replicas_slots", "no label node"),
        ("replicas_slots_in_use * on (channel) group_left (node) replicas_slots", "no label node"),
        ("histogram_quantile(0.9, rate(replicas_sync_duration_seconds_sum[1m]))", "no label le"),
        ("rate(replicas_sync_total[1m]", "unclosed"),
    ],
)
def test_a_query_for_what_there_is_not_is_found(expr: str, wrong: str) -> None:
    with pytest.raises(queries.BadQuery, match=wrong):
        queries.labels_of(expr, KNOWN)


def test_a_query_has_the_labels_that_prometheus_gives_it() -> None:
    def labels(expr: str) -> set[str]:
        return set(queries.labels_of(expr, KNOWN))

    whole = {"run", "channel", "job", "instance"}
    assert labels("replicas_slots > 1") == whole
    assert labels("sum(replicas_slots)") == set()
    assert labels("sum without (job) (replicas_slots)") == whole - {"job"}
    assert labels("topk(3, replicas_slots)") == whole
    assert labels("time() - max by (channel) (replicas_slots)") == {"channel"}
    assert labels("replicas_slots * on (run, channel) replicas_channel_epoch") == {"run", "channel"}
    assert labels("replicas_slots_in_use > on (run, channel) group_left () replicas_slots") == {
        *whole,
        "group",
        "replica",
    }
    assert labels("replicas_slots unless on (channel) replicas_slots_in_use") == whole
    assert queries.unfiltered("a > 0 and b == 1") == "a > 0 and b"
    with pytest.raises(queries.BadQuery, match="no value"):
        queries.filled("$other", FILL)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    labels = queries.labels_of(rule["expr"], KNOWN)
    told = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels
    assert "run" in labels, "nobody would know whose alert it is"


def test_each_metric_is_on_the_board_or_has_an_alert() -> None:
    used = {name for _, expr, _ in ASKED for name in queries.metrics_in(expr)}
    used |= {name for rule in RULES for name in queries.metrics_in(rule["expr"])}
    base = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    every = {re.sub(r"_(bucket|sum|count)$", "", name) for name in KNOWN}
    assert every - base == set()


def test_the_board_names_each_alert_and_no_other() -> None:
    named = {
        one for panel in BOARD["panels"] for one in re.findall(r"\bReplicas[A-Z]\w+", panel.get("description", ""))
    }
    assert named == {rule["alert"] for rule in RULES}


def test_the_line_of_a_graph_is_where_its_alert_fires() -> None:
    lines = 0
    rules = {rule["alert"]: rule["expr"] for rule in RULES}
    for panel in BOARD["panels"]:
        steps = panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", [])
        (*_, last) = steps or [{"value": None}]
        if panel["type"] == "timeseries" and last["value"] is not None:
            (alert,) = re.findall(r"\bReplicas[A-Z]\w+", panel["description"])
            limit = re.search(r"> ([\d.]+)\s*$", rules[alert])
            assert limit is not None
            assert float(limit[1]) == last["value"], alert
            lines += 1
    assert lines > 4


OF_THE_SOURCE = {
    f"board.annotations.list[0].{key}"
    for key in ("target.expr", "target.refId", "target.interval", "titleFormat", "textFormat")
}
"""What Grafana's part for Prometheus reads of a mark; the types have what all share."""


@pytest.mark.slow
def test_grafana_knows_all_that_the_board_says() -> None:
    """Read by Grafana's own types, and written again: what they do not know is lost."""
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    again = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(json.loads(board.text()))))
    assert set(lost(BOARD, again, "board")) == OF_THE_SOURCE


def lost(before: Any, after: Any, where: str) -> Iterator[str]:
    if isinstance(before, dict):
        for key, value in before.items():
            if not isinstance(after, dict) or key not in after:
                if value not in (None, [], {}, False):
                    yield f"{where}.{key}"
            else:
                yield from lost(value, after[key], f"{where}.{key}")
    elif isinstance(before, list):
        if not isinstance(after, list) or len(before) != len(after):
            yield where
        else:
            for index, (one, other) in enumerate(zip(before, after, strict=True)):
                yield from lost(one, other, f"{where}[{index}]")
    elif before != after:
        yield f"{where}: {before!r} became {after!r}"


def test_grafana_finds_what_its_files_name() -> None:
    services = yaml.safe_load((GRAFANA / "compose.yaml").read_text())["services"]
    text = "".join(path.read_text() for path in GRAFANA.rglob("provisioning/*/*.yaml"))
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= set(services["grafana"]["environment"])
    mounts: dict[str, Path] = {}
    for service in services.values():
        for one in service["volumes"]:
            source, target, *_ = one.split(":")
            if source.startswith("."):
                mounts[target] = (GRAFANA / source).resolve()
                assert mounts[target].is_dir()
    config = next(one.partition("=")[2] for one in services["prometheus"]["command"] if "config.file" in one)
    assert (mounts[str(Path(config).parent)] / Path(config).name).is_file()
    environment = services["grafana"]["environment"]
    assert mounts[environment["GF_PATHS_PROVISIONING"]] == GRAFANA / "provisioning"
    assert mounts[environment["BOARDS"]] == board.PAGE.parent
    (listen,) = (one for one in services["prometheus"]["command"] if "listen-address" in one)
    assert environment["PROMETHEUS"].removeprefix("http://") == listen.partition("=")[2]


def test_grafana_asks_no_more_often_than_prometheus_does() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    scrapes = yaml.safe_load((ROOT / "services" / "supervisor" / "prometheus.yml").read_text())
    (one,) = source["datasources"]
    assert one["jsonData"]["timeInterval"] == scrapes["scrape_configs"][0]["scrape_interval"]
