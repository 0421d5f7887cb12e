"""The pure parts of the benchmark of goodput: which faults a seed gives, what is made
of the steps of a window, and the figure."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.bench_goodput import completed, lines, rank_of
from bench.goodput_contenders import CONTENDERS, make_field
from bench.goodput_draw import COLOURS, HEIGHT, WIDTH, apart, draw
from bench.goodput_plan import (
    PERCENTS,
    Outcome,
    Plan,
    bars,
    faults,
    goodput,
    latest_end,
    lost_per_fault_s,
    median,
    torn_and_older,
    window_end,
)
from bench.goodput_rank import Field, Model, Trainer, is_open

PLAN = Plan()
SVG = "{http://www.w3.org/2000/svg}"


def test_a_seed_gives_the_same_faults_each_time() -> None:
    assert faults(PLAN, 10, 1) == faults(PLAN, 10, 1)
    assert faults(PLAN, 10, 1) != faults(PLAN, 10, 2)


def test_the_published_seed_gives_the_published_faults() -> None:
    """Whatever Python this is: figures of different machines have the same faults."""
    found = [(round(one.at_s, 2), one.rollout, one.kind) for one in faults(PLAN, 10, 1)]
    assert found == [(14.36, 2, "kill"), (97.79, 6, "freeze"), (101.17, 4, "kill"), (107.39, 4, "kill")]


@pytest.mark.parametrize(("percent", "count"), [(0, 0), (2, 1), (5, 2), (10, 4), (20, 8)])
def test_a_window_has_the_faults_of_five_hours(percent: float, count: int) -> None:
    assert percent in PERCENTS
    found = faults(PLAN, percent, 1)
    assert len(found) == count
    assert Counter(one.kind for one in found)["freeze"] == count // 4
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    assert all(0 <= one.at_s <= PLAN.window_s and 0 <= one.rollout < PLAN.rollouts for one in found)


def test_a_rate_above_0_has_a_fault_at_least() -> None:
    assert len(faults(Plan(rollouts=1), 0.1, 1)) == 1


def test_steps_that_take_as_long_as_ideal_ones_are_all_of_the_time() -> None:
    ideal = [100 + PLAN.ideal_step_s * number for number in range(60)]
    assert PLAN.ideal_step_s == 2.5
    assert window_end(PLAN, ideal, 100.0) == 220.0
    assert goodput(PLAN, ideal, 100.0) == 1.0


def test_the_step_under_way_at_the_end_counts_with_its_whole_time() -> None:
    slow = [100 + 7.0 * number for number in range(60)]
    assert window_end(PLAN, slow, 100.0) == 226.0  # the first after 220
    assert goodput(PLAN, slow, 100.0) == pytest.approx(2.5 / 7.0)


def test_a_contender_that_hangs_has_what_it_did_by_then() -> None:
    hung = [100.0, 102.5, 105.0]
    assert window_end(PLAN, hung, 100.0) is None
    assert latest_end(PLAN, 100.0) == 230.0
    assert goodput(PLAN, hung, 100.0) == pytest.approx(2 * 2.5 / 130)
    assert goodput(PLAN, [], 0.0) == 0.0


def test_torn_and_older_samples_are_counted() -> None:
    assert torn_and_older([(1, 1), (2, 2), (2, 2)]) == (0, 0)
    assert torn_and_older([(1, 2), (2, 2), (1, 1), (2, 2)]) == (1, 1)
    assert torn_and_older([]) == (0, 0)


def test_half_a_line_is_left_out_and_a_step_that_was_made_again_counts_once(tmp_path: Path) -> None:
    assert lines(tmp_path / "steps") == []
    (tmp_path / "steps").write_text("[1, 10.0]\n[2, 12.0]\n[1, 20.0]\n[2, 22.0]\n[3, 24.0]\n[4, ")
    assert len(lines(tmp_path / "steps")) == 5
    assert completed(tmp_path) == [10.0, 12.0, 24.0]


def test_the_process_of_a_rollout_is_the_last_that_said_so(tmp_path: Path) -> None:
    assert rank_of(tmp_path, 3) is None
    (tmp_path / "rollout-3").write_text(json.dumps([42, 4711]))
    assert rank_of(tmp_path, 3) == (42, 4711)


def outcome(contender: str, percent: float, share: float, older: int = 0) -> Outcome:
    return Outcome(contender, percent, 1, share, 48, 4, 4, 3.0, 0, older)


def test_a_batch_is_of_the_open_step_and_of_the_newest_version_or_the_one_before(tmp_path: Path) -> None:
    make_field(tmp_path / "run", Plan(rollouts=2, per_step=2, train_s=0.0))
    folder = tmp_path / "run"
    (folder / "checkpoint").write_text("5")
    (folder / "samples-0").write_text("[6, 5.0, 5.0, 1.0]\n" * 9)  # of an earlier life of the trainer
    field = Field(folder)
    trainer = Trainer(field)
    assert not is_open(field.gate)
    too_old, other_step, good = "[6, 3.0, 3.0, 1.0]\n", "[5, 5.0, 5.0, 1.0]\n", "[6, 5.0, 5.0, 1.0]\n"
    said = iter([too_old + other_step + good, "[6, 4.0, 4.0, 1.0]\n" + good[:5], good[5:]])
    gates: list[int] = []

    def meanwhile() -> None:
        gates.append(is_open(field.gate))
        with (folder / "samples-1").open("a") as file:
            file.write(next(said, good))

    trainer.gather(meanwhile)
    assert gates == [6] * 4
    assert not is_open(field.gate)
    assert trainer.train() == 6
    trainer.arrived(6)
    assert [step for step, _ in lines(folder / "steps")] == [6]
    assert Trainer(field).step == 6


def test_a_model_says_which_version_it_is_and_that_it_is_torn() -> None:
    model = Model(64)
    assert model.values() == (-1.0, -1.0)
    model.fill(7)
    assert model.values() == (7.0, 7.0)
    next(iter(model.tensors.values())).fill_(8)
    assert model.values() == (7.0, 8.0)


def test_bars() -> None:
    good = [
        outcome("warm", 10, 0.97),
        outcome("warm", 10, 0.96),
        outcome("warm", 10, 0.90),
        outcome("torchft", 10, 0.8),
    ]
    assert median(good, "warm", 10) == 0.96
    assert median(good, "torchrun", 10) is None
    assert [bar.kept for bar in bars(good)] == [True, True, True]
    bad = [outcome("warm", 10, 0.9, older=1), outcome("cold", 10, 0.95), outcome("torchft", 10, 0.9)]
    assert [bar.kept for bar in bars(bad)] == [False, False, False]
    assert [bar.kept for bar in bars([outcome("warm", 0, 0.9), outcome("torchft", 0, 0.99)])] == [True]


def test_what_a_fault_costs_needs_windows_without_faults() -> None:
    found = [outcome("warm", 0, 0.98), outcome("warm", 10, 0.96), outcome("warm", 10, 0.94), outcome("cold", 10, 0.9)]
    assert lost_per_fault_s(found, PLAN, "warm", 10) == pytest.approx((0.02 + 0.04) * 120 / 8)
    assert lost_per_fault_s(found, PLAN, "cold", 10) is None
    assert lost_per_fault_s(found, PLAN, "warm", 20) is None


def result() -> dict[str, Any]:
    outcomes = [
        outcome(name, percent, 0.98 - number * percent / 100)
        for number, name in enumerate(CONTENDERS)
        for percent in PERCENTS
    ]
    medians = {name: {f"{percent:g}": median(outcomes, name, percent) for percent in PERCENTS} for name in CONTENDERS}
    return {"plan": {"rollouts": 8, "hour_s": 24.0}, "medians": medians, "outcomes": [one.report() for one in outcomes]}


def test_the_figure_has_a_line_and_a_name_for_each_contender() -> None:
    figure = ElementTree.fromstring(draw(json.loads(json.dumps(result()))))
    curves = figure.findall(f"{SVG}polyline")
    assert {line.get("stroke") for line in curves} == {*COLOURS.values()}
    assert set(COLOURS) == set(CONTENDERS)
    for line in curves:
        points = [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
        assert len(points) == len(PERCENTS)
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
        assert points == sorted(points)  # to the right, and down
    texts = [text.text for text in figure.findall(f"{SVG}text")]
    assert {"replicas, warm: 0.98", "torchft: 0.38", "20 %"} <= {*texts}
    assert figure.find(f"{SVG}title") is not None


def test_a_contender_that_was_not_measured_at_a_rate_has_a_shorter_line() -> None:
    partly = result()
    partly["medians"]["torchft"]["20"] = None
    figure = ElementTree.fromstring(draw(partly))
    assert sorted(len((line.get("points") or "").split()) for line in figure.findall(f"{SVG}polyline")) == [4, 5, 5, 5]


def test_labels_do_not_touch() -> None:
    assert apart({"a": 10.0, "b": 100.0}) == {"a": 10.0, "b": 100.0}
    assert apart({"a": 10.0, "b": 12.0, "c": 8.0}) == {"c": 8.0, "a": 24.0, "b": 40.0}
