"""Which delivery of an ordering key may go, and which one comes next.

Of one endpoint and key the *first* is the one that a worker holds, else the unfinished one whose event was accepted first. Only
first ones are queued, and only a first one is granted to a claim; whoever ends one, or puts one before it, queues the first one
that there is then. All of this is decided in Postgres, so that it holds whatever Redis has forgotten.

Whoever asks which one is first must ask in a statement of its own after the commit of what he changed: of two that change a
key at the same time, the later one then sees what the earlier one did.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import psycopg

from madeira.records import DeliveryRef
from madeira.store.columns import numbers

#: Seconds that a delivery waits behind an event that is not routed yet: as long as that waits already, within these bounds.
UNROUTED_DELAY_S: Final = (0.1, 1.0)

#: Whether nothing unfinished of its key stands before the pending, ordered delivery `d`. Subqueries that give a value: an
#: EXISTS may be planned as a table of all ordered deliveries.
NONE_BEFORE: Final = """
    (SELECT o.id FROM delivery o
     WHERE o.endpoint = d.endpoint AND o.claimed_key = d.ordering_key AND o.id <> d.id LIMIT 1) IS NULL
    AND (SELECT o.id FROM delivery o
         WHERE o.endpoint = d.endpoint AND o.ordering_key = d.ordering_key AND o.finished_at IS NULL
               AND o.event_seq < d.event_seq
         LIMIT 1) IS NULL
"""

#: The earliest event before the one of `d`, of the same source, that was to be routed at once and is not yet; and one whose
#: time has come. What is not due yet stands in nobody's way.
_UNROUTED: Final = """
    SELECT {what} FROM event p
    WHERE p.source = (SELECT s.source FROM event s WHERE s.seq = d.event_seq) AND p.seq + 0 < d.event_seq
          AND (p.route_at IS NULL) IS FALSE AND p.deliver_at IS NULL
    ORDER BY p.source, p.seq + 0 LIMIT 1
"""
_UNROUTED_LATER: Final = """
    SELECT {what} FROM event p
    WHERE p.source = (SELECT s.source FROM event s WHERE s.seq = d.event_seq) AND p.route_at + interval '0' <= now()
          AND (p.route_at IS NULL) IS FALSE AND p.deliver_at IS NOT NULL AND p.seq < d.event_seq
    ORDER BY p.source, p.route_at + interval '0' LIMIT 1
"""

#: Whether the delivery `d` waits for the routing of no earlier event.
NONE_UNROUTED: Final = f"({_UNROUTED.format(what='p.seq')}) IS NULL AND ({_UNROUTED_LATER.format(what='p.seq')}) IS NULL"

#: Whether the unfinished delivery `d` is to be queued.
IS_FIRST: Final = f"(d.ordering_key IS NULL OR d.claimed_key IS NOT NULL OR {NONE_BEFORE})"

#: The first delivery of the key of `d`.
_FIRST: Final = """
    SELECT f.id, f.event_seq, f.lane, f.lease_until, f.next_attempt_at
    FROM delivery f
    WHERE f.id = coalesce(
        (SELECT o.id FROM delivery o WHERE o.endpoint = d.endpoint AND o.claimed_key = d.ordering_key LIMIT 1),
        (SELECT o.id FROM delivery o
         WHERE o.endpoint = d.endpoint AND o.ordering_key = d.ordering_key AND o.finished_at IS NULL
         ORDER BY o.event_seq LIMIT 1))
"""

#: The first deliveries of the keys of some; and how long the earliest event waits for its routing that stands before them.
_FIRSTS: Final = f"""
    SELECT d.id, f.id, f.event_seq, f.lane,
           greatest(0, extract(epoch FROM coalesce(f.lease_until, f.next_attempt_at) - clock_timestamp()))::float8,
           coalesce(f.lease_until > clock_timestamp(), false),
           extract(epoch FROM clock_timestamp() - least(({_UNROUTED.format(what="p.route_at")}),
                                                        ({_UNROUTED_LATER.format(what="p.route_at")})))::float8
    FROM (SELECT id, endpoint, ordering_key, event_seq FROM delivery WHERE id = ANY(%(ids)s::bigint[]) OFFSET 0) d
    LEFT JOIN LATERAL ({_FIRST}) f ON true
    WHERE d.ordering_key IS NOT NULL
"""  # noqa: S608

#: Which of some unfinished deliveries are to be queued.
_LEADING: Final = f"""
    SELECT d.id
    FROM (SELECT id, endpoint, ordering_key, claimed_key, event_seq, finished_at FROM delivery
          WHERE id = ANY(%(ids)s::bigint[]) OFFSET 0) d
    WHERE d.finished_at IS NULL AND {IS_FIRST}
"""  # noqa: S608

#: The first deliveries of the keys of an endpoint.
_OF_ENDPOINT: Final = f"""
    SELECT d.id, d.event_seq, d.lane,
           greatest(0, extract(epoch FROM coalesce(d.lease_until, d.next_attempt_at) - clock_timestamp()))::float8
    FROM (SELECT * FROM delivery
          WHERE endpoint = %(endpoint)s AND ordering_key IS NOT NULL AND finished_at IS NULL
          ORDER BY endpoint, ordering_key, event_seq LIMIT %(limit)s) d
    WHERE {IS_FIRST}
"""  # noqa: S608

#: The first deliveries of the keys in which something ended lately, as the log tells; see `after_recent`.
_AFTER_RECENT: Final = f"""
    SELECT DISTINCT f.id, f.event_seq, f.lane,
           greatest(0, extract(epoch FROM coalesce(f.lease_until, f.next_attempt_at) - clock_timestamp()))::float8
    FROM (SELECT endpoint, ordering_key, finished_at FROM delivery WHERE id = ANY (ARRAY(
        SELECT n.delivery_id FROM (SELECT delivery_id, recorded_at FROM delivery_log ORDER BY id DESC LIMIT %(limit)s) n
        WHERE n.recorded_at >= now() - %(since_s)s * interval '1 s')) OFFSET 0) d
    CROSS JOIN LATERAL ({_FIRST}) f
    WHERE d.ordering_key IS NOT NULL AND d.finished_at <= now() - %(older_than_s)s * interval '1 s'
"""  # noqa: S608

#: What the unfinished deliveries of an event wait for: the event of the first one, and how many there are before; or an event
#: that is not routed yet.
_WAITS: Final = f"""
    SELECT d.id, e.source, e.event_id,
           (SELECT count(*) FROM (SELECT FROM delivery o
            WHERE o.endpoint = d.endpoint AND o.ordering_key = d.ordering_key AND o.finished_at IS NULL
                  AND o.event_seq < d.event_seq LIMIT %(most)s) b)
    FROM delivery d
    CROSS JOIN LATERAL ({_FIRST}) f
    JOIN event e ON e.seq = CASE WHEN f.id <> d.id THEN f.event_seq
                                 WHEN d.next_attempt_at <= now()
                                 THEN least(({_UNROUTED.format(what="p.seq")}), ({_UNROUTED_LATER.format(what="p.seq")})) END
    WHERE d.event_seq = %(seq)s AND d.status = 'pending' AND d.ordering_key IS NOT NULL
"""  # noqa: S608

#: Deliveries that are counted before one that waits, at most.
_MOST: Final = 10_000


class First(NamedTuple):
    """The first delivery of a key, at the moment of the question."""

    #: None when nothing of the key is unfinished.
    ref: DeliveryRef | None
    #: Whether a worker holds it, by a lease that has not run out.
    is_held: bool
    #: Seconds since when an earlier event of the same source, than that of the delivery asked for, waits for its routing.
    unrouted_s: float | None

    @property
    def to_queue(self) -> DeliveryRef | None:
        """What must be queued: the first one, unless a worker holds it, who will see to what follows."""
        return None if self.is_held else self.ref


class Wait(NamedTuple):
    """What a delivery waits for: an event, and how many deliveries of its key come before it."""

    source: str
    event_id: str
    ahead: int


def firsts(conn: psycopg.Connection[Any], ids: Sequence[int]) -> dict[int, First]:
    """The first deliveries of the keys of the deliveries `ids`, finished or not; those without a key are left out."""
    found = {}
    for asked, first, seq, lane, delay_s, held, unrouted_s in conn.execute(_FIRSTS, {"ids": numbers(ids)}, binary=True):
        ref = None if first is None else DeliveryRef(first, seq, lane, delay_s)
        found[asked] = First(ref, held, unrouted_s)
    return found


def following(conn: psycopg.Connection[Any], ended: Sequence[DeliveryRef]) -> list[DeliveryRef]:
    """What must be queued after the deliveries `ended` have ended."""
    if not ended:
        return []
    found = {first.to_queue for first in firsts(conn, [ref.delivery_id for ref in ended]).values()}
    return [ref for ref in found if ref is not None]


def leading(conn: psycopg.Connection[Any], refs: Sequence[DeliveryRef]) -> list[DeliveryRef]:
    """Which of the unfinished deliveries `refs` are to be queued: those without a key, and those that are the first of theirs."""
    if not refs:
        return []
    found = conn.execute(_LEADING, {"ids": numbers(ref.delivery_id for ref in refs)}, binary=True)
    wanted = {row[0] for row in found}
    return [ref for ref in refs if ref.delivery_id in wanted]


def of_endpoint(conn: psycopg.Connection[Any], endpoint: str, limit: int) -> list[DeliveryRef]:
    """What of an endpoint's ordered deliveries is to be queued, among the first `limit` in the order of keys."""
    rows = conn.execute(_OF_ENDPOINT, {"endpoint": endpoint, "limit": limit}, binary=True)
    return [DeliveryRef(*row) for row in rows]


def after_recent(conn: psycopg.Connection[Any], since_s: float, limit: int, *, older_than_s: float) -> list[DeliveryRef]:
    """The first deliveries of keys in which one ended in the last `since_s` seconds, but not in the last `older_than_s`.

    They are what is lost when a worker dies between an outcome and telling of it, and they may have been waiting for long.
    """
    params = {"since_s": since_s, "limit": limit, "older_than_s": older_than_s}
    return [DeliveryRef(*row) for row in conn.execute(_AFTER_RECENT, params, binary=True)]


def waits(conn: psycopg.Connection[Any], seq: int) -> dict[int, Wait]:
    """What the pending deliveries of an event wait for, by delivery; those that wait for no other are left out."""
    rows = conn.execute(_WAITS, {"seq": seq, "most": _MOST})
    return {delivery_id: Wait(*found) for delivery_id, *found in rows}
