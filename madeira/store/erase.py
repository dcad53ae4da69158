"""Erasing what an event holds of its subject, on request, without losing that it was there and what became of it.

Gone are the payload, the parameters, the bodies, headers and ordering keys that were made of them, what receivers answered, and
of all addresses what comes behind the host, since it may hold what payload or parameters held. What stays: ids, type, times,
states, counts, the errors in words, and the digest of the body, by which the same post is still told a duplicate.

This is the one exception to the rule that nothing is ever changed in ``delivery_log``.

What goes is named here alone: retention, which takes payloads because of their age, and the copies that it makes of parts of the
log go by it too.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg

from madeira.errors import IllegalTransition
from madeira.states import EventStatus
from madeira.store import audit

#: Of an address, what comes before all that may be of the event.
_HOST: Final = "substring({column} FROM '^[a-zA-Z]+://[^/?#]*')"

#: What is set in an event whose payload goes.
OF_PAYLOAD: Final = "payload = 'null', parameters = NULL"

#: What is set in an attempt of which goes what its receiver answered, and where exactly it was called.
OF_ATTEMPT: Final = f"excerpt = NULL, sha256 = NULL, exchange = NULL, url = {_HOST.format(column='url')}"

#: Take hold of an event.
_LOCK_EVENT: Final = """
    SELECT seq, status, erased_at, erased_by FROM event WHERE event_id = %(event_id)s AND source = %(source)s FOR NO KEY UPDATE
"""

#: Erase an event.
_ERASE_EVENT: Final = f"""
    UPDATE event
    SET {OF_PAYLOAD}, target_uri = {_HOST.format(column="target_uri")},
        erased_at = clock_timestamp(), erased_by = 'person', updated_at = clock_timestamp()
    WHERE seq = %(seq)s
    RETURNING erased_at
"""  # noqa: S608

#: Erase what its deliveries carried.
_ERASE_DELIVERIES: Final = """
    UPDATE delivery SET body = NULL, ordering_key = NULL, updated_at = clock_timestamp() WHERE event_seq = %(seq)s
"""

#: Erase their attempts.
_ERASE_LOG: Final = f"""
    UPDATE delivery_log SET {OF_ATTEMPT}
    WHERE delivery_id IN (SELECT id FROM delivery WHERE event_seq = %(seq)s)
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure did."""

    erased_at: datetime
    status: EventStatus
    deliveries: int
    attempts: int


def erase(conn: psycopg.Connection[Any], source: str, event_id: str, who: str, why: str) -> Erased | None:
    """Erase the payload of a finished event and all that was made of it; None when there is no such event.

    Writes the audit row too.

    Raises:
        IllegalTransition: the event is not finished (code ``unfinished``), or was erased before (``erased``).
    """
    with conn.transaction():
        row = conn.execute(_LOCK_EVENT, {"source": source, "event_id": event_id}).fetchone()
        if row is None:
            return None
        seq, status, erased_at, erased_by = row
        # Retention takes only the payload.
        if erased_by == "person":
            raise IllegalTransition(f"event {event_id} was erased already, at {erased_at.isoformat()}", code="erased")
        if status in (EventStatus.PENDING, EventStatus.DELIVERING):
            raise IllegalTransition(f"event {event_id} is {status}: cancel it first, or wait for its end", code="unfinished")
        ((moment,),) = conn.execute(_ERASE_EVENT, {"seq": seq})
        deliveries = conn.execute(_ERASE_DELIVERIES, {"seq": seq}).rowcount
        attempts = conn.execute(_ERASE_LOG, {"seq": seq}).rowcount
        detail = {"deliveries": deliveries, "attempts": attempts, "status": status}
        audit.record(conn, who, "erase", f"event {source}/{event_id}", why, detail)
        return Erased(moment, EventStatus(status), deliveries, attempts)
