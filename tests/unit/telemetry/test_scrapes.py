"""Which scrapers of the metrics the end of a run waits for.

Covers: telemetry/scrapes.py.
"""

from __future__ import annotations

from replicas.telemetry.scrapes import Scrapes


def pair() -> Scrapes:
    """Two servers, each of which comes every 10 s, 1 s after the other."""
    made = Scrapes()
    for time_s in (0.0, 10.0, 20.0):
        made.note_scrape("one", time_s)
        made.note_scrape("two", time_s + 1)
    return made


def test_every_one_of_a_pair_is_waited_for() -> None:
    made = pair()
    assert made.due_s(22.0) == 15.0
    made.note_scrape("one", 30.0, over=True)
    assert made.due_s(30.0) == 15.0, "the other has not come yet"
    made.note_scrape("two", 31.0, over=True)
    assert made.due_s(31.0) == 0.0


def test_the_longest_interval_counts() -> None:
    made = pair()
    made.note_scrape("slow", -10.0)
    made.note_scrape("slow", 20.0)
    assert made.due_s(22.0) == 45.0


def test_nobody_is_waited_for_who_came_once_or_has_stopped_to_come() -> None:
    made = Scrapes()
    assert made.due_s(0.0) == 0.0
    made.note_scrape("once", 0.0)
    assert made.due_s(0.0) == 0.0
    assert pair().due_s(42.0) == 0.0


def test_strangers_push_out_those_that_came_longest_ago() -> None:
    made = pair()
    for number in range(8):
        made.note_scrape(f"stranger {number}", 22.0)
    assert made.due_s(22.0) == 0.0
