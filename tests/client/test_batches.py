"""Many events at once: none is lost, doubled or kept in memory, whatever is wrong with some of them or with the way."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from madeira.client import Event, InvalidEvent, Unavailable, UnexpectedAnswer
from madeira.client.batches import MAX_BYTES
from madeira.delivery import signing
from tests.api.serving import SECRET, Api, rows
from tests.client.conftest import answer_lost, passed_on
from tests.receiver import Answer, Call, closed_port, json_answer

pytestmark = pytest.mark.long

BATCH = "/v1/events/batch"


def events(count: int, prefix: str = "event") -> Iterator[Event]:
    return (Event(event_type="order.paid", payload={"n": n}, event_id=f"{prefix}-{n}") for n in range(count))


def url(api: Api) -> str:
    return f"http://127.0.0.1:{api.port}"


def all_accepted(call: Call) -> Answer:
    return json_answer({"accepted": len(lines_of(call)), "duplicates": 0, "rejected": []})


def lines_of(call: Call) -> list[Any]:
    return [json.loads(line) for line in call.body.splitlines()]


def test_three_thousand_events_with_three_bad_ones_name_just_these(api, connect, database_url):
    """One that JSON cannot say, one that the API refuses, one that is in conflict; all others are in, in their order."""
    client = connect(url(api))
    client.send("order.paid", {"n": "another"}, event_id="event-2999")
    given: list[Any] = list(events(3000))
    given[7] = Event(event_type="order.paid", payload=object(), event_id="event-7")
    given[1500] = {"event_type": "not a type", "payload": 1, "event_id": "event-1500", "colour": "red"}
    summary = client.send_many(iter(given))
    assert (summary.accepted, summary.duplicates, summary.events) == (2997, 0, 3000)
    assert [(r.index, r.event_id, r.type) for r in summary.rejected] == [
        (7, "event-7", "not-strict-json"),
        (1500, "event-1500", "invalid"),
        (2999, "event-2999", "conflict"),
    ]
    assert all(r.item is given[r.index] for r in summary.rejected)
    assert "event_type" in summary.rejected[1].detail
    assert "colour" in summary.rejected[1].detail
    with psycopg.connect(database_url) as c:
        stored = [row[0] for row in c.execute("SELECT event_id FROM event ORDER BY seq")]
    assert stored == ["event-2999"] + [f"event-{n}" for n in range(2999) if n not in (7, 1500)]

    again = client.send_many(iter(given))
    assert (again.accepted, again.duplicates, len(again.rejected)) == (0, 2997, 3)
    assert rows(database_url) == 2998


def test_a_batch_is_a_single_post_as_far_as_duplicates_go(shared_api, connect):
    """The same event, sent singly and in a batch, is the same event."""
    client = connect(url(shared_api))
    client.send("order.paid", {"n": 0}, event_id="either-0")
    assert client.send_many(events(2, "either")).duplicates == 1
    assert client.send("order.paid", {"n": 1}, event_id="either-1").duplicate


def test_events_without_an_id_get_one_each(shared_api, connect):
    """So that a repeated batch is no second one."""
    client = connect(url(shared_api))
    summary = client.send_many([Event(event_type="a.b", payload=1), {"event_type": "a.b", "payload": 2, "event_id": None}])
    assert summary.accepted == 2


def test_a_batch_whose_answer_got_lost_is_sent_again_and_nothing_is_doubled(api, between, connect, database_url):
    """Also where the client made the ids."""
    between.queue(BATCH, answer_lost(api), Answer(status=503, headers={"Retry-After": "0"}))
    between.default(passed_on(api))
    summary = connect(between.url("")).send_many([{"event_type": "a.b", "payload": n} for n in range(300)])
    assert (summary.accepted, summary.duplicates) == (0, 300)
    assert rows(database_url) == 300
    assert len(between.calls) == 3


def test_each_batch_is_signed_over_all_its_bytes(between, connect):
    """As NDJSON, with a newline at the end of every line."""
    between.default(all_accepted)
    connect(between.url("")).send_many(events(5))
    [call] = between.calls
    assert call.headers["content-type"] == "application/x-ndjson"
    assert call.body.count(b"\n") == 5
    assert call.body.endswith(b"\n")
    stamp = call.headers["x-madeira-timestamp"]
    assert signing.verify((SECRET,), stamp, call.headers["x-madeira-signature"], call.body, now=call.wall)


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(0, 10, []), (1, 10, [1]), (10, 10, [10]), (25, 10, [10, 10, 5]), (3, 1, [1, 1, 1])]
)
def test_batches_have_the_number_of_events_that_was_asked_for(between, connect, count, batch, sizes):
    """The last has what is left, and there is no empty one."""
    between.default(all_accepted)
    assert connect(between.url("")).send_many(events(count), batch=batch).accepted == count
    assert [len(lines_of(call)) for call in between.calls] == sizes


def test_batches_stay_below_their_number_of_bytes(between, connect):
    """Large events make small batches; one that is larger than a batch by itself goes alone; the order stays."""
    between.default(all_accepted)
    sizes = [1_000_000] * 9 + [5_000_000] + [1_000] * 3
    given = [Event(event_type="a.b", payload="x" * size, event_id=f"large-{n}") for n, size in enumerate(sizes)]
    assert connect(between.url("")).send_many(given).accepted == len(sizes)
    lines = [[line["event_id"] for line in lines_of(call)] for call in between.calls]
    assert [len(ids) for ids in lines] == [4, 4, 1, 1, 3]
    assert list(itertools.chain(*lines)) == [event.event_id for event in given]
    assert all(len(call.body) <= MAX_BYTES or len(ids) == 1 for call, ids in zip(between.calls, lines, strict=True))


@pytest.mark.parametrize("batch", [0, 5001])
def test_a_batch_that_the_api_would_not_take_is_not_asked_for(between, connect, batch):
    """The limits are named, at once and not at the first iteration."""
    with pytest.raises(ValueError, match="from 1 to 5000"):
        connect(between.url("")).send_batches(events(1), batch=batch)


def test_events_are_taken_from_the_iterable_only_as_they_are_needed(between, connect):
    """When a batch arrives, no more than it was taken; and nothing of what went before is kept by the steps."""
    taken = 0
    at_call: list[int] = []

    def source() -> Iterator[Event]:
        nonlocal taken
        for event in events(10_000):
            taken += 1
            yield event

    def note(call: Call) -> Answer:
        at_call.append(taken)
        return all_accepted(call)

    between.default(note)
    steps = connect(between.url("")).send_batches(source(), batch=2000)
    assert taken == 0
    assert next(steps).accepted == 2000
    assert taken == 2000
    assert sum(step.accepted for step in steps) == 8000
    assert at_call == [2000, 4000, 6000, 8000, 10_000]


def test_a_failure_in_the_middle_tells_where_to_go_on(api, between, connect, database_url):
    """What the error has, and then the rest of the iterable: everything is in once, in order, with the ids of the first time."""
    between.queue(BATCH, passed_on(api), answer_lost(api), *[Answer(status=503)] * 2)
    between.default(passed_on(api))
    client = connect(between.url(""), retries=2)
    rest = iter([{"event_type": "a.b", "payload": n} for n in range(1000)])
    with pytest.raises(Unavailable) as caught:
        client.send_many(rest, batch=300)
    assert caught.value.confirmed == 300
    assert [fields["payload"] for fields in caught.value.unconfirmed] == list(range(300, 600))
    summary = client.send_many(itertools.chain(caught.value.unconfirmed, rest))
    assert (summary.accepted, summary.duplicates) == (400, 300)
    with psycopg.connect(database_url) as c:
        assert [row[0] for row in c.execute("SELECT payload::text::int FROM event ORDER BY seq")] == list(range(1000))


def test_a_failure_names_the_event_too_that_had_no_room_in_the_batch(connect):
    """It is gone from the iterable as well."""
    given = [Event(event_type="a.b", payload="x" * 1_500_000, event_id=f"large-{n}") for n in range(5)]
    rest = iter(given)
    with closed_port() as port, pytest.raises(Unavailable) as caught:
        connect(f"http://127.0.0.1:{port}", retries=0).send_many(rest)
    sent = [fields["event_id"] for fields in caught.value.unconfirmed] + [event.event_id for event in rest]
    assert sent == [event.event_id for event in given]


def test_a_batch_that_is_too_large_for_something_on_the_way_is_halved(api, between, connect, database_url):
    """Down to the single event that does not fit, which is refused; the others are in, in order."""

    def gateway(call: Call) -> Answer:
        return Answer(status=413, body="<h1>413</h1>") if len(call.body) > 2000 else passed_on(api)(call)

    between.default(gateway)
    given = [Event(event_type="a.b", payload="x" * (3000 if n == 13 else 100), event_id=f"half-{n}") for n in range(40)]
    summary = connect(between.url("")).send_many(given)
    assert summary.accepted == 39
    assert [(r.index, r.item is given[13]) for r in summary.rejected] == [(13, True)]
    with psycopg.connect(database_url) as c:
        stored = [row[0] for row in c.execute("SELECT event_id FROM event ORDER BY seq")]
    assert stored == [f"half-{n}" for n in range(40) if n != 13]


def test_what_is_no_event_at_all_is_refused_and_keeps_nothing_from_its_neighbours(between, connect):
    """An item of a wrong type, in the midst of good ones."""
    between.default(all_accepted)
    summary = connect(between.url("")).send_many([*events(1), ["a list"], *events(1)])  # type: ignore[list-item]
    assert summary.accepted == 2
    [rejected] = summary.rejected
    assert (rejected.index, rejected.item, rejected.event_id) == (1, ["a list"], None)
    assert "not a list" in rejected.detail


def test_bad_events_alone_are_refused_without_a_call(between, connect):
    """There is nothing to ask for."""
    summary = connect(between.url("")).send_many([{"event_type": "a.b", "payload": {1, 2}}] * 25, batch=10)
    assert [r.index for r in summary.rejected] == list(range(25))
    assert between.count() == 0


@pytest.mark.parametrize(
    "answer",
    [
        Answer(body="<html>Welcome to the hotel</html>"),
        json_answer({"accepted": 1, "duplicates": 0, "rejected": []}),
        json_answer({"accepted": 2, "duplicates": 0, "rejected": [{"line": 4, "type": "invalid", "detail": "?"}]}),
        json_answer({"accepted": 2, "duplicates": 0, "rejected": [{"line": 0, "type": "invalid", "detail": "?"}]}),
        json_answer({"accepted": 3}),
        json_answer({"accepted": None, "duplicates": 0, "rejected": []}),
    ],
    ids=["html", "too few", "line 4", "line 0", "half", "null"],
)
def test_an_answer_that_does_not_account_for_every_event_is_no_promise(between, connect, answer):
    """Then nothing is confirmed."""
    between.default(answer)
    with pytest.raises(UnexpectedAnswer) as caught:
        connect(between.url("")).send_many(events(3))
    assert caught.value.confirmed == 0
    assert [fields["event_id"] for fields in caught.value.unconfirmed] == ["event-0", "event-1", "event-2"]


def test_an_error_of_the_iterable_comes_through(between, connect):
    """What was sent before it is sent, what was gathered is not."""

    def source() -> Iterator[Event]:
        yield from events(15)
        raise InvalidEvent("the file ends in the middle of a line")

    between.default(all_accepted)
    with pytest.raises(InvalidEvent, match="the file ends"):
        connect(between.url("")).send_many(source(), batch=10)
    assert between.count() == 1
