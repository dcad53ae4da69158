"""Stop 4 of 4. Before: a delivery is `delivering`. After: its outcome stands, in one transaction, by the token of its claim.

A verdict is settled by the token of its claim (`madeira.store.claims`): that makes it safe to ask again when the reply to a
commit was lost. When a retry is due is said by the database's clock, never by a worker's. What is dead then waits for a person
to be told: `unnotified` and `mark_notified`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg

from madeira.records import Attempt, Decision, Settled
from madeira.states import MAX_LOST, DeliveryStatus, EventStatus
from madeira.store import ordering
from madeira.store.columns import binaries, numbers, one_line, texts
from madeira.store.counts import COUNTED

#: Record verdicts: lock the events, move the deliveries that still hold the token of the claim, log, count. A verdict
#: ends the row of losses; losing once more than is allowed ends the delivery. The count of the locked events makes sure
#: that all are locked before the first delivery moves. Events come as rows of their own, without an id: joining two such
#: lists, whose length Postgres cannot know, would be a loop in a loop.
_SETTLE: Final = one_line(
    f"""
    WITH verdict AS MATERIALIZED (
        SELECT v.*
        FROM unnest(%(id)s::bigint[], %(seq)s::bigint[], %(token)s::uuid[], %(attempt)s::integer[],
                    %(started_at)s::timestamptz[], %(duration_s)s::float8[], %(url)s::text[], %(status_code)s::integer[],
                    %(outcome)s::text[], %(error_code)s::text[], %(reason)s::text[], %(excerpt)s::bytea[],
                    %(length)s::integer[], %(sha256)s::bytea[], %(worker)s::text[], %(decision)s::text[],
                    %(delay_s)s::float8[], %(counts)s::boolean[], %(failure_class)s::text[], %(last_error)s::text[],
                    %(stays)s::boolean[], %(exchange)s::text[])
             AS v (id, seq, token, attempt, started_at, duration_s, url, status_code, outcome, error_code, reason, excerpt,
                   length, sha256, worker, decision, delay_s, counts, failure_class, last_error, stays,
                   exchange)),
    locked AS MATERIALIZED (
        SELECT seq FROM event WHERE seq = ANY(%(seq)s::bigint[]) ORDER BY seq FOR NO KEY UPDATE),
    moved AS (
        UPDATE delivery d
        SET status = {{becomes}},
            failures = d.failures + v.counts::integer,
            lost = CASE WHEN v.outcome = 'lost' THEN d.lost + 1 ELSE 0 END,
            retries = d.retries + ({{becomes}} = 'pending' AND NOT v.stays)::integer,
            line = CASE WHEN {{becomes}} = 'pending' AND NOT v.stays THEN 'retry' ELSE d.line END,
            claim_token = NULL,
            lease_until = NULL,
            next_attempt_at = CASE WHEN {{becomes}} = 'pending' THEN clock_timestamp() + v.delay_s * interval '1 s'
                                   ELSE d.next_attempt_at END,
            finished_at = CASE WHEN {{becomes}} <> 'pending' THEN clock_timestamp() END,
            died_at = CASE WHEN {{becomes}} = 'dead' THEN clock_timestamp() END,
            failure_class = CASE WHEN {{becomes}} = 'dead' AND v.decision <> 'dead' THEN 'platform'
                                 ELSE v.failure_class END,
            last_error = v.last_error,
            last_error_code = v.error_code,
            updated_at = clock_timestamp()
        FROM verdict v
        WHERE d.id = v.id AND d.event_seq = v.seq AND d.status = 'delivering' AND d.claim_token = v.token
              AND (SELECT count(*) FROM locked) > 0
        RETURNING d.event_seq, d.status, d.retries, d.next_attempt_at, d.ordering_key IS NOT NULL AS ordered, v.*),
    logged AS (
        INSERT INTO delivery_log (delivery_id, attempt, token, started_at, duration_s, url, status_code, outcome,
                                  error_code, reason, settled_as, excerpt, length, sha256, worker, exchange)
        SELECT id, attempt, token, started_at, duration_s, url, status_code, outcome,
               error_code, reason, status, excerpt, length, sha256, worker, exchange::json
        FROM moved),
    {COUNTED}
    SELECT event_seq, id, token::text, status,
           CASE WHEN status = 'pending'
                THEN greatest(0, extract(epoch FROM next_attempt_at - clock_timestamp())) ELSE 0 END::float8, ordered
    FROM moved
    UNION ALL
    SELECT seq, NULL, NULL, status, extract(epoch FROM clock_timestamp() - created_at)::float8, false
    FROM counted
""".format(becomes="settled_as(v.decision, d.cancel_requested_at IS NOT NULL, v.outcome = 'lost' AND d.lost + 1 >= %(max_lost)s)")  # noqa: S608
)

#: What was recorded before under these tokens: the commit's reply may have been lost.
_SETTLED_BEFORE: Final = """
    SELECT l.delivery_id, l.token::text, l.settled_as,
           CASE WHEN l.settled_as = 'pending' AND d.status = 'pending'
                THEN greatest(0, extract(epoch FROM d.next_attempt_at - clock_timestamp())) ELSE 0 END::float8,
           e.status, extract(epoch FROM l.recorded_at - e.created_at)::float8, d.ordering_key IS NOT NULL
    FROM unnest(%(id)s::bigint[], %(token)s::uuid[]) AS a (id, token)
    JOIN delivery_log l ON l.delivery_id = a.id AND l.token = a.token AND l.outcome <> 'late' AND l.worker IS NOT NULL
    JOIN delivery d ON d.id = l.delivery_id
    JOIN event e ON e.seq = d.event_seq
"""

#: Note verdicts that came too late; they change nothing. Of an erased event without what the receiver answered.
_LATE: Final = """
    INSERT INTO delivery_log (delivery_id, attempt, token, started_at, duration_s, url, status_code, outcome,
                              error_code, reason, excerpt, length, sha256, worker, exchange)
    SELECT v.id, v.attempt, v.token, v.started_at, v.duration_s, CASE WHEN e.erased_at IS NULL THEN v.url END,
           v.status_code, 'late', v.error_code, concat_ws(': ', 'came after the claim was gone, as ' || v.outcome, v.reason),
           CASE WHEN e.erased_at IS NULL THEN v.excerpt END, v.length,
           CASE WHEN e.erased_at IS NULL THEN v.sha256 END, v.worker,
           CASE WHEN e.erased_at IS NULL THEN v.exchange END::json
    FROM unnest(%(id)s::bigint[], %(token)s::uuid[], %(attempt)s::integer[], %(started_at)s::timestamptz[],
                %(duration_s)s::float8[], %(url)s::text[], %(status_code)s::integer[], %(outcome)s::text[],
                %(error_code)s::text[], %(reason)s::text[], %(excerpt)s::bytea[], %(length)s::integer[],
                %(sha256)s::bytea[], %(worker)s::text[], %(exchange)s::text[])
         AS v (id, token, attempt, started_at, duration_s, url, status_code, outcome, error_code, reason, excerpt,
               length, sha256, worker, exchange)
    JOIN delivery d ON d.id = v.id
    JOIN event e ON e.seq = d.event_seq
    ON CONFLICT DO NOTHING
"""

#: Which of these deliveries are dead and nobody was told.
_UNNOTIFIED: Final = """
    SELECT d.id, d.endpoint, d.failure_class, d.last_error, d.trace_id, e.source, e.event_id,
           e.traceparent
    FROM delivery d JOIN event e ON e.seq = d.event_seq
    WHERE d.id = ANY(%(id)s::bigint[]) AND d.died_at IS NOT NULL AND d.notified_at IS NULL
    ORDER BY d.id
"""

#: Note that somebody was told.
_MARK_NOTIFIED: Final = """
    UPDATE delivery SET notified_at = clock_timestamp()
    WHERE id = ANY(%(id)s::bigint[]) AND died_at IS NOT NULL AND notified_at IS NULL
    RETURNING id
"""


@dataclass(frozen=True, slots=True)
class SettleRequest:
    """The verdict on an attempt, and what shall follow from it."""

    delivery_id: int
    seq: int
    #: The token of the claim.
    token: str
    attempt_no: int
    attempt: Attempt
    decision: Decision
    #: Who called: host and process, for the log.
    worker: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A delivery that ended without success and of which nobody was told yet."""

    delivery_id: int
    endpoint: str
    failure_class: str
    last_error: str | None
    trace_id: str
    source: str
    event_id: str
    traceparent: str | None


def settle(conn: psycopg.Connection[Any], requests: Sequence[SettleRequest]) -> list[Settled]:
    """Record a group of verdicts; one answer per request, in their order. Asking again with the same token is safe.

    A verdict whose claim is gone changes nothing and is noted as ``late`` (`Settled.status` is None). The delay of a
    retry is what remains until the row's ``next_attempt_at``, so that the broker and the row agree.
    """
    by_claim = {(r.delivery_id, r.token): r for r in requests}
    answers: dict[tuple[int, str], Settled] = {}
    ordered = _settle_now(conn, list(by_claim.values()), answers)
    others = [r for key, r in by_claim.items() if key not in answers]
    if others:
        ordered += _settled_before(conn, others, answers)
        late = [r for r in others if (r.delivery_id, r.token) not in answers]
        if late:
            conn.execute(_LATE, _verdict_columns(late))
    if ordered:
        _add_first(conn, ordered, answers)
    return [answers.get((r.delivery_id, r.token), Settled(status=None)) for r in requests]


def _settle_now(
    conn: psycopg.Connection[Any], requests: list[SettleRequest], answers: dict[tuple[int, str], Settled]
) -> list[tuple[int, str]]:
    """Add what could be settled to `answers`; gives those of them that have an ordering key."""
    rows = conn.execute(_SETTLE, _verdict_columns(requests), binary=True).fetchall()
    read_at = time.monotonic()
    events = {seq: (EventStatus(status), age_s) for seq, delivery_id, _, status, age_s, _ in rows if delivery_id is None}
    ordered = []
    for seq, delivery_id, token, status, delay_s, has_key in rows:
        if delivery_id is None:
            continue
        answers[delivery_id, token] = Settled(DeliveryStatus(status), delay_s, *events[seq], read_at)
        if has_key:
            ordered.append((delivery_id, token))
    return ordered


def _settled_before(
    conn: psycopg.Connection[Any], requests: list[SettleRequest], answers: dict[tuple[int, str], Settled]
) -> list[tuple[int, str]]:
    """The same for what was settled before."""
    rows = conn.execute(_SETTLED_BEFORE, _claim_columns(requests), binary=True).fetchall()
    read_at = time.monotonic()
    ordered = []
    for delivery_id, token, status, delay_s, event_status, latency_s, has_key in rows:
        answers[delivery_id, token] = Settled(DeliveryStatus(status), delay_s, EventStatus(event_status), latency_s, read_at)
        if has_key:
            ordered.append((delivery_id, token))
    return ordered


def _add_first(
    conn: psycopg.Connection[Any], ordered: Sequence[tuple[int, str]], answers: dict[tuple[int, str], Settled]
) -> None:
    """Add which delivery of the same key is the first now, where that is another one."""
    firsts = ordering.firsts(conn, [delivery_id for delivery_id, _ in ordered])
    for delivery_id, token in ordered:
        first = firsts[delivery_id].to_queue if delivery_id in firsts else None
        if first is not None and first.delivery_id != delivery_id:
            answers[delivery_id, token] = replace(answers[delivery_id, token], first=first)


def _claim_columns(requests: Sequence[SettleRequest]) -> dict[str, str]:
    return {"id": numbers(r.delivery_id for r in requests), "token": numbers(r.token for r in requests)}


def _verdict_columns(requests: Sequence[SettleRequest]) -> dict[str, Any]:
    attempts = [r.attempt for r in requests]
    decisions = [r.decision for r in requests]
    return {
        **_claim_columns(requests),
        "seq": numbers(r.seq for r in requests),
        "attempt": numbers(r.attempt_no for r in requests),
        "worker": texts(r.worker for r in requests),
        "started_at": texts(a.started_at.isoformat() for a in attempts),
        "duration_s": numbers(a.duration_s for a in attempts),
        "url": texts(a.url for a in attempts),
        "status_code": numbers(a.status_code for a in attempts),
        "outcome": texts(a.outcome for a in attempts),
        "error_code": texts(a.error_code for a in attempts),
        "reason": texts(a.reason for a in attempts),
        "excerpt": binaries(a.excerpt for a in attempts),
        "length": numbers(a.length for a in attempts),
        "sha256": binaries(a.sha256 for a in attempts),
        "exchange": texts(a.exchange for a in attempts),
        "decision": texts(d.status for d in decisions),
        "delay_s": numbers(d.delay_s for d in decisions),
        "counts": numbers(d.counts for d in decisions),
        "stays": numbers(d.stays for d in decisions),
        "failure_class": texts(d.failure_class for d in decisions),
        "last_error": texts(d.last_error for d in decisions),
        "max_lost": MAX_LOST,
    }


def unnotified(conn: psycopg.Connection[Any], ids: Sequence[int]) -> list[DeadLetter]:
    """Which of the deliveries `ids` are dead and wait for somebody to be told."""
    return [DeadLetter(*row) for row in conn.execute(_UNNOTIFIED, {"id": numbers(ids)}, binary=True)]


def mark_notified(conn: psycopg.Connection[Any], ids: Sequence[int]) -> list[int]:
    """Note that somebody was told; returns the ids noted now (another may have been quicker with the rest)."""
    return [row[0] for row in conn.execute(_MARK_NOTIFIED, {"id": numbers(ids)})]
