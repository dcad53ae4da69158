"""The charts say what the roll-ups say: in figures, in units, at the pointer and in a table, whatever the range."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from madeira.console import charts, overview
from madeira.console.charts import BOTTOM, LEFT, RANGES, RIGHT, TOP
from madeira.states import Outcome, Role
from madeira.store import notices
from madeira.store.notices import Kind
from madeira.store.rollups import BOUNDS, RETRIES, Numbers, Point
from tests.api.serving import Api
from tests.console.browser import Element, Seen, queried, somebody
from tests.console.scenes import HOSTILE, LARGEST

Connection = psycopg.Connection[Any]

BASE = datetime(2026, 3, 1, tzinfo=UTC)


def numbers(delivered: int = 0, failed: int = 0, late: int = 0, retries: dict[str, int] | None = None, cell: int = 6) -> Numbers:
    """What happened: so many delivered, in the time of one cell, and so many attempts that failed."""
    made = {Outcome.SUCCEEDED: delivered, Outcome.RETRYABLE: failed, Outcome.LATE: late}
    return Numbers(
        delivered,
        attempts=tuple((str(outcome), made.get(outcome, 0)) for outcome in Outcome),
        retries=tuple((name, (retries or {}).get(name, 0)) for name in RETRIES.values()),
        latency=tuple(delivered if n == cell else 0 for n in range(len(BOUNDS) + 1)),
    )


def points(name: str, *last: tuple[int, Numbers]) -> list[Point]:
    """The points of a range, of which the last that are counted to their end are these."""
    shown = RANGES[name]
    given = [(0, numbers())] * (shown.range.points - shown.unripe - len(last)) + [*last] + [(9999, numbers(9999))] * shown.unripe
    return [Point(BASE + n * shown.range.step, *one) for n, one in enumerate(given)]


def drawn(name: str, *last: tuple[int, Numbers]) -> charts.Charts:
    return charts.draw(points(name, *last), RANGES[name])


def told(found: charts.Charts) -> list[str]:
    """What is told of the last point, without when it was."""
    return [re.sub(r"^(\w+ \d\d )?\d\d:\d\d ", "", chart.told[-1][1]) for chart in found.drawn]


def test_each_point_tells_its_figures_and_what_has_just_begun_is_left_out() -> None:
    found = drawn("1h", (600, numbers(480, failed=20, late=50, retries={"0": 400, "1": 60, "3-4": 12, "5+": 3})))
    assert told(found) == [
        "10/s in, 8/s out",
        "96 % succeeded",
        "p50 0.8 s, p95 1.0 s",
        "per min 1: 60, 2: 0, 3-4: 12, 5+: 3",
    ]
    assert [len(chart.told) for chart in found.drawn] == [58] * 4
    assert "9,999" not in str(found)


@pytest.mark.parametrize(("name", "seconds"), [("1h", 60), ("24h", 1800), ("7d", 10_800)])
def test_figures_are_per_second_whatever_a_point_lasts(name: str, seconds: int) -> None:
    assert told(drawn(name, (seconds * 3, numbers(seconds * 2))))[0] == "3/s in, 2/s out"


def test_where_nothing_was_tried_there_is_a_gap_and_no_rate_of_zero() -> None:
    found = drawn("1h", (1, numbers(1)), (1, numbers()), (1, numbers(1)))
    success, latency = found.drawn[1], found.drawn[2]
    assert success.told[-2][1].endswith("no attempt")
    assert latency.told[-2][1].endswith("p50 none, p95 none")
    for line in (success.series[0].path, latency.series[0].path):
        assert line.count("M") == 2
        assert "L" not in line


def test_a_rate_of_success_is_a_hundred_only_when_it_is() -> None:
    assert told(drawn("1h", (0, numbers(99_999, failed=1))))[1] == "99.9 % succeeded"
    assert told(drawn("1h", (0, numbers(99_999))))[1] == "100 % succeeded"


def test_the_table_holds_the_same_more_coarsely() -> None:
    """Sums are of all that is in a row: a rate of success is not the mean of rates."""
    found = drawn("1h", *[(60, numbers(0, failed=300))] * 4, (60, numbers(100, retries={"2": 10})))
    assert found.row_span == "5 min"
    assert len(found.rows) == 11
    assert found.rows[-1][1:] == ["1", "0.333", "7.6 %", "0.8 s", "1.0 s", "0", "2", "0", "0"]
    assert found.rows[-1][0] == found.drawn[0].told[-5][1].split()[0]


def test_a_range_in_which_nothing_happened_says_so() -> None:
    assert drawn("24h").is_empty
    assert not drawn("24h", (1, numbers())).is_empty
    assert not drawn("24h", (0, numbers(failed=1))).is_empty


_NUMBERS = st.builds(
    numbers,
    delivered=st.integers(0, 10**9),
    failed=st.integers(0, 10**9),
    retries=st.dictionaries(st.sampled_from(list(RETRIES.values())), st.integers(0, 10**9)),
    cell=st.integers(0, len(BOUNDS)),
)


def test_what_took_longer_than_a_day_has_an_axis_too() -> None:
    shown = drawn("1h", (1, numbers(1, cell=len(BOUNDS))))
    assert "1 d" in str(shown)


@settings(deadline=None)
@given(st.sampled_from(list(RANGES)), st.lists(st.tuples(st.integers(0, 10**9), _NUMBERS), min_size=1, max_size=10))
def test_whatever_happened_stands_within_the_plot_with_labels_that_do_not_run_into_each_other(
    name: str, last: list[tuple[int, Numbers]]
) -> None:
    for chart in drawn(name, *last).drawn:
        for series in chart.series:
            for x, y in places(series.path):
                assert LEFT <= x <= RIGHT
                assert TOP <= y <= BOTTOM
        heights = sorted(y for y, _ in chart.values)
        assert all(TOP <= y <= BOTTOM for y in heights)
        assert all(after - before >= 12 for before, after in pairwise(heights)), chart.values
        assert len(dict(chart.values)) == len(chart.values)


def places(path: str) -> Iterator[tuple[float, float]]:
    """The points of a line, and the corners where bars begin."""
    for part in path.replace("L", "M").split("M")[1:]:
        x, y = part.split("V")[0].removesuffix("h0").split()
        yield float(x), float(y)
        if "V" in part:
            yield float(x), float(part.split("V")[1].split("h")[0])


# -- on the page -----------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(conn: Connection) -> Iterator[str]:
    """An endpoint of which in each minute and hour of the past 120 elements in and 60 delivered are counted."""
    every = {"delivered": 60, "attempts_succeeded": 60, "attempts_retryable": 60, "retries_1": 60, "latency_6": 60}
    columns = [
        row[0]
        for row in conn.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'rollup_endpoint' AND data_type = 'integer'"
        )
    ]
    values = ", ".join(f"{every.get(column, 0)} * f" for column in columns)
    for span, count, factor in (("minute", 1500, 1), ("hour", 170, 60)):
        begun = f"date_trunc('{span}', now(), 'UTC') - n * interval '1 {span}'"
        conn.execute(
            f"INSERT INTO rollup_endpoint (span, bucket, endpoint, {', '.join(columns)})"
            f" SELECT '{span}', {begun}, 'counted', {values}"
            f" FROM generate_series(0, {count}) n, (VALUES ({factor})) v (f)".encode()
        )
        conn.execute(
            "INSERT INTO rollup_source (span, bucket, source, accepted)"
            f" SELECT '{span}', {begun}, 'shop', 120 * {factor} FROM generate_series(0, {count}) n".encode()
        )
    yield "counted"
    conn.execute("TRUNCATE rollup_endpoint, rollup_source")


def drawings(seen: Seen) -> list[Element]:
    return seen.root.one(id="charts").all("svg")


@pytest.mark.parametrize(("query", "last"), [("", "1h"), ("?range=24h", "24h"), ("?range=7d", "7d")], ids=["1h", "24h", "7d"])
def test_the_overview_draws_four_charts_of_the_range_that_the_address_says(
    shared_api: Api, counted: str, query: str, last: str
) -> None:
    seen = somebody(shared_api, Role.VIEWER).get(f"/console{query}")
    assert len(seen.reply.body) < LARGEST
    assert [svg.attributes["aria-label"].split(";")[0] for svg in drawings(seen)] == [
        "In and out, per second",
        "Success rate, percent of attempts",
        "From acceptance to delivery, seconds (logarithmic)",
        "Deliveries that took retries, per minute",
    ]
    shown = RANGES[last]
    for svg, words in zip(drawings(seen), ["2/s in, 1/s out", "50 % succeeded", "p50 0.8 s", "per min 1: 60, 2: 0"], strict=True):
        titles = [title.text for title in svg.all("title")]
        assert len(titles) == shown.range.points - shown.unripe
        # The first of a range may have begun before what is counted.
        assert all(words in title for title in titles[1:])
        assert svg.attributes["role"] == "img"
        assert words in svg.attributes["aria-label"]
    folded = seen.root.one("details", id="charts-table")
    assert "open" not in folded.attributes
    assert folded.one("tbody").all("tr")[-1].text.endswith("2 1 50 % 0.8 s 1.0 s 60 0 0 0")
    ranges = seen.root.one("p", role="group")
    assert [queried(a.attributes["href"]) for a in ranges.all("a")] == [{}, {"range": "24h"}, {"range": "7d"}]
    assert ranges.one("a", aria_current="true").text == shown.title


def test_a_page_that_refreshes_itself_every_two_seconds_has_its_charts_drawn_a_few_times_a_minute() -> None:
    times = [BASE + timedelta(seconds=s) for s in range(60)]
    assert all(overview.draws_charts(at, refreshes=False) for at in times)
    for first in range(2):
        assert sum(overview.draws_charts(at, refreshes=True) for at in times[first::2]) == 3


def test_a_range_that_is_not_offered_is_told_in_words(shared_api: Api) -> None:
    seen = somebody(shared_api, Role.VIEWER).get("/console?range=1y")
    assert seen.status == 422
    assert "1h, 24h, 7d" in seen.text


def test_without_anything_counted_the_page_says_why_and_draws_nothing(shared_api: Api, conn: Connection) -> None:
    conn.execute("TRUNCATE rollup_endpoint, rollup_source")
    seen = somebody(shared_api, Role.VIEWER).get("/console")
    assert "Nothing was counted in this time" in seen.text
    assert not drawings(seen)


@pytest.mark.parametrize(
    ("kind", "endpoint", "detail", "words", "link"),
    [
        (Kind.DEAD_LETTERS_BEGAN, "sink", {"reason": "http_503"}, "Dead letters of sink began: http_503",
         "/console/dead-letters?endpoint=sink"),
        (Kind.BREAKER_OPENED, "sink", {"reason": "5 of 5 failed"}, "sink failed so often that it is left alone: 5 of 5 failed",
         "/console/endpoints/sink"),
        (Kind.BREAKER_CLOSED, "sink", {}, "sink is called again as ever", "/console/endpoints/sink"),
        (Kind.ENDPOINT_DISABLED, "sink", {"by": "token ann", "reason": HOSTILE}, f"sink was disabled by token ann: {HOSTILE}",
         "/console/endpoints/sink"),
        (Kind.RECONCILE_DIFFERENCES, "", {"missing": 3, "stray": 1}, "Reconcile found, and mended, 3 missing and 1 stray", None),
    ],
    ids=[str(kind) for kind in Kind],
)  # fmt: skip
def test_what_people_were_told_stands_on_the_overview_in_words(
    shared_api: Api, conn: Connection, kind: Kind, endpoint: str, detail: dict[str, Any], words: str, link: str | None
) -> None:
    notices.write(conn, kind, endpoint, detail)
    seen = somebody(shared_api, Role.VIEWER).get("/console")
    latest = seen.root.one(id="notices").all("li")[0]
    assert words in latest.text
    assert [a.attributes["href"] for a in latest.all("a")] == ([link] if link else [])
    assert b"alert(1)</script>" not in seen.reply.body


def test_the_overview_shows_a_bounded_number_of_notices(shared_api: Api, conn: Connection) -> None:
    for n in range(12):
        notices.write(conn, Kind.BREAKER_CLOSED, f"e{n}")
    listed = somebody(shared_api, Role.VIEWER).get("/console").root.one(id="notices").all("li")
    assert ["e11" in listed[0].text, len(listed)] == [True, 6]


def test_the_week_begins_its_days_at_midnight() -> None:
    days = drawn("7d", (1, numbers(1))).times
    assert len(days) == 7
    assert days[0][1] == (BASE + timedelta(0)).strftime("%a %d")
