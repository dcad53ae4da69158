"""Events: accepted once, and kept to the byte."""

import hashlib
from datetime import UTC, datetime

import psycopg
import pytest

from madeira.errors import StoreUnavailable
from madeira.records import PlannedDelivery
from madeira.states import EventStatus
from madeira.store import events, routing, story
from tests.store.making import Connection, claimed, new_event

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
    found = story.find(conn, "shop", new.event_id)
    assert found is not None
    assert (found["payload"], found["parameters"]) == (payload, '{"x":  1.0}')
    [result] = routing.route(conn, [(accepted.seq, [PlannedDelivery("a", "a")])])
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
    found = story.find(conn, "shop", new.event_id)
    assert found is not None
    for name in ("event_id", "event_type", "source", "target_uri", "routing_key", "payload", "parameters", "trace_id"):
        assert found[name] == getattr(new, name)
    assert (found["deliver_at"], found["created_at"], found["seq"]) == (due, accepted.created_at, accepted.seq)
    assert (found["status"], found["retry_count"], found["deliveries"]) == ("pending", 0, [])
    [routable], _ = routing.routable(conn, [accepted.seq])
    assert (routable.event_id, routable.routing_key, routable.target_uri) == (new.event_id, 'a,"b"', new.target_uri)
    [result] = routing.route(conn, [(accepted.seq, [PlannedDelivery("a", "lane")])])
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
    found = story.find(conn, "shop", "one")
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
    routing.route(conn, [(seq, [PlannedDelivery("a", "a")])])
    [answer] = events.insert(conn, [new])
    assert (answer.duplicate, answer.status) == (True, EventStatus.DELIVERING)


def test_an_insert_that_fails_leaves_nothing(conn: Connection) -> None:
    """A group with a value that Postgres refuses is not accepted in part."""
    good, bad = new_event(), new_event(event_type="nul\x00")
    with pytest.raises(psycopg.DataError):
        events.insert(conn, [good, bad])
    assert story.find(conn, "shop", good.event_id) is None


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
