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

#: Whether the unfinished delivery `d` is to be queued.
IS_FIRST: Final = "(d.ordering_key IS NULL OR first_of_key(d.endpoint, d.ordering_key) = d.id)"

#: Whether the pending delivery `d` may be begun, as far as its order is concerned.
MAY_BEGIN: Final = """
    (d.ordering_key IS NULL
     OR first_of_key(d.endpoint, d.ordering_key) = d.id AND unrouted_before(d.event_seq, d.endpoint) IS NULL)
"""

#: Seconds until `f` may be called or taken over.
_DELAY: Final = "greatest(0, extract(epoch FROM coalesce(f.lease_until, f.next_attempt_at) - clock_timestamp()))::float8"

#: The first deliveries of the keys of some, and whether they are held.
_FIRSTS: Final = f"""
    SELECT d.id, f.id, f.event_seq, f.lane, {_DELAY}, f.line, coalesce(f.lease_until > clock_timestamp(), false)
    FROM (SELECT id, endpoint, ordering_key FROM delivery WHERE id = ANY(%(ids)s::bigint[]) OFFSET 0) d
    LEFT JOIN delivery f ON f.id = first_of_key(d.endpoint, d.ordering_key)
    WHERE d.ordering_key IS NOT NULL
"""  # noqa: S608

#: How long the event waits for its routing that stands before the one of a delivery.
_UNROUTED: Final = """
    SELECT extract(epoch FROM clock_timestamp() - e.route_at)::float8
    FROM delivery d JOIN event e ON e.seq = unrouted_before(d.event_seq, d.endpoint)
    WHERE d.id = %(id)s
"""

#: Which of some unfinished deliveries are to be queued.
_LEADING: Final = f"""
    SELECT d.id FROM (SELECT * FROM delivery WHERE id = ANY(%(ids)s::bigint[]) OFFSET 0) d
    WHERE d.finished_at IS NULL AND {IS_FIRST}
"""  # noqa: S608

#: The first deliveries of the keys of an endpoint.
_OF_ENDPOINT: Final = f"""
    SELECT f.id, f.event_seq, f.lane, {_DELAY}, f.line
    FROM (SELECT * FROM delivery
          WHERE endpoint = %(endpoint)s AND ordering_key IS NOT NULL AND finished_at IS NULL
          ORDER BY endpoint, ordering_key, event_seq LIMIT %(limit)s) f
    WHERE first_of_key(f.endpoint, f.ordering_key) = f.id
"""  # noqa: S608

#: The first deliveries of the keys in which something ended lately, as the log tells; see `after_recent`.
_AFTER_RECENT: Final = f"""
    SELECT f.id, f.event_seq, f.lane, {_DELAY}, f.line
    FROM (SELECT DISTINCT endpoint, ordering_key FROM (
        SELECT endpoint, ordering_key, finished_at FROM delivery WHERE id = ANY (ARRAY(
            SELECT n.delivery_id FROM (SELECT delivery_id, recorded_at FROM delivery_log ORDER BY id DESC LIMIT %(limit)s) n
            WHERE n.recorded_at >= now() - %(since_s)s * interval '1 s')) OFFSET 0) d
        WHERE ordering_key IS NOT NULL AND finished_at <= now() - %(older_than_s)s * interval '1 s') k
    JOIN delivery f ON f.id = first_of_key(k.endpoint, k.ordering_key)
"""  # noqa: S608

#: What the pending deliveries of an event wait for: the event of the first one of their key, and how many there are before; or an
#: event that is not routed yet.
_WAITS: Final = """
    SELECT d.id, e.source, e.event_id,
           (SELECT count(*) FROM (SELECT FROM delivery o
            WHERE o.endpoint = d.endpoint AND o.ordering_key = d.ordering_key AND o.finished_at IS NULL
                  AND o.event_seq < d.event_seq LIMIT %(most)s) b)
    FROM delivery d
    JOIN delivery f ON f.id = first_of_key(d.endpoint, d.ordering_key)
    JOIN event e ON e.seq = CASE WHEN f.id <> d.id THEN f.event_seq
                                 WHEN d.next_attempt_at <= now() THEN unrouted_before(d.event_seq, d.endpoint) END
    WHERE d.event_seq = %(seq)s AND d.status = 'pending' AND d.ordering_key IS NOT NULL
"""

#: Deliveries that are counted before one that waits, at most.
_MOST: Final = 10_000


class First(NamedTuple):
    """The first delivery of a key, at the moment of the question."""

    #: None when nothing of the key is unfinished.
    ref: DeliveryRef | None
    #: Whether a worker holds it, by a lease that has not run out.
    is_held: bool

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
    for asked, *first, held in conn.execute(_FIRSTS, {"ids": numbers(ids)}, binary=True):
        found[asked] = First(None if first[0] is None else DeliveryRef(*first), held)
    return found


def unrouted_s(conn: psycopg.Connection[Any], delivery_id: int) -> float | None:
    """Seconds since when an event waits for its routing that stands before that of a delivery; None when there is none."""
    row = conn.execute(_UNROUTED, {"id": delivery_id}, binary=True).fetchone()
    return None if row is None else row[0]


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
