"""The database allows exactly the moves of `madeira.states`, whatever statement asks for them."""

from itertools import product
from typing import Any

import psycopg
import pytest

from madeira.states import DELIVERY_MOVES, EVENT_MOVES, FINISHED, DeliveryStatus, EventStatus
from tests.store.making import Connection, accept, claimed, expire, routed

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


def allows(conn: Connection, put: Any, *args: Any) -> bool:
    """Whether the database lets it happen; if not, the guard of the states must be the reason."""
    try:
        put(conn, *args)
    except psycopg.errors.CheckViolation as e:
        if "no move leads" not in str(e) and "is born" not in str(e):
            raise
        return False
    return True


def test_a_delivery_moves_only_as_the_table_says(conn: Connection) -> None:
    """Of all pairs of states the database allows exactly those of DELIVERY_MOVES (standing still is no move)."""
    [ref] = routed(conn)
    allowed = set()
    for before, after in product(DeliveryStatus, repeat=2):
        unguarded(conn, put_delivery, ref.delivery_id, before)
        if before is DeliveryStatus.DELIVERING:
            expire(conn, ref.delivery_id)
        if allows(conn, put_delivery, ref.delivery_id, after):
            allowed.add((before, after))
    still = {(status, status) for status in DeliveryStatus}
    assert allowed == {move for move in DELIVERY_MOVES if move[0] is not None} | still


def test_an_event_moves_only_as_the_table_says(conn: Connection) -> None:
    """Of all pairs of states the database allows exactly those of EVENT_MOVES (standing still is no move)."""
    [ref] = routed(conn)
    allowed = set()
    for before, after in product(EventStatus, repeat=2):
        unguarded(conn, put_event, ref.seq, before)
        if allows(conn, put_event, ref.seq, after):
            allowed.add((before, after))
    still = {(status, status) for status in EventStatus}
    assert allowed == {move for move in EVENT_MOVES if move[0] is not None} | still


def bear_delivery(conn: Connection, seq: int, status: DeliveryStatus) -> None:
    name = f"'{status}'"
    columns = {"event_seq": str(seq), "endpoint": name, "lane": name, "trace_id": "'t'", "status": name} | BESIDE[status]
    conn.execute(f"INSERT INTO delivery ({', '.join(columns)}) VALUES ({', '.join(columns.values())})".encode())


def test_a_delivery_is_born_pending_or_dead(conn: Connection) -> None:
    """An INSERT in any other state is refused, as DELIVERY_MOVES says."""
    [ref] = routed(conn)
    born = {(None, status) for status in DeliveryStatus if allows(conn, bear_delivery, ref.seq, status)}
    assert born == {move for move in DELIVERY_MOVES if move[0] is None}


def bear_event(conn: Connection, status: EventStatus) -> None:
    conn.execute(
        "INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, status, route_at) "
        f"VALUES ('s', '{status}', 't', '1', sha256(''), 't', '{status}', {COUNTS[status][0]})".encode()
    )


def test_an_event_is_born_pending(conn: Connection) -> None:
    """An INSERT in any other state is refused, as EVENT_MOVES says."""
    born = {(None, status) for status in EventStatus if allows(conn, bear_event, status)}
    assert born == {move for move in EVENT_MOVES if move[0] is None}


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


@pytest.mark.parametrize("when", ["infinity", "-infinity"])
@pytest.mark.parametrize(
    ("table", "column"),
    [("delivery", "next_attempt_at"), ("delivery", "lease_until"), ("event", "route_at"), ("event", "deliver_at")],
)
def test_no_time_is_infinite(conn: Connection, table: str, column: str, when: str) -> None:
    """A row that no client could read is not written, also not by hand."""
    accept(conn)
    [ref] = routed(conn)
    claimed(conn, ref)
    with pytest.raises(psycopg.errors.CheckViolation, match="times_are_finite"):
        conn.execute(f"UPDATE {table} SET {column} = '{when}' WHERE {column} IS NOT NULL OR '{column}' = 'deliver_at'".encode())
