"""A picture of calls: one row per lane or kind, one bar per call from its start to its end. Plain SVG, no library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

#: Pixels.
WIDTH: Final = 860
_LEFT, _RIGHT, _TOP, _BOTTOM = 190, 20, 12, 34
_BAR, _GAP, _BETWEEN = 9, 3, 16

_STYLE: Final = """
text { font: 12px system-ui, sans-serif; fill: #333 } .axis { stroke: #bbb } .row { stroke: #e4e4e4 }
.call { fill: #2b6cb0 } .failed { fill: #fff; stroke: #b3261e; stroke-width: 1.5 } .away { fill: #f3e3e1 }
.number { font-size: 8px; fill: #fff } .failed-number { font-size: 8px; fill: #b3261e }
@media (prefers-color-scheme: dark) {
  svg { background: #1b1b1b } text { fill: #ddd } .axis { stroke: #666 } .row { stroke: #333 }
  .call { fill: #6ea8dc } .failed { fill: #1b1b1b; stroke: #f2958c } .away { fill: #3a2422 }
  .number { fill: #111 } .failed-number { fill: #f2958c }
}
"""


@dataclass(frozen=True)
class Bar:
    """A call, in seconds of the picture's time."""

    start: float
    end: float
    failed: bool = False
    #: Written on the bar.
    label: str = ""


def _tracks(bars: Sequence[Bar], shortest: float) -> list[list[Bar]]:
    """Bars that overlap go on tracks of their own."""
    tracks: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda b: b.start):
        free = next((t for t in tracks if max(t[-1].end, t[-1].start + shortest) <= bar.start), None)
        if free is None:
            tracks.append([bar])
        else:
            free.append(bar)
    return tracks


def draw(title: str, rows: Mapping[str, Sequence[Bar]], *, away: tuple[float, float] | None = None) -> str:
    """An SVG of `rows`; `away`: seconds between which the receiver was gone."""
    last = max(bar.end for bars in rows.values() for bar in bars)
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50) if last / s <= 14)
    end = step * (int(last / step) + 1)
    scale = (WIDTH - _LEFT - _RIGHT) / end
    shortest = 4 / scale
    body: list[str] = []
    y = float(_TOP)
    for name, bars in rows.items():
        tracks = _tracks(bars, shortest)
        height = len(tracks) * (_BAR + _GAP) - _GAP
        for n, part in enumerate(name.split("\n")):
            body.append(f'<text x="{_LEFT - 12}" y="{y + 9 + 14 * n:.0f}" text-anchor="end">{escape(part)}</text>')
        for n, track in enumerate(tracks):
            at = y + n * (_BAR + _GAP)
            body.extend(_bar(bar, _LEFT + bar.start * scale, at, max(3.0, (bar.end - bar.start) * scale - 1)) for bar in track)
        y += max(height, 14 * (name.count("\n") + 1)) + _BETWEEN
        body.append(f'<line class="row" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y - 8:.0f}" y2="{y - 8:.0f}"/>')
    ticks = [n * step for n in range(int(end / step) + 1)]
    for tick in ticks:
        x = _LEFT + tick * scale
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8:.0f}" y2="{y - 3:.0f}"/>')
        unit = " s" if tick == ticks[-1] else ""
        body.append(f'<text x="{x:.1f}" y="{y + 12:.0f}" text-anchor="middle">{tick:g}{unit}</text>')
    behind = ""
    if away:
        x, width = _LEFT + away[0] * scale, (away[1] - away[0]) * scale
        behind = f'<rect class="away" x="{x:.1f}" y="{_TOP - 6}" width="{width:.1f}" height="{y - 8 - _TOP + 6:.0f}"/>'
    height = y + _BOTTOM - 12
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{behind}" + "\n".join(body) + "</svg>\n"
    )


def _bar(bar: Bar, x: float, y: float, width: float) -> str:
    kind = "failed" if bar.failed else "call"
    drawn = f'<rect class="{kind}" x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{_BAR}" rx="1"/>'
    if bar.label:
        style = "failed-number" if bar.failed else "number"
        drawn += (
            f'<text class="{style}" x="{x + width / 2:.1f}" y="{y + 7.5:.1f}" text-anchor="middle">{escape(bar.label)}</text>'
        )
    return drawn
