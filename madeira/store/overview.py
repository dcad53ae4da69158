"""How everything stands at this moment, for a page that somebody looks at: bounded looks, whatever the size of the tables.

Where there is more than a look takes in, what is told is what was seen, and that there is more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import psycopg

#: Unfinished deliveries, dead ones and events that one look takes in.
LOOK: Final = 50_000

#: Events that are looked at to count those of the last minute.
_LATELY: Final = 5_000

#: The oldest unfinished deliveries, by endpoint.
_UNFINISHED: Final = """
    SELECT endpoint, count(*), min(created_at)
    FROM (SELECT endpoint, created_at FROM delivery WHERE finished_at IS NULL ORDER BY id LIMIT (SELECT %(look)s)) d
    GROUP BY endpoint
"""

#: Dead deliveries, by endpoint and class.
_DEAD: Final = """
    SELECT endpoint, failure_class, count(*), min(died_at), max(died_at)
    FROM (SELECT endpoint, failure_class, died_at FROM delivery
          WHERE died_at IS NOT NULL ORDER BY endpoint, event_seq LIMIT (SELECT %(look)s)) d
    GROUP BY endpoint, failure_class
    ORDER BY count(*) DESC, endpoint, failure_class
"""

#: Events that wait for their routing and are due.
_UNROUTED: Final = """
    SELECT count(*), min(route_at)
    FROM (SELECT route_at FROM event WHERE route_at IS NOT NULL ORDER BY seq LIMIT %(look)s) e
    WHERE route_at <= now()
"""

#: Events accepted in the last minute, among the newest.
_ACCEPTED: Final = """
    SELECT count(*)
    FROM (SELECT created_at FROM event ORDER BY seq DESC LIMIT %(lately)s) e
    WHERE created_at >= now() - interval '1 minute'
"""

#: Attempts recorded in the last minute that succeeded, among the newest.
_DELIVERED: Final = """
    SELECT count(*)
    FROM (SELECT recorded_at, outcome FROM delivery_log ORDER BY id DESC LIMIT %(lately)s) l
    WHERE recorded_at >= now() - interval '1 minute' AND outcome = 'succeeded'
"""


class Waiting(NamedTuple):
    """What is unfinished of an endpoint."""

    number: int
    #: When the oldest of it was routed.
    since: datetime


class Dead(NamedTuple):
    """What is dead of an endpoint, of one class."""

    endpoint: str
    failure_class: str
    number: int
    first: datetime
    last: datetime


@dataclass(frozen=True, slots=True)
class Overview:
    """How everything stands."""

    waiting: Mapping[str, Waiting]
    dead: Sequence[Dead]
    #: Events that wait for their routing, and since when the first of them does.
    unrouted: int
    unrouted_since: datetime | None
    #: Events accepted, and deliveries made, in the last minute.
    accepted: int
    delivered: int

    @property
    def waiting_in_all(self) -> int:
        """Unfinished deliveries of all endpoints."""
        return sum(one.number for one in self.waiting.values())

    @property
    def dead_in_all(self) -> int:
        """Dead deliveries of all endpoints."""
        return sum(one.number for one in self.dead)

    @property
    def more_waiting(self) -> bool:
        """Whether there may be more than was looked at."""
        return self.waiting_in_all >= LOOK

    @property
    def more_dead(self) -> bool:
        """Whether there may be more than was looked at."""
        return self.dead_in_all >= LOOK


def read(conn: psycopg.Connection[Any]) -> Overview:
    """How everything stands."""
    params = {"look": LOOK, "lately": _LATELY}
    # Planned anew each time: a plan from before a table was analysed may walk all of it.
    waiting = {name: Waiting(*rest) for name, *rest in conn.execute(_UNFINISHED, params, prepare=False)}
    dead = [Dead(*row) for row in conn.execute(_DEAD, params, prepare=False)]
    ((unrouted, since),) = conn.execute(_UNROUTED, params, prepare=False)
    ((accepted,),) = conn.execute(_ACCEPTED, params, prepare=False)
    ((delivered,),) = conn.execute(_DELIVERED, params, prepare=False)
    return Overview(waiting, dead, unrouted, since, accepted, delivered)
