"""Deliveries of ordering keys in every state, and what a claim of one is answered."""

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from madeira.records import Claimed, DeliveryRef, PlannedDelivery, Refused
from madeira.store import cancelling, replay, routing
from madeira.store.claims import ClaimRequest, claim
from tests.store.making import (
    GIVE_UP,
    RETRY,
    SUCCESS,
    Connection,
    accept,
    claimed,
    event,
    expire,
    settled,
    token,
)

#: Route -> its source (None: any) and its endpoint.
ROUTES = {"r": ("shop", "a"), "s": ("second", "a"), "t": ("other", "b"), "u": (None, "c")}


@pytest.fixture(autouse=True)
def routes(conn: Connection) -> None:
    """Which sources lead where."""
    for name, (source, endpoint) in ROUTES.items():
        spec = {"endpoint": endpoint} | ({"source": source} if source else {})
        conn.execute("INSERT INTO route (name, spec) VALUES (%s, %s)", (name, Jsonb(spec)))


def route(conn: Connection, seq: int, key: str | None = "k", endpoint: str = "a") -> DeliveryRef:
    """Route an accepted event to one endpoint under an ordering key."""
    [ref] = routing.route(conn, [(seq, [PlannedDelivery(endpoint, endpoint, ("r",), ordering_key=key)])])[0].refs
    return ref


def born(conn: Connection, key: str | None = "k", endpoint: str = "a", **fields: Any) -> DeliveryRef:
    """A pending delivery of an event of its own."""
    return route(conn, accept(conn, **fields), key, endpoint)


def ask(conn: Connection, ref: DeliveryRef) -> Claimed | Refused:
    [answer] = claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0)])
    return answer


def refused(conn: Connection, ref: DeliveryRef) -> Refused:
    answer = ask(conn, ref)
    assert isinstance(answer, Refused), answer
    return answer


def may_go(conn: Connection, ref: DeliveryRef) -> bool:
    return isinstance(ask(conn, ref), Claimed)


def id_of(ref: DeliveryRef | None) -> int | None:
    return None if ref is None else ref.delivery_id


def play_again(conn: Connection, ref: DeliveryRef) -> DeliveryRef:
    """Replay the event of a delivery, as a person does."""
    row = event(conn, ref.seq)
    result = replay.replay(conn, row["source"], row["event_id"], "ann", "mended")
    assert result is not None
    return result.refs[0]


def cancel(conn: Connection, ref: DeliveryRef) -> None:
    row = event(conn, ref.seq)
    cancelling.cancel(conn, row["source"], row["event_id"], "ann", None)


def retrying(conn: Connection, ref: DeliveryRef) -> None:
    settled(conn, claimed(conn, ref), RETRY)


def taken(conn: Connection, ref: DeliveryRef) -> None:
    claimed(conn, ref)


def run_out(conn: Connection, ref: DeliveryRef) -> None:
    claimed(conn, ref)
    expire(conn, ref.delivery_id)


def succeeded(conn: Connection, ref: DeliveryRef) -> None:
    settled(conn, claimed(conn, ref), SUCCESS)


def died(conn: Connection, ref: DeliveryRef) -> None:
    settled(conn, claimed(conn, ref), GIVE_UP)


def untouched(conn: Connection, ref: DeliveryRef) -> None:
    """Leave it pending and due."""
