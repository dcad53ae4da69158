"""How each endpoint did in the last hour: a small line of its success, and how much of its pace it used lately.

Both come from the roll-ups, which are a minute behind; what is not counted to its end is left out. Pages that refresh themselves
every two seconds share one reading for a while.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from madeira.console import words
from madeira.store import rollups
from madeira.store.rollups import Slice

#: A drawing's width and height; a line as thick as the style says fits in.
WIDTH, HEIGHT = 72, 18

#: From the edge, so that a line at the very top or bottom is not cut.
_EDGE: Final = 2

#: Seconds for which one reading serves.
_KEPT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Spark:
    """How one endpoint did."""

    #: The line of its success: from none at the bottom to all at the top; broken where nothing was tried.
    path: str
    #: The same in words.
    told: str
    #: Calls per second in the last five minutes that were counted.
    pace: float

    @property
    def shown_pace(self) -> str:
        """The pace as one reads it."""
        return f"{self.pace:,.0f}" if self.pace >= 100 else f"{self.pace:.2g}"


class Sparks:
    """Reads and keeps them; `now` is a clock that never goes back, in seconds."""

    def __init__(self, now: Any = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._found: Mapping[str, Spark] = {}

    def read(self, conn: psycopg.Connection[Any]) -> Mapping[str, Spark]:
        """By endpoint; one that was not called in the last hour is left out."""
        with self._lock:
            if self._read_at is None or self._now() - self._read_at >= _KEPT_S:
                self._found = {name: spark(slices) for name, slices in rollups.slices(conn).items()}
                self._read_at = self._now()
            return self._found


def spark(slices: Sequence[Slice]) -> Spark:
    """How an endpoint did in these slices of the hour, of which those where nothing happened are left out."""
    attempts, succeeded = sum(s.attempts for s in slices), sum(s.succeeded for s in slices)
    share = words.percent(succeeded, attempts) if attempts else "none"
    told = f"{share} of {words.plural(attempts, 'attempt')} in the last hour succeeded"
    lately = sum(s.attempts for s in slices if s.number == rollups.SLICES - 1)
    return Spark(_path({s.number: s.succeeded / s.attempts for s in slices if s.attempts}), told, lately / rollups.SLICE_S)


def _path(shares: Mapping[int, float]) -> str:
    step = (WIDTH - 2 * _EDGE) / (rollups.SLICES - 1)
    path = ""
    for number in sorted(shares):
        y = HEIGHT - _EDGE - shares[number] * (HEIGHT - 2 * _EDGE)
        joined = number - 1 in shares
        path += f"{'L' if joined else 'M'}{_EDGE + number * step:.1f} {y:.1f}{'' if joined else 'h0'}"
    return path
