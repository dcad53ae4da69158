"""Replay, reroute, cancel and erase over HTTP: who may, what must be said, what the queues hear, what is on record."""

import json
import uuid
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from madeira.broker.queues import DELIVER, ROUTE, Queues, delivery_key, ensure_delivery
from madeira.records import Attempt, Claimed, Decision, DeliveryRef, PlannedDelivery
from madeira.states import DeliveryStatus, FailureClass, Outcome
from madeira.store import claims, deliveries, routing
from tests.api.people import in_json
from tests.api.serving import ADMIN_TOKEN, Api, Reply, event, signed

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
GIVE_UP = Decision(DeliveryStatus.DEAD, counts=True, failure_class=FailureClass.RECEIVER, last_error="400")


def act(api: Api, path: str, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    return api.request("POST", path, json.dumps(fields).encode(), in_json(ADMIN if headers is None else headers))


def on(api: Api, name: str, action: str, **fields: Any) -> Reply:
    return act(api, f"/v1/events/{name}/{action}?source=shop", **fields)


def accepted(api: Api) -> tuple[str, int]:
    name = uuid.uuid4().hex
    assert api.post(event(name)).status == 202
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        row = c.execute("SELECT seq FROM event WHERE event_id = %s", (name,)).fetchone()
    assert row is not None
    return name, row[0]


def routed(api: Api, *plan: PlannedDelivery) -> tuple[str, int, list[DeliveryRef]]:
    name, seq = accepted(api)
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        return name, seq, routing.route(c, [(seq, plan)])[0].refs


def dead(api: Api, endpoint: str = "a") -> tuple[str, DeliveryRef]:
    """An event whose only delivery was given up."""
    name, _, [ref] = routed(api, PlannedDelivery(endpoint, endpoint))
    attempt = Attempt(
        Outcome.PERMANENT, datetime.now(UTC), 0.1, "http://host/", 400, error_code="http_400", excerpt=b"secret answer"
    )
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        [held] = claims.claim(c, [claims.ClaimRequest(ref.delivery_id, str(uuid.uuid4()), 60)])
        assert isinstance(held, Claimed)
        deliveries.settle(
            c, [deliveries.SettleRequest(ref.delivery_id, ref.seq, held.token, held.attempt, attempt, GIVE_UP, "t")]
        )
    return name, ref


def audited(api: Api, what: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        return c.execute("SELECT who, action, why FROM audit WHERE what = %s ORDER BY id", (what,)).fetchall()


def test_a_replay_is_answered_queued_and_on_record(shared_api: Api, queues: Queues) -> None:
    """The dead delivery waits in its lane again; a second click is told that it is on its way."""
    name, ref = dead(shared_api)
    reply = on(shared_api, name, "replay", reason="the receiver is mended")
    assert reply.status == 200
    told = {"event_id": name, "source": "shop", "status": "delivering", "replayed": 1, "endpoints": ["a"], "missing": ["a"]}
    assert reply.json == told
    assert queues.where(DELIVER, [delivery_key(ref)])[0].kind == "waiting"
    again = on(shared_api, name, "replay", reason="once more")
    assert (again.status, again.json["type"]) == (409, "urn:madeira:problem:unfinished")
    assert audited(shared_api, f"event shop/{name}") == [("admin", "replay", "the receiver is mended")]


def test_a_replay_that_meets_a_worker_in_its_last_step_is_not_lost(shared_api: Api, queues: Queues) -> None:
    """A key that a worker still holds when its delivery is replayed is waiting when the worker lets go of it."""
    from madeira.broker.queues import Finish
    from madeira.lanes import LaneSettings

    # A lane of its own: no other test's is handed out from, since theirs have no settings.
    lane = f"lane{uuid.uuid4().hex[:8]}"
    name, ref = dead(shared_api, lane)
    key = delivery_key(ref)
    nonce = uuid.uuid4().hex
    if queues.rebuild_begin(nonce):
        assert queues.rebuild_commit(nonce)
    queues.ensure([ensure_delivery(ref)])
    queues.set_lanes([LaneSettings(lane=lane, version=1, rate=None, burst=1, concurrency=10, lease_s=60.0)])
    turn: dict[str, Any] = {
        "room": 1,
        "nonce": uuid.uuid4().hex,
        "version": 1,
        "threads": 4,
        "in_hand": 0,
        "by_lane": {},
        "lease_s": 60.0,
        "finishes": [],
        "follow": [],
    }
    [grant] = queues.turn(DELIVER, "p", **turn).grants
    assert grant.key == key
    assert on(shared_api, name, "replay", reason="why").status == 200
    assert queues.where(DELIVER, [key])[0].kind == "held"
    done = queues.turn(DELIVER, "p", **(turn | {"room": 0, "nonce": "n2", "finishes": [Finish(key, grant.token, "f")]}))
    assert done.grants == ()
    assert queues.where(DELIVER, [key])[0].kind == "waiting"
    queues.forget(DELIVER, [key])


def test_a_reroute_is_answered_queued_and_on_record(shared_api: Api, queues: Queues) -> None:
    """An event that found no route, and one whose delivery was born dead, wait for their routing again."""
    name, seq, _ = routed(shared_api)
    assert shared_api.get(f"/v1/events/{name}?source=shop", admin=True).json["reason"] == "unrouted"
    reply = on(shared_api, name, "reroute", reason="the route is there now")
    assert (reply.status, reply.json) == (200, {"event_id": name, "source": "shop", "status": "pending", "removed": []})
    assert queues.where(ROUTE, [str(seq)])[0].kind == "waiting"
    assert audited(shared_api, f"event shop/{name}") == [("admin", "reroute", "the route is there now")]
    born_dead = PlannedDelivery("a", "a", failure_class=FailureClass.TEMPLATE, last_error="no such field")
    other, _, _ = routed(shared_api, born_dead)
    refused = on(shared_api, other, "replay", reason="why")
    assert (refused.status, refused.json["type"]) == (409, "urn:madeira:problem:not-routed")
    assert "reroute" in refused.json["detail"]
    assert on(shared_api, other, "reroute", reason="mended").json["removed"] == ["a"]


def test_an_erased_event_is_shown_as_such_and_can_be_sent_no_more(shared_api: Api) -> None:
    """The payload is null, the answer of the receiver gone; replay and a second erasure are refused; a repeat is a duplicate."""
    name, _ = dead(shared_api)
    reply = on(shared_api, name, "erase", reason="asked for by the customer")
    assert (reply.status, reply.json["status"]) == (200, "dead")
    shown = shared_api.get(f"/v1/events/{name}?source=shop", admin=True)
    assert (shown.json["payload"], shown.json["erased_at"]) == (None, reply.json["erased_at"])
    assert b"secret answer" not in shown.body
    for action in ("replay", "reroute", "erase"):
        refused = on(shared_api, name, action, reason="why")
        assert (refused.status, refused.json["type"]) == (409, "urn:madeira:problem:erased")
    assert shared_api.post(event(name)).json["duplicate"] is True
    fresh, _ = accepted(shared_api)
    early = on(shared_api, fresh, "erase", reason="why")
    assert (early.status, early.json["type"]) == (409, "urn:madeira:problem:unfinished")
    assert "cancel it first" in early.json["detail"]


def test_a_delivery_to_one_endpoint_is_cancelled_by_its_source(shared_api: Api, queues: Queues) -> None:
    """The other endpoint's goes on; the cancelled one is off the queue."""
    name, _, refs = routed(shared_api, PlannedDelivery("a", "a"), PlannedDelivery("b", "b"))
    queues.ensure([ensure_delivery(ref) for ref in refs])
    body = b'{"endpoint": "b", "reason": "not there"}'
    reply = shared_api.request("POST", f"/v1/events/{name}/cancel", body, signed(body))
    assert (reply.status, reply.json["status"], reply.json["cancelled"]) == (200, "delivering", 1)
    assert [queues.where(DELIVER, [delivery_key(ref)])[0].kind for ref in refs] == ["waiting", "nowhere"]
    again = shared_api.request("POST", f"/v1/events/{name}/cancel", body, signed(body))
    assert (again.status, again.json["type"]) == (409, "urn:madeira:problem:already-finished")
    missing = on(shared_api, name, "cancel", endpoint="c")
    assert (missing.status, missing.json["type"]) == (404, "urn:madeira:problem:unknown-delivery")


def test_all_that_waits_for_an_endpoint_is_cancelled(shared_api: Api, queues: Queues) -> None:
    """Each is off the queue; one audit row has the number; an endpoint that nobody knows is told as such."""
    endpoint = f"e{uuid.uuid4().hex[:8]}"
    refs = [routed(shared_api, PlannedDelivery(endpoint, endpoint))[2][0] for _ in range(3)]
    queues.ensure([ensure_delivery(ref) for ref in refs])
    reply = act(shared_api, f"/v1/endpoints/{endpoint}/cancel", reason="it is gone")
    assert (reply.status, reply.json) == (200, {"endpoint": endpoint, "cancelled": 3, "requested": 0, "complete": True})
    assert {queues.where(DELIVER, [delivery_key(ref)])[0].kind for ref in refs} == {"nowhere"}
    assert audited(shared_api, f"endpoint {endpoint}") == [("admin", "cancel", "it is gone")]
    unknown = act(shared_api, "/v1/endpoints/never-heard-of/cancel", reason="why")
    assert (unknown.status, unknown.json["type"]) == (404, "urn:madeira:problem:unknown-endpoint")


ACTIONS = ("replay", "reroute", "erase")


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{}", 422),
        (b'{"reason": ""}', 422),
        (b'{"reason": "  "}', 422),
        (b'{"reason": 5}', 422),
        (b'{"reason": "a\\nb"}', 422),
        (b'{"reason": "' + b"x" * 501 + b'"}', 422),
        (b'{"reason": "x", "color": "red"}', 422),
        (b"[]", 422),
        (b"{", 400),
    ],
    ids=str,
)
def test_an_action_needs_a_reason_and_takes_no_other_fields(shared_api: Api, action: str, body: bytes, status: int) -> None:
    """And nothing is done or on record without."""
    name, _ = dead(shared_api)
    reply = shared_api.request("POST", f"/v1/events/{name}/{action}?source=shop", body, in_json(ADMIN))
    assert reply.status == status
    assert audited(shared_api, f"event shop/{name}") == []


@pytest.mark.parametrize("fields", [{"endpoint": ""}, {"endpoint": 1}, {"force": 1}, {"force": "yes"}], ids=str)
def test_a_replay_checks_its_fields(shared_api: Api, fields: dict[str, Any]) -> None:
    name, _ = dead(shared_api)
    reply = on(shared_api, name, "replay", reason="why", **fields)
    assert (reply.status, reply.json["errors"][0]["field"]) == (422, next(iter(fields)))


@pytest.mark.parametrize("path", [*(f"/v1/events/x/{action}?source=shop" for action in ACTIONS), "/v1/endpoints/sink/cancel"])
def test_only_a_token_replays_reroutes_erases_or_cancels_all(shared_api: Api, path: str) -> None:
    """A source, a stranger and a wrong token get 401; the one with the token gets further."""
    body = b'{"reason": "why"}'
    for headers in ({}, signed(body), {"Authorization": "Bearer wrong"}):
        assert shared_api.request("POST", path, body, headers).status == 401
    assert shared_api.request("POST", path, body, in_json(ADMIN)).status in (200, 404)


def test_an_unknown_event_is_told_and_its_source_must_be_named(shared_api: Api) -> None:
    for action in ACTIONS:
        assert on(shared_api, "unknown", action, reason="why").status == 404
        assert act(shared_api, f"/v1/events/unknown/{action}", reason="why").status == 422
