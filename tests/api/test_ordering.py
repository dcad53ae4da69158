"""What the API shows of deliveries that wait for their turn, and what its actions let go next."""

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from madeira.broker.queues import DELIVER, Queues, delivery_key, ensure_delivery
from madeira.records import Attempt, Claimed, Decision, DeliveryRef, PlannedDelivery
from madeira.states import DeliveryStatus, FailureClass, Outcome
from madeira.store import claims, deliveries, routing
from tests.api.people import ADMIN, in_json
from tests.api.serving import Api, event, signed

#: Signs for the other source.
OTHER = {"source": "other", "secret": "another-secret-new"}


class Key:
    """An ordering key of a test alone, whose events are accepted over HTTP and routed by hand to one endpoint."""

    def __init__(self, api: Api, queues: Queues) -> None:
        self.api = api
        self.queues = queues
        self.name = uuid.uuid4().hex
        self.endpoint = f"e-{self.name[:8]}"

    def born(self, **fields: Any) -> tuple[str, DeliveryRef]:
        """A pending delivery that is not queued: the id of its event, and itself."""
        event_id, seq = self.accepted(**fields)
        plan = [PlannedDelivery(self.endpoint, self.endpoint, ordering_key=self.name)]
        with psycopg.connect(self.api.env["MADEIRA_DATABASE_URL"]) as c:
            return event_id, routing.route(c, [(seq, plan)])[0].refs[0]

    def accepted(self, **fields: Any) -> tuple[str, int]:
        event_id = uuid.uuid4().hex
        body = event(event_id)
        headers = signed(body, **fields)
        assert self.api.request("POST", "/v1/events", body, headers).status == 202
        with psycopg.connect(self.api.env["MADEIRA_DATABASE_URL"]) as c:
            row = c.execute("SELECT seq FROM event WHERE event_id = %s", (event_id,)).fetchone()
        assert row is not None
        return event_id, row[0]

    def dead(self) -> tuple[str, DeliveryRef]:
        """A delivery that was given up."""
        event_id, ref = self.born()
        decision = Decision(DeliveryStatus.DEAD, counts=True, failure_class=FailureClass.RECEIVER, last_error="400")
        attempt = Attempt(Outcome.PERMANENT, datetime.now(UTC), 0.1, "http://host/", 400, error_code="http_400")
        with psycopg.connect(self.api.env["MADEIRA_DATABASE_URL"]) as c:
            [held] = claims.claim(c, [claims.ClaimRequest(ref.delivery_id, str(uuid.uuid4()), 60)])
            assert isinstance(held, Claimed)
            deliveries.settle(
                c, [deliveries.SettleRequest(ref.delivery_id, ref.seq, held.token, held.attempt, attempt, decision, "t")]
            )
        return event_id, ref

    def waits(self, event_id: str, headers: dict[str, str] | None = None, source: str = "shop") -> dict[str, Any]:
        """What the one delivery of an event waits for, as it is shown."""
        answer = self.api.request("GET", f"/v1/events/{event_id}?source={source}", None, headers or ADMIN)
        assert answer.status == 200, answer.body
        [delivery] = answer.json["deliveries"]
        assert delivery["ordering_key"] == self.name
        waits: dict[str, Any] = delivery["waits"]
        return waits

    def act(self, event_id: str, action: str) -> None:
        body = json.dumps({"reason": "a test"}).encode()
        answer = self.api.request("POST", f"/v1/events/{event_id}/{action}?source=shop", body, in_json(ADMIN))
        assert answer.status == 200, answer.body

    def where(self, *refs: DeliveryRef) -> list[str]:
        return [place.kind for place in self.queues.where(DELIVER, [delivery_key(ref) for ref in refs])]


@pytest.fixture
def key(shared_api: Api) -> Iterator[Key]:
    """A key of the test alone. Events of `shop` are all routed, or they would hold up those of other tests."""
    queues = Queues(redis_url=shared_api.env["MADEIRA_REDIS_URL"], namespace=shared_api.env["MADEIRA_NAMESPACE"])
    yield Key(shared_api, queues)
    queues.close()


def test_it_is_shown_behind_which_event_a_delivery_waits(key: Key) -> None:
    """The first of its key, and how many there are before it; the first itself waits for its lane, and not for order."""
    (one, first), (two, _), (three, _) = key.born(), key.born(), key.born()
    key.queues.ensure([ensure_delivery(first)])
    assert key.waits(one)["where"] == "waiting"
    behind = {"source": "shop", "event_id": one}
    assert key.waits(two) == {"where": "ordering", "seconds": 0.0, "ahead": 1, "behind": behind}
    assert key.waits(three) == {"where": "ordering", "seconds": 0.0, "ahead": 2, "behind": behind}


def test_a_source_is_not_told_the_events_of_another(key: Key) -> None:
    """That it waits and behind how many, but not behind whose."""
    key.born(**OTHER)
    mine, _ = key.born()
    assert key.waits(mine, signed(b"")) == {"where": "ordering", "seconds": 0.0, "ahead": 1}


def test_it_is_shown_that_a_delivery_waits_for_the_routing_of_an_event(key: Key) -> None:
    with psycopg.connect(key.api.env["MADEIRA_DATABASE_URL"]) as c:
        spec = Jsonb({"source": "other", "endpoint": key.endpoint})
        c.execute("INSERT INTO route (name, spec) VALUES (%s, %s)", (key.endpoint, spec))
    unrouted, _ = key.accepted(**OTHER)
    name, _ = key.born(**OTHER)
    assert key.waits(name, source="other") == {
        "where": "ordering",
        "seconds": 0.0,
        "ahead": 0,
        "behind": {"source": "other", "event_id": unrouted},
    }


def test_a_cancel_lets_the_next_of_the_key_go(key: Key) -> None:
    (one, first), (_, second) = key.born(), key.born()
    key.queues.ensure([ensure_delivery(first)])
    key.act(one, "cancel")
    assert key.where(first, second) == ["nowhere", "waiting"]


def test_a_replay_queues_what_is_the_first_of_its_key_then(key: Key) -> None:
    """The dead letter of an earlier event goes before what waits; that of a later one waits for its turn."""
    (one, early), (_, waiting) = key.dead(), key.born()
    key.act(one, "replay")
    assert key.where(early, waiting) == ["waiting", "nowhere"]
    key.act(one, "cancel")
    assert key.where(early, waiting) == ["nowhere", "waiting"]


def test_the_replay_of_a_later_one_waits_for_its_turn(key: Key) -> None:
    one, early = key.dead()
    two, late = key.dead()
    key.act(one, "replay")
    key.act(two, "replay")
    assert key.where(early, late) == ["waiting", "nowhere"]
    assert key.waits(two)["behind"]["event_id"] == one


def test_all_of_an_endpoint_can_be_cancelled(key: Key) -> None:
    """None of a key is let go by the end of those before it."""
    (_, first), (_, second) = key.born(), key.born()
    key.queues.ensure([ensure_delivery(first)])
    answer = key.api.request("POST", f"/v1/endpoints/{key.endpoint}/cancel", b'{"reason": "a test"}', in_json(ADMIN))
    assert (answer.status, answer.json["cancelled"], answer.json["complete"]) == (200, 2, True)
    assert key.where(first, second) == ["nowhere", "nowhere"]
