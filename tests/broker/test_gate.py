"""The gate of a worker: closed while Postgres cannot be used, and why is told."""

from itertools import count

from structlog.testing import capture_logs

from madeira.broker.gate import Gate
from madeira.store.schema import NO_TABLES

#: What is in the way for a while.
AWAY = "Postgres is not available: refused"


def test_why_it_is_closed_is_told_once_and_again_when_a_person_has_to_do_something() -> None:
    """However often it is closed or asked; it opens when nothing is in the way, and closes as ever afterwards."""
    found = [AWAY, AWAY, NO_TABLES, NO_TABLES, None]
    ticks = count()
    gate = Gate(trouble=lambda: found.pop(0), clock=lambda: 2.0 * next(ticks))
    with capture_logs() as lines:
        gate.close("no connection to Postgres in time")
        gate.close(AWAY)
        opened = [gate.is_open() for _ in range(5)]
        gate.close(AWAY)
    assert opened == [False, False, False, False, True]
    assert [(line["event"], line.get("reason")) for line in lines] == [
        ("store.away", "no connection to Postgres in time"),
        ("store.away", NO_TABLES),
        ("store.back", None),
        ("store.away", AWAY),
    ]
