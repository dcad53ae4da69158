"""Claims: a worker takes hold of a delivery before it calls, for a time, by a random token of its own.

Deliveries are born in `madeira.store.routing`; what became of a claim is settled in `madeira.store.deliveries`.

The database's clock decides what is due and what has run out, never a worker's. A claim is made by its token: that makes it safe
to ask again when the reply to a commit was lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg

from madeira.records import Claimed, Refused
from madeira.states import MAX_LOST, DeliveryStatus
from madeira.store import ordering
from madeira.store.columns import numbers, texts
from madeira.store.counts import COUNTED
from madeira.store.ordering import First

#: Seconds after which a claim that met another one at the same instant asks again.
CONTENDED_DELAY_S: Final = 0.5

#: Name of the index that lets one delivery of an ordering key be held.
_ONE_PER_KEY: Final = "delivery_one_per_key"

#: Grant what may be granted: pending and due (1 s early is allowed), or delivering with a lease run out (a takeover), or
#: held by the very same token (the reply was lost; the lease starts afresh). Rows that another claim holds at this
#: instant are skipped. A takeover notes the attempt that vanished. What a takeover may not have, since it was lost too
#: often or its cancel was asked for, is left to _END_EXPIRED. What has an ordering key is begun only as the first of its key;
#: what was begun is taken over whatever came before it since.
_CLAIM: Final = f"""
    WITH asked AS MATERIALIZED (
        SELECT * FROM unnest(%(id)s::bigint[], %(token)s::uuid[], %(lease_s)s::float8[], %(lane)s::text[])
                          AS a (id, token, lease_s, lane)),
    held AS MATERIALIZED (
        SELECT d.id, a.token, a.lease_s, d.claim_token, d.claimed_at, d.attempt
        FROM asked a JOIN delivery d ON d.id = a.id
        WHERE (a.lane IS NULL OR a.lane = d.lane)
              AND (d.status = 'pending' AND d.next_attempt_at <= now() + interval '1 s'
                     AND {ordering.MAY_BEGIN}
                  OR d.status = 'delivering' AND d.claim_token = a.token
                  OR d.status = 'delivering' AND d.lease_until < now()
                     AND d.cancel_requested_at IS NULL AND d.lost + 1 < %(max_lost)s)
        ORDER BY d.id
        FOR NO KEY UPDATE OF d SKIP LOCKED),
    claimed AS (
        UPDATE delivery d
        SET status = 'delivering',
            attempt = d.attempt + (d.claim_token IS DISTINCT FROM h.token)::integer,
            lost = d.lost + (d.claim_token <> h.token AND d.status = 'delivering')::integer,
            claimed_at = CASE WHEN d.claim_token = h.token THEN d.claimed_at ELSE now() END,
            claim_token = h.token,
            lease_until = now() + h.lease_s * interval '1 s',
            budget_from = coalesce(d.budget_from, now()),
            updated_at = now()
        FROM held h
        WHERE d.id = h.id
        RETURNING d.id, d.event_seq, d.endpoint, d.lane, d.attempt, d.failures, d.claim_token, d.budget_from, d.body,
                  d.line, d.job_id),
    lost AS (
        INSERT INTO delivery_log (delivery_id, attempt, token, started_at, outcome, error_code, reason, settled_as)
        SELECT h.id, h.attempt, h.claim_token, h.claimed_at, 'lost', 'platform',
               'the claim ended without a verdict; another worker took over', 'delivering'
        FROM held h JOIN claimed c ON c.id = h.id AND c.claim_token = h.token
        WHERE h.claim_token <> h.token)
    SELECT c.id, c.event_seq, c.endpoint, c.lane, c.attempt, c.failures, c.claim_token::text,
           greatest(0, extract(epoch FROM now() - c.budget_from))::float8,
           e.source, e.event_id, e.event_type, e.target_uri, e.payload, e.parameters, e.trace_id, e.traceparent,
           e.created_at, c.body, e.routing_key, c.line, c.job_id
    FROM claimed c JOIN event e ON e.seq = c.event_seq
"""  # noqa: S608

#: Why claims were not granted. Says of an expired one whether it has to end (see _END_EXPIRED).
_WHY_NOT: Final = """
    SELECT id, event_seq, status,
           extract(epoch FROM next_attempt_at - clock_timestamp())::float8,
           extract(epoch FROM lease_until - clock_timestamp())::float8,
           status = 'delivering' AND lease_until < now()
               AND (cancel_requested_at IS NOT NULL OR lost + 1 >= %(max_lost)s),
           ordering_key IS NOT NULL
    FROM delivery
    WHERE id = ANY(%(id)s::bigint[])
"""

#: End expired claims that nobody may take over: cancelled if that was asked for, else dead, lost too often.
_END_EXPIRED: Final = f"""
    WITH locked AS MATERIALIZED (
        SELECT seq FROM event WHERE seq = ANY(%(seq)s::bigint[]) ORDER BY seq FOR NO KEY UPDATE),
    held AS MATERIALIZED (
        SELECT d.id, d.attempt, d.claim_token, d.claimed_at,
               settled_as('dead', d.cancel_requested_at IS NOT NULL, true) AS status
        FROM locked l JOIN delivery d ON d.event_seq = l.seq
        WHERE d.id = ANY(%(id)s::bigint[]) AND d.status = 'delivering' AND d.lease_until < now()
              AND (d.cancel_requested_at IS NOT NULL OR d.lost + 1 >= %(max_lost)s)
        ORDER BY d.id
        FOR NO KEY UPDATE OF d),
    moved AS (
        UPDATE delivery d
        SET status = h.status, claim_token = NULL, lease_until = NULL, lost = d.lost + 1,
            finished_at = clock_timestamp(),
            died_at = CASE WHEN h.status = 'dead' THEN clock_timestamp() END,
            failure_class = CASE WHEN h.status = 'dead' THEN 'platform' ELSE d.failure_class END,
            last_error_code = 'platform',
            last_error = CASE WHEN h.status = 'dead' THEN format('%%s claims in a row ended without a verdict', d.lost + 1)
                              ELSE 'cancelled; the claim had ended without a verdict' END,
            updated_at = clock_timestamp()
        FROM held h
        WHERE d.id = h.id
        RETURNING d.id, d.event_seq, d.status, d.retries),
    lost AS (
        INSERT INTO delivery_log (delivery_id, attempt, token, started_at, outcome, error_code, reason, settled_as)
        SELECT id, attempt, claim_token, claimed_at, 'lost', 'platform', 'the claim ended without a verdict', status
        FROM held),
    {COUNTED}
    SELECT id, status FROM moved
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A worker's wish to hold a delivery."""

    delivery_id: int
    #: A random UUID that the worker made for this one claim.
    token: str
    #: Seconds until another worker may take over: the call's timeout and a margin.
    lease_s: float
    #: The lane that handed it out, whose receiver will be called. Of another delivery that has its number since Postgres was
    #: restored from a backup, it is not the lane. None: whichever it is.
    lane: str | None = None


def claim(conn: psycopg.Connection[Any], requests: Sequence[ClaimRequest]) -> list[Claimed | Refused]:
    """Claim a group of deliveries; one answer per request, in their order. Asking again with the same token is safe.

    `conn` must be in autocommit mode: ending an expired claim locks its event, which may not wait behind the group's rows.
    """
    params = {
        "id": numbers(r.delivery_id for r in requests),
        "token": numbers(r.token for r in requests),
        "lease_s": numbers(r.lease_s for r in requests),
        "lane": texts(r.lane for r in requests),
        "max_lost": MAX_LOST,
    }
    try:
        granted = {row[0]: Claimed(*row) for row in conn.execute(_CLAIM, params, binary=True)}
    except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected) as e:
        # Two of one ordering key were claimed at the same instant, before either could see the other.
        if isinstance(e, psycopg.errors.UniqueViolation) and e.diag.constraint_name != _ONE_PER_KEY:
            raise
        if len(requests) > 1:
            return [claim(conn, [request])[0] for request in requests]
        granted = {}
    refused = {r.delivery_id for r in requests if not _holds(granted.get(r.delivery_id), r)}
    reasons = _why_not(conn, refused) if refused else {}
    return [
        claimed
        if (claimed := granted.get(r.delivery_id)) is not None and _holds(claimed, r)
        else reasons.get(r.delivery_id, Refused("missing"))
        for r in requests
    ]


def _holds(claimed: Claimed | None, request: ClaimRequest) -> bool:
    return claimed is not None and claimed.token == request.token


def _why_not(conn: psycopg.Connection[Any], ids: set[int]) -> dict[int, Refused]:
    params = {"id": numbers(sorted(ids)), "max_lost": MAX_LOST}
    reasons: dict[int, Refused] = {}
    to_end: list[tuple[int, int]] = []
    ordered: list[int] = []
    for delivery_id, seq, status, due_s, lease_s, must_end, has_key in conn.execute(_WHY_NOT, params, binary=True):
        reasons[delivery_id] = _reason(DeliveryStatus(status), due_s, lease_s)
        if must_end:
            to_end.append((delivery_id, seq))
        if has_key:
            ordered.append(delivery_id)
    if to_end:
        reasons.update(_end_expired(conn, to_end))
    if ordered:
        for delivery_id, first in ordering.firsts(conn, ordered).items():
            reasons[delivery_id] = _in_order(conn, delivery_id, reasons[delivery_id], first)
    return reasons


def _reason(status: DeliveryStatus, due_s: float, lease_s: float | None) -> Refused:
    if status is DeliveryStatus.CANCELLED:
        return Refused("cancelled")
    if status in (DeliveryStatus.SUCCEEDED, DeliveryStatus.DEAD):
        return Refused("finished")
    if lease_s is not None:
        return Refused("leased", lease_s) if lease_s > 0 else Refused("contended", CONTENDED_DELAY_S)
    return Refused("not_due", due_s) if due_s > 0 else Refused("contended", CONTENDED_DELAY_S)


def _in_order(conn: psycopg.Connection[Any], delivery_id: int, refused: Refused, first: First) -> Refused:
    """What a refusal means for a delivery with an ordering key, and what comes first of its key now."""
    if refused.reason in ("finished", "cancelled", "died"):
        return replace(refused, first=first.to_queue)
    if refused.reason != "contended" or first.ref is None:
        return refused
    if first.ref.delivery_id != delivery_id:
        return Refused("behind", first=first.to_queue)
    waited_s = ordering.unrouted_s(conn, delivery_id)
    # Without one, what it had to wait for has ended meanwhile.
    least, most = ordering.UNROUTED_DELAY_S
    return Refused("contended" if waited_s is None else "unrouted", min(most, max(least, waited_s or 0.0)))


def _end_expired(conn: psycopg.Connection[Any], to_end: list[tuple[int, int]]) -> dict[int, Refused]:
    params = {
        "id": numbers(delivery_id for delivery_id, _ in to_end),
        "seq": numbers(seq for _, seq in to_end),
        "max_lost": MAX_LOST,
    }
    return {
        delivery_id: Refused("died") if status == DeliveryStatus.DEAD else Refused("cancelled")
        for delivery_id, status in conn.execute(_END_EXPIRED, params)
    }
