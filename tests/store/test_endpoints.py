"""What Postgres knows about an endpoint: how much of its work is left."""

import psycopg

from madeira.records import PlannedDelivery
from madeira.store import endpoints, events, routing
from tests.store.making import new_event


def test_unfinished_deliveries_are_counted_unless_there_are_too_many(database_url: str) -> None:
    """Those of the endpoint, not those that have ended; beyond what is looked at there is no number, rather than a wrong one."""
    with psycopg.connect(database_url, autocommit=True) as c:
        accepted = events.insert(c, [new_event() for _ in range(6)])
        routing.route(c, [(a.seq, [PlannedDelivery("a", "a"), PlannedDelivery("b", "b")]) for a in accepted[:3]])
        routing.route(c, [(a.seq, [PlannedDelivery("a", "a")]) for a in accepted[3:]])
        c.execute(
            "UPDATE delivery SET status = 'cancelled', finished_at = now() WHERE endpoint = 'a' AND event_seq = %s",
            (accepted[0].seq,),
        )
        assert [endpoints.unfinished(c, name) for name in ("a", "b", "nobody")] == [5, 3, 0]
        assert [endpoints.unfinished(c, name, look=8) for name in ("a", "b")] == [5, 3]
        assert [endpoints.unfinished(c, name, look=7) for name in ("a", "b")] == [None, None]
