"""The database allows exactly the moves of `madeira.states`, whatever statement asks for them."""

from itertools import product
from typing import Any

import psycopg
import pytest

from madeira.states import DELIVERY_MOVES, EVENT_MOVES, FINISHED, DeliveryStatus, EventStatus
from tests.store.making import Connection, claimed, expire, routed

#: What must hold beside each state of a delivery.
BESIDE = {
    status: {
        "claim_token": "gen_random_uuid()" if status is DeliveryStatus.DELIVERING else "NULL",
        "lease_until": "clock_timestamp() + interval '1 min'" if status is DeliveryStatus.DELIVERING else "NULL",
        "finished_at": "clock_timestamp()" if status in FINISHED else "NULL",
        "died_at": "clock_timestamp()" if status is DeliveryStatus.DEAD else "NULL",
        "failure_class": "'receiver'" if status is DeliveryStatus.DEAD else "NULL",
    }
    for status in DeliveryStatus
}

#: What must hold beside each state of an event with one delivery: route_at, unfinished, dead, cancelled.
COUNTS = {
    EventStatus.PENDING: ("clock_timestamp()", 0, 0, 0),
    EventStatus.DELIVERING: ("NULL", 1, 0, 0),
    EventStatus.SUCCEEDED: ("NULL", 0, 0, 0),
    EventStatus.DEAD: ("NULL", 0, 1, 0),
    EventStatus.CANCELLED: ("NULL", 0, 0, 1),
}


def put_delivery(conn: Connection, delivery_id: int, status: DeliveryStatus) -> None:
    columns = ", ".join(f"{name} = {value}" for name, value in BESIDE[status].items())
    conn.execute(f"UPDATE delivery SET status = '{status}', {columns} WHERE id = {delivery_id}".encode())


def put_event(conn: Connection, seq: int, status: EventStatus) -> None:
    route_at, unfinished, dead, cancelled = COUNTS[status]
    conn.execute(
        f"UPDATE event SET status = '{status}', route_at = {route_at}, deliveries = 1, unfinished = {unfinished}, "
        f"dead = {dead}, cancelled = {cancelled} WHERE seq = {seq}".encode()
    )


def unguarded(conn: Connection, put: Any, *args: Any) -> None:
    """Put a row into a state without asking the guard, as superuser."""
    conn.execute("SET session_replication_role = replica")
    put(conn, *args)
    conn.execute("SET session_replication_role = DEFAULT")


@pytest.mark.parametrize(("before", "after"), list(product(DeliveryStatus, repeat=2)))
def test_a_delivery_moves_only_as_the_table_says(conn: Connection, before: DeliveryStatus, after: DeliveryStatus) -> None:
    """Each pair of states: allowed by the database if and only if DELIVERY_MOVES has it (standing still is no move)."""
    [ref] = routed(conn)
    unguarded(conn, put_delivery, ref.delivery_id, before)
    if before is after is DeliveryStatus.DELIVERING:
        expire(conn, ref.delivery_id)
    if (before, after) in DELIVERY_MOVES or (before is after and before is not DeliveryStatus.DELIVERING):
        put_delivery(conn, ref.delivery_id, after)
    else:
        with pytest.raises(psycopg.errors.CheckViolation, match=f"no move leads from {before} to {after}"):
            put_delivery(conn, ref.delivery_id, after)


@pytest.mark.parametrize(("before", "after"), list(product(EventStatus, repeat=2)))
def test_an_event_moves_only_as_the_table_says(conn: Connection, before: EventStatus, after: EventStatus) -> None:
    """Each pair of states: allowed by the database if and only if EVENT_MOVES has it (standing still is no move)."""
    [ref] = routed(conn)
    unguarded(conn, put_event, ref.seq, before)
    if (before, after) in EVENT_MOVES or before is after:
        put_event(conn, ref.seq, after)
    else:
        with pytest.raises(psycopg.errors.CheckViolation, match=f"no move leads from {before} to {after}"):
            put_event(conn, ref.seq, after)


@pytest.mark.parametrize("status", list(DeliveryStatus))
def test_a_delivery_is_born_pending_or_dead(conn: Connection, status: DeliveryStatus) -> None:
    """An INSERT in any other state is refused."""
    [ref] = routed(conn)
    columns = {"event_seq": str(ref.seq), "endpoint": "'b'", "lane": "'b'", "trace_id": "'t'", "status": f"'{status}'"}
    columns |= BESIDE[status]
    statement = f"INSERT INTO delivery ({', '.join(columns)}) VALUES ({', '.join(columns.values())})".encode()
    if (None, status) in DELIVERY_MOVES:
        conn.execute(statement)
    else:
        with pytest.raises(psycopg.errors.CheckViolation, match="born"):
            conn.execute(statement)


@pytest.mark.parametrize("status", list(EventStatus))
def test_an_event_is_born_pending(conn: Connection, status: EventStatus) -> None:
    """An INSERT in any other state is refused."""
    route_at = COUNTS[status][0]
    statement = (
        "INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, status, route_at) "
        f"VALUES ('s', 'i', 't', '1', sha256(''), 't', '{status}', {route_at})"
    ).encode()
    if (None, status) in EVENT_MOVES:
        conn.execute(statement)
    else:
        with pytest.raises(psycopg.errors.CheckViolation, match="born"):
            conn.execute(statement)


def test_a_claim_whose_lease_runs_cannot_be_taken_over_by_any_statement(conn: Connection) -> None:
    """Another token on a delivery that is being called is refused until the lease has run out."""
    [ref] = routed(conn)
    claimed(conn, ref)
    take = "UPDATE delivery SET claim_token = gen_random_uuid() WHERE id = %s"
    with pytest.raises(psycopg.errors.CheckViolation, match="lease runs"):
        conn.execute(take, (ref.delivery_id,))
    expire(conn, ref.delivery_id)
    assert conn.execute(take, (ref.delivery_id,)).rowcount == 1


def test_attempt_never_goes_back(conn: Connection) -> None:
    """The numbering of attempts survives replays; no statement lowers it."""
    [ref] = routed(conn)
    claimed(conn, ref)
    with pytest.raises(psycopg.errors.CheckViolation, match="attempt never goes back"):
        conn.execute("UPDATE delivery SET attempt = 0 WHERE id = %s", (ref.delivery_id,))


def test_an_event_cannot_be_told_finished_while_a_delivery_is_not(conn: Connection) -> None:
    """The state of a routed event is what its counts say, by a constraint."""
    [ref] = routed(conn)
    with pytest.raises(psycopg.errors.CheckViolation, match="event_status_follows_deliveries"):
        conn.execute("UPDATE event SET status = 'succeeded' WHERE seq = %s", (ref.seq,))


def test_an_endpoint_gets_one_delivery_of_an_event(conn: Connection) -> None:
    """The pair is unique in the database."""
    [ref] = routed(conn)
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute("INSERT INTO delivery (event_seq, endpoint, lane, trace_id) VALUES (%s, 'a', 'a', 't')", (ref.seq,))


def test_a_claim_writes_no_index(conn: Connection) -> None:
    """A claim touches no indexed column (a HOT update), so a busy lane does not bloat the indexes."""
    [ref] = routed(conn)
    with conn.transaction():
        claimed(conn, ref)
        updates = conn.execute("""
            SELECT pg_stat_get_xact_tuples_updated('delivery'::regclass),
                   pg_stat_get_xact_tuples_hot_updated('delivery'::regclass)
        """)
        assert updates.fetchone() == (1, 1)
