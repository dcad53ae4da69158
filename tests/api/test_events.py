"""What may be asked about one event, and its cancel: by its source or the administrator, and by nobody else."""

import hashlib
import json
import re
import uuid
from datetime import UTC, datetime

import psycopg

from madeira.broker.queues import DELIVER, ROUTE, Queues, ensure_delivery
from madeira.records import Attempt, Claimed, Decision, DeliveryRef, PlannedDelivery
from madeira.states import DeliveryStatus, Outcome
from madeira.store import claims, deliveries, routing
from tests.api.people import in_json
from tests.api.serving import ADMIN_TOKEN, Api, Reply, event, signed

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


def accepted(api: Api, **fields: object) -> tuple[str, int]:
    """A new event: its id and its place in the order."""
    name = uuid.uuid4().hex
    assert api.post(event(name, **fields)).status == 202
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        return name, c.execute("SELECT seq FROM event WHERE event_id = %s", (name,)).fetchone()[0]


def routed(api: Api, seq: int, *endpoints: str) -> list[DeliveryRef]:
    """Its deliveries, routed as the actor would, in the order of `endpoints`."""
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        plan = [PlannedDelivery(endpoint, endpoint, ("all",)) for endpoint in endpoints]
        refs = routing.route(c, [(seq, plan)])[0].refs
    return sorted(refs, key=lambda ref: endpoints.index(ref.lane))


def claimed(api: Api, ref: DeliveryRef) -> Claimed:
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        claim = claims.claim(c, [claims.ClaimRequest(ref.delivery_id, str(uuid.uuid4()), 60)])[0]
    assert isinstance(claim, Claimed)
    return claim


def settled(api: Api, claim: Claimed, attempt: Attempt, decision: Decision) -> None:
    request = deliveries.SettleRequest(claim.delivery_id, claim.seq, claim.token, claim.attempt, attempt, decision, "tests")
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        deliveries.settle(c, [request])


def shown(api: Api, name: str) -> dict:
    reply = api.get(f"/v1/events/{name}?source=shop", admin=True)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    return reply.json


def cancel(api: Api, name: str, body: bytes = b"", *, source: str = "shop", secret: str | None = None) -> Reply:
    headers = signed(body, source=source, **({"secret": secret} if secret else {}))
    return api.request("POST", f"/v1/events/{name}/cancel", body, headers)


def test_an_event_is_shown_with_its_envelope(shared_api: Api) -> None:
    """The envelope of every event, and where the event itself waits."""
    name, seq = accepted(shared_api, target_uri="http://host/", parameters={"a": 1}, routing_key="k", trace_id="t")
    found = shown(shared_api, name)
    envelope = {
        "event_id": name,
        "event_type": "order.paid",
        "source": "shop",
        "target_uri": "http://host/",
        "payload": {"n": 1},
        "parameters": {"a": 1},
        "routing_key": "k",
        "trace_id": "t",
        "retry_count": 0,
        "status": "pending",
        "seq": seq,
        "deliveries": [],
    }
    assert envelope.items() <= found.items()
    assert found["waits"]["where"] == "waiting"
    for moment in ("created_at", "updated_at"):
        assert found[moment].endswith("Z")
        assert abs((datetime.fromisoformat(found[moment]) - datetime.now(UTC)).total_seconds()) < 60


def test_deliveries_are_shown_with_attempts_and_places(shared_api: Api, queues: Queues) -> None:
    """Each delivery shows its attempts in time order, and an unfinished one where it waits and for how long."""
    name, seq = accepted(shared_api)
    good, failing, waiting, lost = routed(shared_api, seq, "good", "failing", "waiting", "lost")
    body = b"\xff\xfenot text\x00"
    attempt = Attempt(
        outcome=Outcome.SUCCEEDED,
        started_at=datetime.now(UTC),
        duration_s=0.5,
        url="http://host/",
        status_code=200,
        excerpt=body,
        length=len(body),
        sha256=hashlib.sha256(body).digest(),
    )
    settled(shared_api, claimed(shared_api, good), attempt, Decision(DeliveryStatus.SUCCEEDED))
    failure = Attempt(
        outcome=Outcome.RETRYABLE,
        started_at=datetime.now(UTC),
        duration_s=0.1,
        url="http://host/",
        status_code=503,
        error_code="http_503",
        reason="busy",
    )
    settled(shared_api, claimed(shared_api, failing), failure, Decision(DeliveryStatus.PENDING, delay_s=600, counts=True))
    queues.ensure([ensure_delivery(DeliveryRef(failing.delivery_id, seq, failing.lane, 600)), ensure_delivery(waiting)])
    found = {d["endpoint"]: d for d in shown(shared_api, name)["deliveries"]}
    assert found["good"]["status"] == "succeeded"
    assert "waits" not in found["good"]
    told = found["good"]["attempts"][0]
    assert (told["status_code"], told["sha256"]) == (200, hashlib.sha256(body).hexdigest())
    assert "not text" in told["excerpt"]
    assert [a["error_code"] for a in found["failing"]["attempts"]] == ["http_503"]
    assert found["failing"]["waits"]["where"] == "delayed"
    assert 590 < found["failing"]["waits"]["seconds"] <= 600
    assert found["waiting"]["waits"]["where"] == "waiting"
    assert found["lost"]["waits"]["where"] == "nowhere"
    assert found["lost"]["id"] == lost.delivery_id


def test_a_source_sees_its_own_events_only(shared_api: Api) -> None:
    """Signed by its source an event is shown, whatever the query says; another source's is not found."""
    name, _ = accepted(shared_api)
    assert shared_api.get(f"/v1/events/{name}", source="shop").status == 200
    assert shared_api.get(f"/v1/events/{name}?source=shop", source="shop").status == 200
    other = signed(b"", source="other", secret="another-secret-old")
    assert shared_api.request("GET", f"/v1/events/{name}", None, other).status == 404
    assert shared_api.request("GET", f"/v1/events/{name}?source=shop", None, other).status == 404
    assert shared_api.get(f"/v1/events/{name}?source=shop").status == 401


def test_cancelling_before_routing_ends_the_event(shared_api: Api, queues: Queues) -> None:
    """Cancelled by its source before it was routed: it is off the queue, on record, and cannot be cancelled again."""
    name, seq = accepted(shared_api)
    assert queues.where(ROUTE, [str(seq)])[0].kind == "waiting"
    reply = cancel(shared_api, name, b'{"reason": "ordered twice"}')
    assert reply.status == 200
    assert reply.json == {"event_id": name, "source": "shop", "status": "cancelled", "cancelled": 0, "requested": 0}
    assert queues.where(ROUTE, [str(seq)])[0].kind == "nowhere"
    assert shown(shared_api, name)["status"] == "cancelled"
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        row = c.execute("SELECT who, action, what, why FROM audit WHERE what = %s", (f"event shop/{name}",)).fetchone()
    assert row == ("source shop", "cancel", f"event shop/{name}", "ordered twice")
    again = cancel(shared_api, name)
    assert (again.status, again.json["type"]) == (409, "urn:madeira:problem:already-finished")


def test_cancelling_meets_deliveries_in_every_state(shared_api: Api, queues: Queues) -> None:
    """What waits ends and leaves the queue, what is being called is asked to end, what has ended stays."""
    name, seq = accepted(shared_api)
    done, calling, waiting = routed(shared_api, seq, "done", "calling", "waiting")
    attempt = Attempt(outcome=Outcome.SUCCEEDED, started_at=datetime.now(UTC), duration_s=0, url="http://host/", status_code=204)
    settled(shared_api, claimed(shared_api, done), attempt, Decision(DeliveryStatus.SUCCEEDED))
    claimed(shared_api, calling)
    queues.ensure([ensure_delivery(waiting)])
    reply = shared_api.request("POST", f"/v1/events/{name}/cancel?source=shop", b'{"reason":"x"}', in_json(ADMIN))
    assert reply.status == 200
    assert reply.json == {"event_id": name, "source": "shop", "status": "delivering", "cancelled": 1, "requested": 1}
    found = {d["endpoint"]: d for d in shown(shared_api, name)["deliveries"]}
    assert {e: d["status"] for e, d in found.items()} == {"done": "succeeded", "calling": "delivering", "waiting": "cancelled"}
    assert found["calling"]["cancel_requested_at"] is not None
    assert queues.where(DELIVER, [ensure_delivery(waiting).key])[0].kind == "nowhere"
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        assert c.execute("SELECT who FROM audit WHERE what = %s", (f"event shop/{name}",)).fetchall() == [("admin",)]


def test_nobody_cancels_what_is_not_his(shared_api: Api) -> None:
    """A stranger gets 401, another source 404, and the event stays."""
    name, _ = accepted(shared_api)
    assert shared_api.request("POST", f"/v1/events/{name}/cancel", b"").status == 401
    assert cancel(shared_api, name, secret="wrong").status == 401
    assert cancel(shared_api, name, source="other", secret="another-secret-new").status == 404
    assert cancel(shared_api, "unknown").status == 404
    assert shown(shared_api, name)["status"] == "pending"


def test_the_administrator_sees_the_last_reconcile_runs(shared_api: Api) -> None:
    """The latest run comes first, with its counts."""
    from madeira.store import reconcile

    assert shared_api.get("/v1/reconcile").status == 401
    assert shared_api.get("/v1/reconcile", source="shop").status == 401
    assert shared_api.get("/v1/reconcile", admin=True).json == {"runs": []}
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        reconcile.record_run(c, {"unknown": 3}, 0.5, "first")
        c.commit()
        reconcile.record_run(c, {"unknown": 0}, 0.25, "second")
    runs = shared_api.get("/v1/reconcile", admin=True).json["runs"]
    assert [(r["holder"], r["counts"], r["duration_s"]) for r in runs] == [
        ("second", {"unknown": 0}, 0.25),
        ("first", {"unknown": 3}, 0.5),
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", runs[0]["finished_at"])


def test_without_a_token_nobody_is_the_administrator(serve, database_url: str, redis_url: str) -> None:
    """With no token set, an empty one does not pass."""
    api = serve(database_url, redis_url, MADEIRA_ADMIN_TOKEN="").start()
    for token in ("", "None", ADMIN_TOKEN):
        assert api.request("GET", "/v1/reconcile", None, {"Authorization": f"Bearer {token}"}).status == 401


def test_no_secret_is_told(shared_api: Api) -> None:
    """Neither answers nor the log hold a secret, a token, or the password of a server."""
    name, _ = accepted(shared_api)
    texts = [shared_api.get(f"/v1/events/{name}?source=shop", admin=True).body, shared_api.get("/metrics").body]
    shared_api.post(event("x"), {"X-Madeira-Signature": "0" * 64})
    shared_api.request("GET", "/v1/reconcile", None, {"Authorization": "Bearer wrong-token-of-somebody"})
    texts += [shared_api.post(b"{").body, shared_api.log.read_bytes(), json.dumps(shown(shared_api, name)).encode()]
    for secret in ("a-secret-of-the-tests", ADMIN_TOKEN, "wrong-token-of-somebody", "another-secret"):
        assert not any(secret.encode() in text for text in texts)


def test_an_event_may_be_called_batch(api: Api) -> None:
    """The address at which batches are posted shows it, and it can be acted on as any other."""
    assert api.get("/v1/events/batch?source=shop", admin=True).status == 404
    assert api.post(event("batch")).status == 202
    assert shown(api, "batch")["event_id"] == "batch"
    assert api.get("/v1/events/batch", source="shop").json["event_id"] == "batch"
    assert api.get("/v1/events/batch").status == 401
    assert cancel(api, "batch").json["status"] == "cancelled"
    for action in ("replay", "reroute"):
        reply = api.request("POST", f"/v1/events/batch/{action}?source=shop", b'{"reason":"x"}', in_json(ADMIN))
        assert reply.status == 409
