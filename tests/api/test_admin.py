"""Sources, endpoints and routes over HTTP: made, shown, changed, removed; by two people at once, and while work is left."""

import json
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from madeira.broker.queues import DELIVER, Queues, ensure_delivery
from madeira.records import DeliveryRef, PlannedDelivery
from madeira.store import routing
from tests.api.people import ADMIN, audited, in_json
from tests.api.serving import Api, Reply, event, signed
from tests.system.harness import wait_until

#: Secrets that must never come back.
SECRET = "a-signing-secret-of-this-test"
HEADER = "Bearer a-credential-of-this-test"


def ask(api: Api, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    raw = None if body is None else json.dumps(body).encode()
    return api.request(method, path, raw, in_json(ADMIN) | {name.replace("_", "-"): value for name, value in headers.items()})


def fresh() -> str:
    return f"o-{uuid.uuid4().hex}"


def rows(api: Api, what: str) -> list[tuple[str, str, str | None, dict[str, Any]]]:
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        return c.execute("SELECT who, action, why, detail FROM audit WHERE what = %s ORDER BY id", (what,)).fetchall()


def made(api: Api, **fields: Any) -> tuple[str, Reply]:
    """A new endpoint."""
    name = fresh()
    reply = ask(api, "POST", "/v1/endpoints", {"name": name, "url": "http://sink.example/"} | fields)
    assert reply.status == 201, reply.body
    return name, reply


def delivery(api: Api, endpoint: str) -> DeliveryRef:
    """An event that was accepted and has a delivery to `endpoint`, which waits in the queue."""
    name = uuid.uuid4().hex
    assert api.post(event(name)).status == 202
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        seq = c.execute("SELECT seq FROM event WHERE event_id = %s", (name,)).fetchone()[0]
        [ref] = routing.route(c, [(seq, [PlannedDelivery(endpoint, endpoint, ("r",))])])[0].refs
    queues_of(api).ensure([ensure_delivery(ref)])
    return ref


def queues_of(api: Api) -> Queues:
    return Queues(redis_url=api.env["MADEIRA_REDIS_URL"], namespace=api.env["MADEIRA_NAMESPACE"])


@pytest.mark.parametrize(
    ("kind", "document", "patch"),
    [
        ("source", {"secrets": ["a-secret"], "rate": 10}, {"rate": 20.5}),
        ("endpoint", {"url": "http://sink.example/{event_type}", "retry": {"max": 90, "initial": 9}}, {"retry": {"max": 80}}),
        ("route", {"endpoint": "sink", "event_type": "order.*"}, {"routing_key": "k"}),
    ],
)
def test_an_object_is_made_shown_changed_and_removed(
    shared_api: Api, kind: str, document: Mapping[str, Any], patch: Mapping[str, Any]
) -> None:
    """With its address and its version; each change leaves one row in the audit, with before and after, and a read none."""
    name, path = fresh(), f"/v1/{kind}s"
    new = ask(shared_api, "POST", f"{path}?reason=asked%20for", {"name": name, **document})
    assert new.status == 201, new.body
    assert (new.headers["location"], new.headers["etag"], new.json["version"]) == (f"{path}/{name}", '"1"', 1)
    shown = ask(shared_api, "GET", new.headers["location"])
    assert shown.status == 200
    assert new.json.items() <= shown.json.items()
    assert name in [one["name"] for one in ask(shared_api, "GET", path).json[f"{kind}s"]]
    changed = ask(shared_api, "PATCH", f"{path}/{name}?reason=too%20slow", patch, If_Match=new.headers["etag"])
    assert (changed.status, changed.headers["etag"], changed.json["version"]) == (200, '"2"', 2)
    for field, value in patch.items():
        assert changed.json[field] == (document.get(field, {}) | value if isinstance(value, dict) else value)
    gone = ask(shared_api, "DELETE", f"{path}/{name}?reason=no%20more", If_Match='"2"')
    assert (gone.status, gone.json) == (200, {"name": name, "removed": True, "cancelled": 0, "requested": 0})
    assert ask(shared_api, "GET", f"{path}/{name}").status == 404
    history = rows(shared_api, f"{kind} {name}")
    assert [(who, action, why) for who, action, why, _ in history] == [
        ("admin", "create", "asked for"),
        ("admin", "update", "too slow"),
        ("admin", "delete", "no more"),
    ]
    for (field, value), detail in zip(patch.items(), [history[1][3]], strict=True):
        assert field in json.dumps(detail["before"]) or field not in document
        assert detail["after"][field] == changed.json[field], value
    assert history[2][3]["before"] == history[1][3]["after"]


def test_what_is_made_counts_soon_in_every_process(shared_api: Api) -> None:
    """A new source posts, and posts no more when it is removed."""
    name = fresh()
    assert ask(shared_api, "POST", "/v1/sources", {"name": name, "secrets": ["first-secret"]}).status == 201
    post = lambda: shared_api.post(event(uuid.uuid4().hex), source=name, secret="first-secret").status  # noqa: E731
    wait_until(lambda: [post() for _ in range(8)] == [202] * 8, what="the source to be known everywhere")
    assert ask(shared_api, "DELETE", f"/v1/sources/{name}").status == 200
    wait_until(lambda: [post() for _ in range(8)] == [401] * 8, what="the source to be forgotten everywhere")


def test_of_many_changes_to_one_version_one_is_made(shared_api: Api) -> None:
    """The others are told 412 and change nothing, whichever way they named the version; and leave no row."""
    name, _ = made(shared_api)

    def change(n: int) -> int:
        if n % 2:
            return ask(shared_api, "PATCH", f"/v1/endpoints/{name}", {"concurrency": 20 + n}, If_Match='"1"').status
        return ask(shared_api, "PATCH", f"/v1/endpoints/{name}", {"concurrency": 20 + n, "version": 1}).status

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(change, range(16)))
    assert sorted(statuses) == [200] + [412] * 15
    assert ask(shared_api, "GET", f"/v1/endpoints/{name}").json["concurrency"] == 20 + statuses.index(200)
    assert [action for _, action, _, _ in rows(shared_api, f"endpoint {name}")] == ["create", "update"]
    assert ask(shared_api, "DELETE", f"/v1/endpoints/{name}", If_Match='"1"').status == 412
    assert ask(shared_api, "PATCH", f"/v1/endpoints/{name}", {"rate": 1, "version": 2}, If_Match='"1"').status == 422
    assert ask(shared_api, "DELETE", f"/v1/endpoints/{name}", If_Match="*").status == 200


def test_without_a_version_a_change_is_made_to_what_is_there(shared_api: Api) -> None:
    """And one that changes nothing leaves neither a version nor a row behind."""
    name, _ = made(shared_api)
    for concurrency in (3, 4):
        assert ask(shared_api, "PATCH", f"/v1/endpoints/{name}", {"concurrency": concurrency}).status == 200
    again = ask(shared_api, "PATCH", f"/v1/endpoints/{name}", {"concurrency": 4})
    assert (again.status, again.json["version"]) == (200, 3)
    assert len(rows(shared_api, f"endpoint {name}")) == 3


def test_null_in_a_patch_removes_a_field(shared_api: Api) -> None:
    """By RFC 7396, under its own media type too; a required field cannot go."""
    name, _ = made(shared_api, rate=5, headers={"X-A": "a", "X-B": "b"})
    body = b'{"rate": null, "headers": {"X-A": null}}'
    headers = ADMIN | {"Content-Type": "application/merge-patch+json"}
    reply = shared_api.request("PATCH", f"/v1/endpoints/{name}", body, headers)
    assert reply.status == 200
    assert "rate" not in reply.json
    assert reply.json["headers"] == {"X-B": "hidden"}
    missing = ask(shared_api, "PATCH", f"/v1/endpoints/{name}", {"url": None})
    assert [e["field"] for e in missing.json["errors"]] == ["url"]
    assert shared_api.request("POST", "/v1/endpoints", b"{}", headers).status == 415


def test_secrets_are_kept_and_never_shown(shared_api: Api) -> None:
    """Neither in an answer nor in the audit nor in the log; sent back as hidden they stay, and the others can change."""
    name, new = made(shared_api, secrets=[SECRET, "env:HOME"], headers={"Authorization": HEADER, "X-Env": "env:HOME"})
    assert new.json["secrets"] == ["hidden:1", "env:HOME"]
    assert new.json["headers"] == {"Authorization": "hidden", "X-Env": "env:HOME"}
    reply = ask(
        shared_api, "PATCH", f"/v1/endpoints/{name}", {"secrets": ["another-secret", "hidden:1"], "headers": {"X-New": "n"}}
    )
    assert reply.json["secrets"] == ["hidden:1", "hidden:2"]
    bad = ask(shared_api, "PATCH", f"/v1/endpoints/{name}", {"secrets": [SECRET, 5, "hidden:7"]})
    assert {e["field"] for e in bad.json["errors"]} == {"secrets[1]", "secrets[2]"}
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        stored = str(c.execute("SELECT * FROM endpoint").fetchall()) + str(c.execute("SELECT * FROM audit").fetchall())
    places = (new.body, reply.body, bad.body, ask(shared_api, "GET", "/v1/endpoints").body, stored.encode())
    for place in (*places, shared_api.log.read_bytes()):
        for secret in (SECRET, HEADER.split()[1], "another-secret"):
            assert secret.encode() not in place


def test_everything_that_is_wrong_is_told_at_once(shared_api: Api) -> None:
    """With its field; nothing is made."""
    before = audited(shared_api)
    document = {"name": "x", "url": "ftp://x/", "timeout": -1, "retry": {"max": "long", "speed": 1}, "colour": "red"}
    reply = ask(shared_api, "POST", "/v1/endpoints", document)
    assert (reply.status, reply.json["type"]) == (422, "urn:madeira:problem:invalid")
    assert {e["field"] for e in reply.json["errors"]} == {"url", "timeout", "retry.max", "retry.speed", "colour"}
    assert ask(shared_api, "GET", "/v1/endpoints/x").status == 404
    assert audited(shared_api) == before


@pytest.mark.parametrize("name", [{}, {"name": 5}, {"name": "a b"}])
def test_a_bad_name_hides_nothing_else(shared_api: Api, name: dict[str, Any]) -> None:
    """Missing, no text, or impossible: what else is wrong is told with it."""
    reply = ask(shared_api, "POST", "/v1/endpoints", name | {"url": "ftp://x/", "secrets": ["sealed:nonsense"], "colour": 1})
    assert reply.status == 422
    assert sorted(e["field"] for e in reply.json["errors"]) == ["colour", "name", "secrets[0]", "url"]
    reply = ask(shared_api, "POST", "/v1/routes", name | {"endpoint": "nobody", "event_type": 5})
    assert sorted(e["field"] for e in reply.json["errors"]) == ["endpoint", "event_type", "name"]


def test_each_mistake_of_a_change_is_told_once(shared_api: Api) -> None:
    """Its name, its version, a secret that is not there, and its other fields."""
    name, _ = made(shared_api, secrets=[SECRET])
    patch = {"name": "other", "version": 1.5, "secrets": ["hidden:5", "sealed:nonsense"], "rate": -1}
    reply = ask(shared_api, "PATCH", f"/v1/endpoints/{name}", patch)
    assert reply.status == 422
    assert sorted(e["field"] for e in reply.json["errors"]) == ["name", "rate", "secrets[0]", "secrets[1]", "version"]
    assert ask(shared_api, "GET", f"/v1/endpoints/{name}").json["version"] == 1


@pytest.mark.parametrize("given", ["foo", "", '"', "W/", '"1", "2"', '"1.5"'])
@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
def test_an_if_match_that_holds_no_version_is_a_mistake_and_not_stale(shared_api: Api, method: str, given: str) -> None:
    """Reading the object again would not help: the answer names the header."""
    name, _ = made(shared_api)
    reply = ask(shared_api, method, f"/v1/endpoints/{name}", {"rate": 1} if method == "PATCH" else None, If_Match=given)
    assert (reply.status, reply.json["type"]) == (400, "urn:madeira:problem:bad-request")
    assert "If-Match" in reply.json["detail"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "problem"),
    [
        ("POST", "/v1/endpoints", {"name": "sink", "url": "http://sink.example/"}, 409, "already-there"),
        ("POST", "/v1/endpoints", {"url": "http://sink.example/"}, 422, "invalid"),
        ("POST", "/v1/endpoints", {"name": ["x"], "url": "http://sink.example/"}, 422, "invalid"),
        ("POST", "/v1/endpoints", {"name": "callback", "url": "http://sink.example/"}, 422, "invalid"),
        ("POST", "/v1/endpoints", [], 422, "invalid"),
        ("POST", "/v1/routes", {"name": "r", "endpoint": "nobody"}, 422, "invalid"),
        ("PATCH", "/v1/endpoints/nobody", {"rate": 1}, 404, "unknown-endpoint"),
        ("PATCH", "/v1/sources/%00", {"rate": 1}, 404, "unknown-source"),
        ("PATCH", "/v1/endpoints/sink", {"name": "other"}, 422, "invalid"),
        ("PATCH", "/v1/endpoints/sink", {"version": True, "rate": 1}, 422, "invalid"),
        ("PATCH", "/v1/endpoints/sink", {"version": 1.5, "rate": 1}, 422, "invalid"),
        ("PATCH", "/v1/endpoints/sink?whatever=1", {"rate": 1}, 422, "invalid"),
        ("GET", "/v1/routes/nobody", None, 404, "unknown-route"),
        ("DELETE", "/v1/routes/nobody", None, 404, "unknown-route"),
        ("DELETE", "/v1/routes/all?unfinished=cancel", None, 422, "invalid"),
        ("DELETE", "/v1/endpoints/sink?unfinished=forget", None, 422, "invalid"),
        ("DELETE", "/v1/endpoints/sink?unfinished=cancel", None, 422, "invalid"),
        ("DELETE", "/v1/endpoints/sink?unfinished=cancel&reason=%20", None, 422, "invalid"),
        ("DELETE", "/v1/endpoints/sink", None, 409, "in-use"),
        ("DELETE", "/v1/endpoints/callback", None, 422, "invalid"),
    ],
)
def test_what_cannot_be_done_is_told_and_leaves_no_trace(
    shared_api: Api, method: str, path: str, body: Any, status: int, problem: str
) -> None:
    """A name that is taken, not there, or not one; a version that is none; a decision without its reason."""
    before = audited(shared_api)
    reply = ask(shared_api, method, path, body)
    assert (reply.status, reply.json["type"]) == (status, f"urn:madeira:problem:{problem}"), reply.body
    assert audited(shared_api) == before


def test_an_endpoint_with_work_left_goes_only_with_a_decision(shared_api: Api) -> None:
    """Refused with the number and the remedy; then its deliveries are cancelled, and out of the queues."""
    name, _ = made(shared_api)
    refs = [delivery(shared_api, name) for _ in range(3)]
    other, _ = made(shared_api)
    kept = delivery(shared_api, other)
    assert ask(shared_api, "GET", f"/v1/endpoints/{name}").json["unfinished"] == 3
    refused = ask(shared_api, "DELETE", f"/v1/endpoints/{name}")
    assert (refused.status, refused.json["type"]) == (409, "urn:madeira:problem:in-use")
    assert "3" in refused.json["detail"]
    assert "unfinished=cancel&reason=" in refused.json["detail"]
    gone = ask(shared_api, "DELETE", f"/v1/endpoints/{name}?unfinished=cancel&reason=bankrupt")
    assert (gone.status, gone.json["cancelled"]) == (200, 3)
    queues = queues_of(shared_api)
    keys = [f"{ref.delivery_id}:{ref.seq}:{ref.lane}" for ref in (*refs, kept)]
    assert [place.kind for place in queues.where(DELIVER, keys)] == ["nowhere"] * 3 + ["waiting"]
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        ends = c.execute("SELECT status, last_error FROM delivery WHERE endpoint = %s", (name,)).fetchall()
    assert {status for status, _ in ends} == {"cancelled"}
    assert all("bankrupt" in reason for _, reason in ends)
    assert ask(shared_api, "GET", f"/v1/endpoints/{other}").json["unfinished"] == 1
    assert [(action, why) for _, action, why, _ in rows(shared_api, f"endpoint {name}")] == [
        ("create", None),
        ("delete", "bankrupt"),
    ]
    assert ask(shared_api, "POST", f"/v1/endpoints/{other}/cancel", {"reason": "tidied up"}).status == 200


def test_a_source_cannot_look_at_the_configuration(shared_api: Api) -> None:
    """Its signature is for its events."""
    for kind in ("sources", "endpoints", "routes"):
        assert shared_api.request("GET", f"/v1/{kind}", None, signed(b"")).status == 401
