"""Events: accepted once, kept to the byte, routed once, cancelled where they stand."""

import hashlib
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from madeira.errors import IllegalTransition, StoreUnavailable
from madeira.records import DeliveryRef, PlannedDelivery
from madeira.states import MAX_ROUTE_FAILURES, DeliveryStatus, EventStatus, FailureClass
from madeira.store import cancelling, events, timeline
from tests.store.making import (
    GIVE_UP,
    RETRY,
    Connection,
    accept,
    claimed,
    counts_agree,
    delivery,
    event,
    expire,
    log_of,
    new_event,
    routed,
    settled,
)

PAYLOADS = [
    "12345678901234567890",
    "1.0",
    "-0.0",
    "1e400",
    '{"b": 1,  "a": 2, "b": 3}',
    '"\\u00e9\\ud83d\\ude00 é 😀 \\/ \\" \\\\ \\u0000 \\ud800"',
    " [ 1 , 2 ]\n\t",
    "null",
    '"{NULL,\\"}"',
    '"' + "x" * 300_000 + '"',
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_a_payload_is_kept_to_the_byte(conn: Connection, payload: str) -> None:
    """Big integers, 1.0, doubled keys, escapes, emoji, blanks: what comes out is what went in, for show and for the call."""
    new = new_event(payload=payload, parameters='{"x":  1.0}')
    [accepted] = events.insert(conn, [new])
    found = events.find(conn, "shop", new.event_id)
    assert found is not None
    assert (found["payload"], found["parameters"]) == (payload, '{"x":  1.0}')
    [result] = events.route(conn, [(accepted.seq, [PlannedDelivery("a", "a")])])
    assert claimed(conn, result.refs[0]).payload == payload


def test_every_field_comes_back(conn: Connection) -> None:
    """What intake gives is what find, routing and the claim read."""
    due = datetime(2020, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC)
    new = new_event(
        routing_key='a,"b"',
        target_uri="http://x.test/?q={1}",
        parameters='{"a": 1}',
        traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        deliver_at=due,
    )
    [accepted] = events.insert(conn, [new])
    assert (accepted.event_id, accepted.source, accepted.trace_id) == (new.event_id, "shop", new.trace_id)
    assert (accepted.status, accepted.duplicate, accepted.conflict) == (EventStatus.PENDING, False, False)
    found = events.find(conn, "shop", new.event_id)
    assert found is not None
    for name in ("event_id", "event_type", "source", "target_uri", "routing_key", "payload", "parameters", "trace_id"):
        assert found[name] == getattr(new, name)
    assert (found["deliver_at"], found["created_at"], found["seq"]) == (due, accepted.created_at, accepted.seq)
    assert (found["status"], found["retry_count"], found["deliveries"]) == ("pending", 0, [])
    [routable], _ = events.routable(conn, [accepted.seq])
    assert (routable.event_id, routable.routing_key, routable.target_uri) == (new.event_id, 'a,"b"', new.target_uri)
    [result] = events.route(conn, [(accepted.seq, [PlannedDelivery("a", "lane")])])
    held = claimed(conn, result.refs[0])
    assert (held.traceparent, held.target_uri, held.parameters) == (new.traceparent, new.target_uri, new.parameters)
    assert (held.created_at, held.lane, held.event_type) == (accepted.created_at, "lane", "order.paid")


def test_order_of_acceptance_is_the_order_of_arrival(conn: Connection) -> None:
    """`seq` rises with the place in the group, whatever the ids are, though rows are inserted in the order of their ids."""
    group = [new_event(event_id=event_id) for event_id in ("z", "a", "m", "B", "b")]
    seqs = [accepted.seq for accepted in events.insert(conn, group)]
    assert seqs == sorted(seqs)


def test_the_same_id_again_is_a_duplicate_or_a_conflict(conn: Connection) -> None:
    """Same bytes or same JSON value: a duplicate with the first one's seq and state; else a conflict, and nothing changes."""
    first = new_event(event_id="one", payload='{"a": 1, "b": 2}')
    [accepted] = events.insert(conn, [first])
    same_bytes = first
    same_value = new_event(event_id="one", payload='{"b": 2, "a": 1.0}', trace_id="another")
    other_payload = new_event(event_id="one", payload='{"a": 1, "b": 3}')
    other_type = new_event(event_id="one", payload='{"b":2, "a":1}', event_type="order.sent")
    answers = events.insert(conn, [same_bytes, same_value, other_payload, other_type])
    assert [(a.duplicate, a.conflict) for a in answers] == [(True, False), (True, False), (False, True), (False, True)]
    assert {(a.seq, a.trace_id, a.created_at) for a in answers} == {(accepted.seq, first.trace_id, accepted.created_at)}
    found = events.find(conn, "shop", "one")
    assert found is not None
    assert found["payload"] == first.payload


def test_twins_inside_one_group_are_told_apart(conn: Connection) -> None:
    """Of several with one id in one group the first is accepted, the others are duplicates or conflicts."""
    first = new_event(event_id="one", payload="1")
    answers = events.insert(conn, [new_event(), first, new_event(event_id="one", payload="2"), first])
    assert [(a.duplicate, a.conflict) for a in answers[1:]] == [(False, False), (False, True), (True, False)]
    assert len({a.seq for a in answers[1:]}) == 1


def test_ids_that_differ_stay_distinct(conn: Connection) -> None:
    """Case counts, blanks count, and the same id of another source is another event."""
    group = [new_event(event_id=i) for i in ("A", "a", "a ", "1", "01")] + [new_event(event_id="a", source="other")]
    answers = events.insert(conn, group)
    assert len({a.seq for a in answers}) == 6
    assert not any(a.duplicate or a.conflict for a in answers)


def test_a_duplicate_tells_the_state_of_now(conn: Connection) -> None:
    """The answer to a repeated post shows where the event is by now."""
    new = new_event()
    seq = events.insert(conn, [new])[0].seq
    events.route(conn, [(seq, [PlannedDelivery("a", "a")])])
    [answer] = events.insert(conn, [new])
    assert (answer.duplicate, answer.status) == (True, EventStatus.DELIVERING)


def test_an_event_for_later_is_not_routable_before(conn: Connection) -> None:
    """`deliver_at` gives the delay of intake and of routing, by the database's clock."""
    new = new_event(deliver_at=datetime.now(UTC) + timedelta(hours=1))
    [accepted] = events.insert(conn, [new])
    assert 3590 < accepted.delay_s <= 3600
    routable, others = events.routable(conn, [accepted.seq, accepted.seq + 1000])
    assert routable == []
    assert others[accepted.seq].reason == "not_due"
    assert 3590 < others[accepted.seq].delay_s <= 3600
    assert others[accepted.seq + 1000].reason == "missing"
    conn.execute("UPDATE event SET route_at = clock_timestamp() WHERE seq = %s", (accepted.seq,))
    [due], others = events.routable(conn, [accepted.seq])
    assert (due.seq, others) == (accepted.seq, {})


def test_routing_happens_once(conn: Connection) -> None:
    """A second run, even after a change of the rules, adds nothing; it names what is unfinished for the broker."""
    seq = accept(conn)
    [first] = events.route(conn, [(seq, [PlannedDelivery("b", "b"), PlannedDelivery("a", "a@x", ("r1", "r,2"))])])
    assert first.status == EventStatus.DELIVERING
    assert [ref.lane for ref in first.refs] == ["a@x", "b"]
    [second] = events.route(conn, [(seq, [PlannedDelivery("c", "c")])])
    assert second.status is None
    assert [ref.delivery_id for ref in second.refs] == [ref.delivery_id for ref in first.refs]
    assert delivery(conn, first.refs[0].delivery_id)["routes"] == ["r1", "r,2"]
    row = event(conn, seq)
    assert (row["deliveries"], row["unfinished"], row["route_at"]) == (2, 2, None)
    assert events.routable(conn, [seq])[1][seq].reason == "finished"


def test_routing_and_calling_get_what_templates_read(conn: Connection) -> None:
    """All fields that filters and templates may look at, and the body that one of them made, byte for byte."""
    seq = accept(conn, payload='{"n": 1.10}', parameters='{ "a":1}', routing_key="k", target_uri="http://back.test/")
    [found], _ = events.routable(conn, [seq])
    shown = (found.payload, found.parameters, found.routing_key, found.target_uri, found.created_at)
    assert shown == ('{"n": 1.10}', '{ "a":1}', "k", "http://back.test/", event(conn, seq)["created_at"])
    made = '{"t":  "\u00e9\\"\\\\,{}", "n": 1.10}'
    [result] = events.route(conn, [(seq, [PlannedDelivery("a", "a", body=made), PlannedDelivery("b", "b")])])
    first, second = (claimed(conn, ref) for ref in result.refs)
    assert (first.body, second.body) == (made, None)
    assert (first.payload, first.parameters, first.routing_key, first.created_at) == (*shown[:3], shown[4])


def test_a_group_of_events_is_routed_together(conn: Connection) -> None:
    """Several plans in one statement: each gets its own deliveries, states and counts."""
    many, none, dead, mixed = (accept(conn) for _ in range(4))
    born_dead = PlannedDelivery("d", "d", failure_class=FailureClass.POLICY, last_error="address denied")
    results = events.route(
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
    [routing] = events.route(conn, [(seq, [PlannedDelivery("a", "a")])])
    assert routing == events.RouteResult(seq)
    assert conn.execute("SELECT count(*) FROM delivery").fetchone() == (0,)


def test_an_event_that_cannot_be_routed_ends(conn: Connection) -> None:
    """The tenth failure of routing makes it dead as `platform`; a further one counts nothing."""
    seq = accept(conn)
    deaths = [events.count_route_failure(conn, seq) for _ in range(MAX_ROUTE_FAILURES + 1)]
    assert deaths == [False] * (MAX_ROUTE_FAILURES - 1) + [True, False]
    row = event(conn, seq)
    assert (row["status"], row["reason"], row["route_failures"]) == ("dead", "platform", MAX_ROUTE_FAILURES)


def test_cancel_ends_what_waits_and_asks_what_is_called(conn: Connection) -> None:
    """Pending: cancelled at once. Delivering: asked. A claim whose lease has run out: ended, and the log says so."""
    waits, called, expired = routed(conn, ["a", "b", "c"], event_id="one")
    held = claimed(conn, called)
    claimed(conn, expired)
    expire(conn, expired.delivery_id)
    result = cancelling.cancel(conn, "shop", "one", "ann", "wrong price")
    assert result is not None
    assert (result.status, result.requested) == (EventStatus.DELIVERING, 1)
    assert result.cancelled == [DeliveryRef(ref.delivery_id, ref.seq, ref.lane) for ref in (waits, expired)]
    assert log_of(conn, expired.delivery_id) == [(1, "lost", "cancelled")]
    assert delivery(conn, called.delivery_id)["cancel_requested_at"] is not None
    assert counts_agree(conn)
    again = cancelling.cancel(conn, "shop", "one", "ann", "wrong price")
    assert again is not None
    assert (again.cancelled, again.requested) == ([], 1)
    assert settled(conn, held, RETRY).status == DeliveryStatus.CANCELLED
    assert event(conn, waits.seq)["status"] == "cancelled"
    assert counts_agree(conn)


def test_cancel_leaves_an_audit_row(conn: Connection) -> None:
    """Who, what, why, how many."""
    routed(conn, ["a", "b"], event_id="one")
    cancelling.cancel(conn, "shop", "one", "ann", "wrong price")
    row = conn.execute("SELECT who, action, what, why, detail FROM audit").fetchone()
    detail = {"cancelled": 2, "requested": 0, "status": "cancelled"}
    assert row == ("ann", "cancel", "event shop/one", "wrong price", detail)


def test_what_is_finished_cannot_be_cancelled(conn: Connection) -> None:
    """A dead event stays dead, and no audit row claims otherwise; an unknown one is None."""
    [ref] = routed(conn, event_id="one")
    settled(conn, claimed(conn, ref), GIVE_UP)
    with pytest.raises(IllegalTransition, match="dead already"):
        cancelling.cancel(conn, "shop", "one", "ann", None)
    assert conn.execute("SELECT count(*) FROM audit").fetchone() == (0,)
    assert cancelling.cancel(conn, "shop", "two", "ann", None) is None


def test_find_shows_the_whole_story(conn: Connection) -> None:
    """Deliveries by birth, attempts in the order of time, with the first bytes of the answer."""
    first, second = routed(conn, ["a", "b"], event_id="one")
    held = claimed(conn, first)
    settled(conn, held, RETRY)
    claimed(conn, second)
    found = events.find(conn, "shop", "one")
    assert found is not None
    a, b = found["deliveries"]
    assert (a["endpoint"], a["status"], a["attempt"], a["failures"], a["retries"]) == ("a", "pending", 1, 1, 1)
    assert (b["endpoint"], b["status"], b["attempts"]) == ("b", "delivering", [])
    [attempt] = a["attempts"]
    assert (attempt["outcome"], attempt["status_code"], attempt["excerpt"]) == ("retryable", 503, b"ok")
    assert found["retry_count"] == 1
    assert events.find(conn, "other", "one") is None


def test_a_trace_is_found_by_trace_id_and_by_event_id(conn: Connection) -> None:
    """All events of a trace, and all of one id whatever their source, the earliest first."""
    one = accept(conn, event_id="one", trace_id="t1")
    two = accept(conn, event_id="two", trace_id="t1")
    elsewhere = accept(conn, event_id="one", source="other", trace_id="t2")
    assert [e["seq"] for e in events.find_trace(conn, "t1")] == [one, two]
    assert [e["seq"] for e in events.find_trace(conn, "one")] == [one, elsewhere]
    assert events.find_trace(conn, "three") == []


def test_an_insert_that_fails_leaves_nothing(conn: Connection) -> None:
    """A group with a value that Postgres refuses is not accepted in part."""
    good, bad = new_event(), new_event(event_type="nul\x00")
    with pytest.raises(psycopg.DataError):
        events.insert(conn, [good, bad])
    assert events.find(conn, "shop", good.event_id) is None


def test_a_digest_is_a_digest(conn: Connection) -> None:
    """A body digest of another length is a mistake of the caller that the database refuses."""
    with pytest.raises(psycopg.errors.CheckViolation):
        events.insert(conn, [new_event(body_sha256=hashlib.md5(b"").digest())])


def test_a_row_that_is_neither_inserted_nor_found_is_not_accepted(conn: Connection) -> None:
    """Something removes rows as fast as they come: the sender is told to try again, and never that the event is in."""
    conn.execute("CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    conn.execute("CREATE TRIGGER vanish BEFORE INSERT ON event FOR EACH ROW EXECUTE FUNCTION vanish()")
    with pytest.raises(StoreUnavailable, match="come and go"):
        events.insert(conn, [new_event()])


def test_the_timeline_shows_the_newest_events_and_their_attempts(conn: Connection) -> None:
    """From a moment on, the earliest first, at most so many; with each attempt and what follows it."""
    routed(conn, event_id="before")
    since = timeline.now(conn)
    [ref] = routed(conn, event_id="one")
    settled(conn, claimed(conn, ref), RETRY)
    accept(conn, event_id="two")
    shown, [attempt] = timeline.recent(conn, since)
    assert [event["event_id"] for event in shown] == ["one", "two"]
    assert (attempt["seq"], attempt["endpoint"], attempt["outcome"], attempt["is_latest"]) == (ref.seq, "a", "retryable", True)
    assert 59 < attempt["next_in_s"] <= 60
    assert [event["event_id"] for event in timeline.recent(conn, since, limit=1)[0]] == ["two"]
