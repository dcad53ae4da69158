"""What is counted when somebody asks for the numbers: states of the whole, that no process can count for itself.

Each is one statement with a short limit of its own: a page of metrics must not hold up, or be held up by, real work.
"""

from collections.abc import Callable
from typing import Any, Final

import psycopg

#: Seconds that one of these statements may take; over a backlog of a million rows the counts need less.
LIMIT_S: Final = 1.0

_LIMIT: Final = f"SET LOCAL statement_timeout = {int(LIMIT_S * 1000)}"

#: Deliveries that were given up and wait for a person.
_DEAD: Final = "SELECT endpoint, count(*) FROM delivery WHERE died_at IS NOT NULL GROUP BY endpoint"

#: Unfinished deliveries, by retries so far in classes.
_WAITING: Final = """
    SELECT endpoint,
           CASE WHEN retries < 3 THEN retries::text WHEN retries < 5 THEN '3-4' ELSE '5+' END AS class,
           count(*)
    FROM delivery
    WHERE finished_at IS NULL
    GROUP BY 1, 2
"""

#: For how long the oldest event that may be routed has waited; no row when none waits.
_OLDEST_ROUTE: Final = """
    SELECT greatest(0, extract(epoch FROM clock_timestamp() - route_at))::float8
    FROM event
    WHERE route_at IS NOT NULL AND route_at <= now()
    ORDER BY seq
    LIMIT 1
"""

#: For how long the oldest delivery that is due has waited; no row when none waits.
_OLDEST_DELIVERY: Final = """
    SELECT greatest(0, extract(epoch FROM clock_timestamp() - next_attempt_at))::float8
    FROM delivery
    WHERE finished_at IS NULL AND status = 'pending' AND next_attempt_at <= now()
    ORDER BY next_attempt_at
    LIMIT 1
"""

#: When reconcile last came to its end; no row before it first did.
_LAST_RECONCILE: Final = "SELECT extract(epoch FROM finished_at)::float8 FROM reconcile_run ORDER BY id DESC LIMIT 1"

#: Counts something, by the values of a metric's labels.
Count = Callable[[psycopg.Connection[Any]], dict[tuple[str, ...], float]]


def last_reconcile(conn: psycopg.Connection[Any]) -> dict[tuple[str, ...], float]:
    """When reconcile last came to its end, in Unix time; nothing before it first did."""
    conn.execute(_LIMIT)
    row = conn.execute(_LAST_RECONCILE).fetchone()
    return {(): row[0]} if row else {}


def dead_letters(conn: psycopg.Connection[Any]) -> dict[tuple[str, ...], float]:
    """How many dead deliveries each endpoint has."""
    conn.execute(_LIMIT)
    return {(endpoint,): n for endpoint, n in conn.execute(_DEAD)}


def deliveries_waiting(conn: psycopg.Connection[Any]) -> dict[tuple[str, ...], float]:
    """How many unfinished deliveries each endpoint has, by class of retries."""
    conn.execute(_LIMIT)
    return {(endpoint, retries): n for endpoint, retries, n in conn.execute(_WAITING)}


def oldest_ages(conn: psycopg.Connection[Any]) -> dict[tuple[str, ...], float]:
    """For how many seconds the oldest due message of each queue has waited; 0 when none waits."""
    conn.execute(_LIMIT)
    return {
        (queue,): row[0] if (row := conn.execute(statement).fetchone()) else 0.0
        for queue, statement in (("route", _OLDEST_ROUTE), ("deliver", _OLDEST_DELIVERY))
    }
