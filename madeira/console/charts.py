"""Charts of what happened lately, drawn on the server as SVG: in and out, success, how long it took, and retries.

They are drawn from the roll-ups, never from events. What has just begun is left out: it is not counted yet, and would look like a
fall. Each point can be pointed at for its values; the same numbers, more coarsely, are a table for those who cannot see charts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from madeira.console import words
from madeira.states import Outcome
from madeira.store.rollups import Numbers, Point, Range


class Shown(NamedTuple):
    """A range as it is offered."""

    title: str
    range: Range
    #: Points at the end that are not counted to their end yet.
    unripe: int
    #: Seconds between two labels of the axis of time, and how a label is made.
    label_s: int
    label: str


RANGES: Final = {
    "1h": Shown("1 h", Range("minute", timedelta(minutes=1), 60), 2, 900, "%H:%M"),
    "24h": Shown("24 h", Range("minute", timedelta(minutes=30), 48), 1, 21_600, "%H:%M"),
    "7d": Shown("7 d", Range("hour", timedelta(hours=3), 56), 1, 86_400, "%a %d"),
}

#: Where the plot stands in a drawing of 480 by 150.
LEFT, RIGHT, TOP, BOTTOM = 62.0, 472.0, 10.0, 124.0

#: Room at the end of the axis of time that a label needs; one that would stick out is left away.
_LABEL: Final = 20.0

#: Rows of the table.
_ROWS: Final = 12

#: Between two labels, at least.
_APART: Final = 14.0

#: Labels of an axis of numbers at most.
_LABELS: Final = 4

#: Labels that an axis of times to success may have, in seconds; it is logarithmic.
_SPANS: Final = {
    0.001: "1 ms", 0.01: "10 ms", 0.1: "100 ms", 1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min", 3600.0: "1 h",
    21_600.0: "6 h", 86_400.0: "1 d",
}  # fmt: skip

#: Where an axis of shares may begin, in percent.
_FLOORS: Final = (99.0, 90.0, 50.0, 0.0)

#: Classes of retries that are drawn, and as what.
_RETRIES: Final = {"1": "r1", "2": "r2", "3-4": "r3", "5+": "r4"}

#: A value to a place on the vertical axis.
_Scale = Callable[[float], float]


class Cell(NamedTuple):
    """What happened in a while."""

    at: datetime
    seconds: float
    accepted: int
    numbers: Numbers

    @property
    def came_in(self) -> float:
        """Events accepted a second."""
        return self.accepted / self.seconds

    @property
    def went_out(self) -> float:
        """Deliveries made a second."""
        return self.numbers.delivered / self.seconds

    @property
    def success(self) -> float | None:
        """Percent of the attempts that succeeded; one that came too late counts for nothing. None without any."""
        counts = dict(self.numbers.attempts)
        made = sum(counts.values()) - counts.get(Outcome.LATE, 0)
        return 100 * counts.get(Outcome.SUCCEEDED, 0) / made if made else None

    def retries(self, name: str) -> float:
        """Deliveries that ended after so many retries, a minute."""
        return dict(self.numbers.retries).get(name, 0) / self.seconds * 60


class Series(NamedTuple):
    """A line, or a part of bars."""

    name: str
    #: How it is drawn; the style says what that means.
    look: str
    path: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing."""

    title: str
    series: Sequence[Series]
    #: Labels of the vertical axis: place and text.
    values: Sequence[tuple[float, str]]
    #: What is told of each point: where it is, and the text.
    told: Sequence[tuple[float, str]]

    @property
    def latest(self) -> str:
        """What is told of the last point."""
        return self.told[-1][1] if self.told else "nothing"


@dataclass(frozen=True, slots=True)
class Charts:
    """All of them, of one range."""

    drawn: Sequence[Chart]
    #: Labels of the axis of time: place and text.
    times: Sequence[tuple[float, str]]
    #: Where the plot begins.
    left: float
    #: How wide a point is.
    width: float
    #: The rows of the table, and how long each is.
    rows: Sequence[Sequence[str]]
    row_span: str
    #: Whether there is anything to be seen.
    is_empty: bool


def draw(points: Sequence[Point], shown: Shown) -> Charts:
    """The charts of a series of the roll-ups; `points` are those of the range of `shown`."""
    step_s = shown.range.step.total_seconds()
    cells = [Cell(p.at, step_s, p.accepted, p.numbers) for p in points[: -shown.unripe]]
    places = _Places(cells, "%H:%M" if shown.label == "%H:%M" else "%a %d %H:%M")
    merged = list(_merged(cells, max(1, math.ceil(len(cells) / _ROWS))))
    return Charts(
        [_flow(cells, places), _success(cells, places), _latency(cells, places), _retried(cells, places)],
        [
            (places.x(n), cell.at.astimezone(UTC).strftime(shown.label))
            for n, cell in enumerate(cells)
            if _is_round(cell.at, shown.label_s) and places.x(n) <= RIGHT - _LABEL
        ],
        LEFT,
        round(places.width, 1),
        [[places.when(cell), *_row(cell)] for cell in merged],
        words.span(merged[0].seconds) if merged else "",
        is_empty=not any(cell.accepted or any(n for _, n in cell.numbers.attempts) for cell in cells),
    )


def _is_round(at: datetime, every_s: int) -> bool:
    return int(at.timestamp()) % every_s == 0


class _Places:
    """Where the points stand."""

    def __init__(self, cells: Sequence[Cell], label: str) -> None:
        self.width = (RIGHT - LEFT) / max(1, len(cells))
        self._label = label
        self._cells = cells

    def x(self, n: int) -> float:
        """The middle of the nth."""
        return round(LEFT + (n + 0.5) * self.width, 1)

    def told(self, tell: Callable[[Cell], str]) -> list[tuple[float, str]]:
        """What is told of each."""
        return [(self.x(n), f"{self.when(cell)} {tell(cell)}") for n, cell in enumerate(self._cells)]

    def when(self, cell: Cell) -> str:
        """When it was, in UTC."""
        return cell.at.astimezone(UTC).strftime(self._label)

    def line(self, values: Iterable[float | None], y: _Scale) -> str:
        """A line through values, broken where there is none; one that stands alone is a dot."""
        path, is_on = "", False
        for n, value in enumerate(values):
            if value is None:
                is_on = False
                continue
            path += f"{'L' if is_on else 'M'}{self.x(n):g} {y(value):g}{'' if is_on else 'h0'}"
            is_on = True
        return path

    def bars(self, values: Iterable[tuple[float, float]], y: _Scale) -> str:
        """Bars from one value to another."""
        wide = max(1.0, round(self.width - 1.5, 1))
        path = ""
        for n, (low, high) in enumerate(values):
            if high > low:
                path += f"M{self.x(n) - wide / 2:.1f} {y(low):g}V{y(high):g}h{wide:g}V{y(low):g}z"
        return path


def _flow(cells: Sequence[Cell], places: _Places) -> Chart:
    came, went = [c.came_in for c in cells], [c.went_out for c in cells]
    y, labels = _linear(max([*came, *went], default=0.0))
    return Chart(
        "In and out, per second",
        [Series("in: events accepted", "a", places.line(came, y)), Series("out: deliveries made", "b", places.line(went, y))],
        [(y(value), _figure(value)) for value in labels],
        places.told(lambda c: f"{_figure(c.came_in)}/s in, {_figure(c.went_out)}/s out"),
    )


def _success(cells: Sequence[Cell], places: _Places) -> Chart:
    shares = [c.success for c in cells]
    least = min((share for share in shares if share is not None), default=100.0)
    floor = next(f for f in _FLOORS if f <= least)
    return Chart(
        "Success rate, percent of attempts",
        [Series("attempts that succeeded", "a", places.line(shares, lambda v: _at((v - floor) / (100 - floor))))],
        [(_at(0), f"{floor:g} %"), (_at(0.5), f"{(floor + 100) / 2:g} %"), (_at(1), "100 %")],
        places.told(lambda c: "no attempt" if c.success is None else f"{_percent(c.success)} succeeded"),
    )


def _latency(cells: Sequence[Cell], places: _Places) -> Chart:
    middle, most = [c.numbers.latency_s(0.5) for c in cells], [c.numbers.latency_s(0.95) for c in cells]
    values = [value for value in (*middle, *most) if value is not None] or [0.1, 1.0]
    # Never the longest of all: an axis needs a span above.
    *_, low = [s for s in list(_SPANS)[:-1] if s <= max(min(values), min(_SPANS))]
    high = next((s for s in _SPANS if s >= max(values) and s > low), max(_SPANS))

    def y(value: float) -> float:
        return _at(math.log(max(value, low) / low) / math.log(high / low))

    return Chart(
        "From acceptance to delivery, seconds (logarithmic)",
        [
            Series("p50: half were quicker", "a", places.line(middle, y)),
            Series("p95: of 20, one was slower", "b", places.line(most, y)),
        ],
        _apart([(y(value), told) for value, told in _SPANS.items() if low <= value <= high]),
        places.told(lambda c: f"p50 {_span(c.numbers.latency_s(0.5))}, p95 {_span(c.numbers.latency_s(0.95))}"),
    )


def _retried(cells: Sequence[Cell], places: _Places) -> Chart:
    y, labels = _linear(max((sum(map(c.retries, _RETRIES)) for c in cells), default=0.0))
    below = [0.0] * len(cells)
    series = []
    for name, look in _RETRIES.items():
        above = [low + cell.retries(name) for low, cell in zip(below, cells, strict=True)]
        series.append(
            Series(f"{name} {'retry' if name == '1' else 'retries'}", look, places.bars(zip(below, above, strict=True), y))
        )
        below = above
    return Chart(
        "Deliveries that took retries, per minute",
        series,
        [(y(value), _figure(value)) for value in labels],
        places.told(lambda c: "per min " + ", ".join(f"{name}: {_figure(c.retries(name))}" for name in _RETRIES)),
    )


def _at(share: float) -> float:
    """A share of the height as a place."""
    return round(BOTTOM - share * (BOTTOM - TOP), 1)


def _apart(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Labels without those that would run into one above them."""
    kept = [labels[-1]]
    for label in labels[-2::-1]:
        if label[0] - kept[-1][0] >= _APART:
            kept.append(label)
    return kept[::-1]


def _linear(most: float) -> tuple[_Scale, list[float]]:
    """An axis from zero to `most` or a bit beyond, and its labels, which are round."""
    if most <= 0:
        return (lambda _: _at(0)), [0.0]
    magnitude = 10.0 ** math.floor(math.log10(most / _LABELS))
    step = next(step for n in (1, 2, 5, 10, 20) if (step := n * magnitude) * _LABELS >= most)
    count = math.ceil(most / step - 1e-9)
    top = count * step
    return (lambda value: _at(value / top)), [n * step for n in range(count + 1)]


def _merged(cells: Sequence[Cell], size: int) -> Iterable[Cell]:
    """The same in fewer cells, of `size` each; the last ones are whole."""
    for begin in range(len(cells) % size, len(cells), size):
        some = cells[begin : begin + size]
        yield Cell(some[0].at, sum(c.seconds for c in some), sum(c.accepted for c in some), _sum([c.numbers for c in some]))


def _sum(numbers: Sequence[Numbers]) -> Numbers:
    def together(pairs: Sequence[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...]:
        return tuple((same[0][0], sum(n for _, n in same)) for same in zip(*pairs, strict=True))

    return Numbers(
        sum(n.delivered for n in numbers),
        sum(n.dead for n in numbers),
        sum(n.cancelled for n in numbers),
        together([n.attempts for n in numbers]),
        together([n.retries for n in numbers]),
        tuple(map(sum, zip(*(n.latency for n in numbers), strict=True))),
    )


def _row(cell: Cell) -> list[str]:
    return [
        _figure(cell.came_in),
        _figure(cell.went_out),
        "none" if cell.success is None else _percent(cell.success),
        _span(cell.numbers.latency_s(0.5)),
        _span(cell.numbers.latency_s(0.95)),
        *(_figure(cell.retries(name)) for name in _RETRIES),
    ]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    """To a tenth; never 100 unless it is."""
    return "100 %" if value >= 100 else f"{math.floor(value * 10) / 10:g} %"


def _span(seconds: float | None) -> str:
    return "none" if seconds is None else words.span(seconds)
