"""What people are told, once per episode, however many processes see it.

A notice is written in the transaction of its cause, so that there is neither one without the other. An episode is a row that is
there while something goes on: only who makes the row writes a notice, and only who takes it away writes one of the end. Who says
a notice takes hold of its row; so it is said once too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

#: Hours without a new dead letter after which the next one is told of again, though older ones still wait for a person.
QUIET_H: Final = 1

#: Hours after which a breaker is no matter any more that was not seen open since, and behind which no call has succeeded.
FORGOTTEN_H: Final = 24

#: Days for which notices are kept.
KEPT_DAYS: Final = 90

#: Old notices that are removed at a time.
_PURGE: Final = 1000


class Kind(StrEnum):
    """What is told. An event about it has the type ``madeira.<kind>``."""

    #: The first delivery of an endpoint has died.
    DEAD_LETTERS_BEGAN = "dead_letters.began"
    #: A receiver failed so often that it is left alone for a while.
    BREAKER_OPENED = "breaker.opened"
    #: A call has succeeded since, and it is called again as ever.
    BREAKER_CLOSED = "breaker.closed"
    #: A person, or a receiver that says it is gone, has disabled an endpoint.
    ENDPOINT_DISABLED = "endpoint.disabled"
    #: Reconcile has found what Postgres knew and the broker did not, or the reverse.
    RECONCILE_DIFFERENCES = "reconcile.differences"


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to be told."""

    id: int
    kind: str
    #: Empty when it is about no endpoint.
    endpoint: str
    at: datetime
    detail: dict[str, Any]
    #: None while nobody was told.
    said_at: datetime | None = None
    #: Of the event that carries it; None when it went to the log only.
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Died:
    """Deliveries of one endpoint that have died."""

    endpoint: str
    count: int
    #: Of the first of them.
    detail: Mapping[str, Any]


#: Begin an episode, or note that it goes on. A row comes back when it has begun.
_BEGIN: Final = """
    INSERT INTO episode AS e (kind, subject, began_at, last_at) VALUES (%(kind)s, %(subject)s, now(), now())
    ON CONFLICT (kind, subject) DO UPDATE SET last_at = now()
    RETURNING xmax = 0
"""

#: End one.
_END: Final = "DELETE FROM episode WHERE kind = %(kind)s AND subject = %(subject)s RETURNING true"

#: What goes on of a kind.
_GOING_ON: Final = "SELECT subject FROM episode WHERE kind = %(kind)s ORDER BY subject"

#: End the episodes of dead letters that are over: none is left, or none has come for long.
_END_DEAD_LETTERS: Final = """
    DELETE FROM episode e
    WHERE kind = %(kind)s
          AND (last_at < now() - %(quiet_h)s * interval '1 h'
               OR NOT EXISTS (SELECT FROM delivery d WHERE d.endpoint = e.subject AND d.died_at IS NOT NULL))
"""

#: End the episodes of breakers of which nothing was heard for long: nobody calls there, or the endpoint was removed.
_END_FORGOTTEN: Final = "DELETE FROM episode WHERE kind = %(kind)s AND last_at < now() - %(forgotten_h)s * interval '1 h'"

#: Write a notice.
_WRITE: Final = "INSERT INTO notice (kind, endpoint, detail) VALUES (%(kind)s, %(endpoint)s, %(detail)s)"

#: Take hold of what is to be said, the earliest first; what another one is saying just now is passed over.
_UNSAID: Final = """
    SELECT id, kind, endpoint, at, detail FROM notice
    WHERE said_at IS NULL
    ORDER BY id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
"""

#: Note that it was said.
_SAID: Final = "UPDATE notice SET said_at = clock_timestamp(), event_id = %(event_id)s WHERE id = %(id)s"

#: The latest.
_LATEST: Final = "SELECT id, kind, endpoint, at, detail, said_at, event_id FROM notice ORDER BY id DESC LIMIT %(limit)s"

#: Remove what is old. Ids rise with the time, so the oldest are the first.
_REMOVE_OLD: Final = """
    DELETE FROM notice
    WHERE id = ANY (ARRAY(SELECT id FROM notice ORDER BY id LIMIT %(limit)s)) AND at < now() - %(days)s * interval '1 day'
"""


def write(conn: psycopg.Connection[Any], kind: Kind, endpoint: str = "", detail: Mapping[str, Any] | None = None) -> None:
    """Have people told of something that is no episode, or of one's end."""
    conn.execute(_WRITE, {"kind": kind, "endpoint": endpoint, "detail": Jsonb(dict(detail or {}))})


def begin(conn: psycopg.Connection[Any], kind: Kind, subject: str, endpoint: str, detail: Mapping[str, Any]) -> bool:
    """Have people told that something has begun, unless it goes on already; whether it has begun."""
    ((begun,),) = conn.execute(_BEGIN, {"kind": kind, "subject": subject})
    if begun:
        write(conn, kind, endpoint, detail)
    return bool(begun)


def end(conn: psycopg.Connection[Any], kind: Kind, subject: str) -> bool:
    """Let an episode be over; False when there was none."""
    return conn.execute(_END, {"kind": kind, "subject": subject}).fetchone() is not None


def going_on(conn: psycopg.Connection[Any], kind: Kind) -> list[str]:
    """The subjects of the episodes of a kind."""
    return [subject for (subject,) in conn.execute(_GOING_ON, {"kind": kind})]


def dead_letters(conn: psycopg.Connection[Any], died: Iterable[Died]) -> bool:
    """Have people told of the endpoints whose dead letters begin; whether there is one."""
    # In the order of their names, so that two who do this at once do not wait for each other.
    begun = [
        begin(conn, Kind.DEAD_LETTERS_BEGAN, d.endpoint, d.endpoint, {"count": d.count, **d.detail})
        for d in sorted(died, key=lambda d: d.endpoint)
    ]
    return any(begun)


def end_dead_letters(conn: psycopg.Connection[Any]) -> int:
    """Let episodes of dead letters be over of which none is left, or none has come for long; returns how many."""
    return conn.execute(_END_DEAD_LETTERS, {"kind": Kind.DEAD_LETTERS_BEGAN, "quiet_h": QUIET_H}).rowcount


def end_forgotten(conn: psycopg.Connection[Any]) -> None:
    """Let episodes of breakers be over, without a word, of which nothing was heard for long."""
    conn.execute(_END_FORGOTTEN, {"kind": Kind.BREAKER_OPENED, "forgotten_h": FORGOTTEN_H})


def reconciled(conn: psycopg.Connection[Any], counts: Mapping[str, int]) -> bool:
    """Have people told when runs of reconcile begin to find differences; a run that finds none ends that. Whether they begin."""
    if not counts:
        end(conn, Kind.RECONCILE_DIFFERENCES, "")
        return False
    return begin(conn, Kind.RECONCILE_DIFFERENCES, "", "", dict(counts))


def unsaid(conn: psycopg.Connection[Any], limit: int) -> list[Notice]:
    """What is to be said; held by the transaction, in which `said` is called for each."""
    with conn.cursor(row_factory=class_row(Notice)) as cursor:
        return cursor.execute(_UNSAID, {"limit": limit}).fetchall()


def said(conn: psycopg.Connection[Any], notice_id: int, event_id: str | None) -> None:
    """Note that a notice was said, and in which event, if in any."""
    conn.execute(_SAID, {"id": notice_id, "event_id": event_id})


def latest(conn: psycopg.Connection[Any], limit: int = 50) -> list[Notice]:
    """The latest notices, the last one first."""
    with conn.cursor(row_factory=class_row(Notice)) as cursor:
        return cursor.execute(_LATEST, {"limit": limit}).fetchall()


def remove_old(conn: psycopg.Connection[Any]) -> int:
    """Remove notices that are kept no longer, a bounded number; returns how many."""
    return conn.execute(_REMOVE_OLD, {"limit": _PURGE, "days": KEPT_DAYS}).rowcount
