"""Events are routed once, together, and not before they are due."""

from datetime import UTC, datetime, timedelta

from madeira.records import PlannedDelivery
from madeira.states import MAX_ROUTE_FAILURES, EventStatus, FailureClass
from madeira.store import cancelling, events, routing
from tests.store.making import Connection, accept, claimed, counts_agree, delivery, event, new_event


def test_an_event_for_later_is_not_routable_before(conn: Connection) -> None:
    """`deliver_at` gives the delay of intake and of routing, by the database's clock."""
    new = new_event(deliver_at=datetime.now(UTC) + timedelta(hours=1))
    [accepted] = events.insert(conn, [new])
    assert 3590 < accepted.delay_s <= 3600
    routable, others = routing.routable(conn, [accepted.seq, accepted.seq + 1000])
    assert routable == []
    assert others[accepted.seq].reason == "not_due"
    assert 3590 < others[accepted.seq].delay_s <= 3600
    assert others[accepted.seq + 1000].reason == "missing"
    conn.execute("UPDATE event SET route_at = clock_timestamp() WHERE seq = %s", (accepted.seq,))
    [due], others = routing.routable(conn, [accepted.seq])
    assert (due.seq, others) == (accepted.seq, {})


def test_routing_happens_once(conn: Connection) -> None:
    """A second run, even after a change of the rules, adds nothing; it names what is unfinished for the broker."""
    seq = accept(conn)
    [first] = routing.route(conn, [(seq, [PlannedDelivery("b", "b"), PlannedDelivery("a", "a@x", ("r1", "r,2"))])])
    assert first.status == EventStatus.DELIVERING
    assert [ref.lane for ref in first.refs] == ["a@x", "b"]
    [second] = routing.route(conn, [(seq, [PlannedDelivery("c", "c")])])
    assert second.status is None
    assert [ref.delivery_id for ref in second.refs] == [ref.delivery_id for ref in first.refs]
    assert delivery(conn, first.refs[0].delivery_id)["routes"] == ["r1", "r,2"]
    row = event(conn, seq)
    assert (row["deliveries"], row["unfinished"], row["route_at"]) == (2, 2, None)
    assert routing.routable(conn, [seq])[1][seq].reason == "finished"


def test_routing_and_calling_get_what_templates_read(conn: Connection) -> None:
    """All fields that filters and templates may look at, and the body that one of them made, byte for byte."""
    seq = accept(conn, payload='{"n": 1.10}', parameters='{ "a":1}', routing_key="k", target_uri="http://back.test/")
    [found], _ = routing.routable(conn, [seq])
    shown = (found.payload, found.parameters, found.routing_key, found.target_uri, found.created_at)
    assert shown == ('{"n": 1.10}', '{ "a":1}', "k", "http://back.test/", event(conn, seq)["created_at"])
    made = '{"t":  "\u00e9\\"\\\\,{}", "n": 1.10}'
    [result] = routing.route(conn, [(seq, [PlannedDelivery("a", "a", body=made), PlannedDelivery("b", "b")])])
    first, second = (claimed(conn, ref) for ref in result.refs)
    assert (first.body, second.body) == (made, None)
    assert (first.payload, first.parameters, first.routing_key, first.created_at) == (*shown[:3], shown[4])


def test_a_group_of_events_is_routed_together(conn: Connection) -> None:
    """Several plans in one statement: each gets its own deliveries, states and counts."""
    many, none, dead, mixed = (accept(conn) for _ in range(4))
    born_dead = PlannedDelivery("d", "d", failure_class=FailureClass.POLICY, last_error="address denied")
    results = routing.route(
        conn,
        [
            (mixed, [PlannedDelivery("a", "a"), born_dead]),
            (none, []),
            (dead, [born_dead]),
            (many, [PlannedDelivery("a", "a"), PlannedDelivery("b", "b")]),
        ],
    )
    assert [r.seq for r in results] == [mixed, none, dead, many]
    assert [(len(r.refs), len(r.dead), r.status) for r in results] == [
        (1, 1, EventStatus.DELIVERING),
        (0, 0, EventStatus.DEAD),
        (0, 1, EventStatus.DEAD),
        (2, 0, EventStatus.DELIVERING),
    ]
    assert event(conn, none)["reason"] == "unrouted"
    assert delivery(conn, results[2].dead[0].delivery_id)["failure_class"] == "policy"
    assert counts_agree(conn)


def test_a_cancelled_event_is_not_routed(conn: Connection) -> None:
    """The cancel of an event that waits for its routing wins over a routing that comes later."""
    new = new_event()
    seq = events.insert(conn, [new])[0].seq
    result = cancelling.cancel(conn, "shop", new.event_id, "ann", "not needed")
    assert result == cancelling.CancelResult(seq, EventStatus.CANCELLED, [], 0)
    [unchanged] = routing.route(conn, [(seq, [PlannedDelivery("a", "a")])])
    assert unchanged == routing.RouteResult(seq)
    assert conn.execute("SELECT count(*) FROM delivery").fetchone() == (0,)


def test_an_event_that_cannot_be_routed_ends(conn: Connection) -> None:
    """The tenth failure of routing makes it dead as `platform`; a further one counts nothing."""
    seq = accept(conn)
    deaths = [routing.count_route_failure(conn, seq) for _ in range(MAX_ROUTE_FAILURES + 1)]
    assert deaths == [False] * (MAX_ROUTE_FAILURES - 1) + [True, False]
    row = event(conn, seq)
    assert (row["status"], row["reason"], row["route_failures"]) == ("dead", "platform", MAX_ROUTE_FAILURES)
