"""Every change that a person makes is on record: one row for each call, found by walking the API's description."""

import json
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import psycopg
import pytest

from madeira.api import openapi
from madeira.records import PlannedDelivery
from madeira.states import FailureClass, Role
from madeira.store import routing
from tests.api.people import ADMIN, bearer, in_json, token
from tests.api.serving import Api, Reply, event, signed

#: Calls that change nothing on behalf of a person: a source's posts are events, and a dry run does nothing.
NOT_AUDITED = {"postEvent", "postBatch", "dryRun"}

OPERATIONS = {
    described["operationId"]: (method.upper(), path, described)
    for path, item in openapi.document()["paths"].items()
    for method, described in item.items()
}

MUTATING = sorted(name for name, (method, _, _) in OPERATIONS.items() if method != "GET" and name not in NOT_AUDITED)


class Ask(NamedTuple):
    """What makes an operation succeed."""

    names: Mapping[str, str]
    body: Any = None
    query: str = ""
    #: Words for what was done, and to what, in the row.
    action: str = ""
    what: str = ""
    #: Whether the row says what was before, and what after.
    before: bool = False
    after: bool = False


def of_event(api: Api, plan: list[PlannedDelivery] | None, action: str, **body: Any) -> Ask:
    """An action on a new event, routed by `plan` (None: not yet)."""
    name = uuid.uuid4().hex
    assert api.post(event(name)).status == 202
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        if plan is not None:
            seq = c.execute("SELECT seq FROM event WHERE event_id = %s", (name,)).fetchone()[0]
            routing.route(c, [(seq, plan)])
    return Ask({"event_id": name}, {"reason": "because", **body}, "?source=shop", action, f"event shop/{name}")


def new(api: Api, kind: str, **fields: Any) -> str:
    name = f"o-{uuid.uuid4().hex}"
    assert call(api, "POST", f"/v1/{kind}", {"name": name, **fields}).status == 201
    return name


def call(api: Api, method: str, path: str, body: Any, headers: Mapping[str, str] = ADMIN) -> Reply:
    return api.request(method, path, None if body is None else json.dumps(body).encode(), in_json(headers))


DEAD = PlannedDelivery("sink", "sink", (), FailureClass.RECEIVER, "the receiver answered 404")

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "source": {"secrets": ["a-secret"]},
    "endpoint": {"url": "http://sink.example/"},
    "route": {"endpoint": "sink"},
}

PATCHES: Mapping[str, Mapping[str, Any]] = {"source": {"rate": 5}, "endpoint": {"rate": 5}, "route": {"routing_key": "k"}}


def made(kind: str) -> Callable[[Api], Ask]:
    def ask(_api: Api) -> Ask:
        name = f"o-{uuid.uuid4().hex}"
        return Ask({}, {"name": name, **FIELDS[kind]}, "?reason=because", "create", f"{kind} {name}", after=True)

    return ask


def changed(kind: str) -> Callable[[Api], Ask]:
    def ask(api: Api) -> Ask:
        name = new(api, f"{kind}s", **FIELDS[kind])
        return Ask({"name": name}, PATCHES[kind], "?reason=because", "update", f"{kind} {name}", before=True, after=True)

    return ask


def removed(kind: str) -> Callable[[Api], Ask]:
    def ask(api: Api) -> Ask:
        name = new(api, f"{kind}s", **FIELDS[kind])
        return Ask({"name": name}, None, "?reason=because", "delete", f"{kind} {name}", before=True)

    return ask


def of_endpoint(action: str) -> Callable[[Api], Ask]:
    def ask(api: Api) -> Ask:
        name = new(api, "endpoints", url="http://127.0.0.1:9/")
        of_event(api, [PlannedDelivery(name, name, ("r",))], "")
        return Ask({"name": name}, {"reason": "because"}, "", action, f"endpoint {name}")

    return ask


def held(action: str) -> Callable[[Api], Ask]:
    """Holding an endpoint, or letting one go that is held."""
    holds = {"resume": "pause", "enable": "disable"}

    def ask(api: Api) -> Ask:
        name = new(api, "endpoints", url="http://sink.example/")
        if action in holds:
            assert call(api, "POST", f"/v1/endpoints/{name}/{holds[action]}", {"reason": "before"}).status == 200
        return Ask({"name": name}, {"reason": "because"}, "", action, f"endpoint {name}", before=True, after=True)

    return ask


def made_token(_api: Api) -> Ask:
    name = f"t-{uuid.uuid4().hex}"
    return Ask({}, {"name": name, "role": "viewer", "reason": "because"}, "", "create", f"token {name}", after=True)


def revoked_token(api: Api) -> Ask:
    _, name = token(api, Role.VIEWER)
    return Ask({"name": name}, None, "?reason=because", "revoke", f"token {name}", before=True)


def of_job(steer: str) -> Callable[[Api], Ask]:
    def ask(api: Api) -> Ask:
        of_event(api, [DEAD], "")
        job = call(api, "POST", "/v1/jobs", {"action": "replay", "filter": {}, "reason": "because"}).json["id"]
        if steer == "resume":
            assert call(api, "POST", f"/v1/jobs/{job}/pause", {"reason": "because"}).status == 200
        return Ask({"id": str(job)}, {"reason": "because"}, "", steer, f"job {job}", before=True, after=True)

    return ask


def started_job(api: Api) -> Ask:
    of_event(api, None, "")
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        following = c.execute("SELECT coalesce(max(id), 0) + 1 FROM job").fetchone()[0]
    return Ask({}, {"action": "cancel", "filter": {}, "reason": "because"}, "", "cancel", f"job {following}")


#: Operation -> how it succeeds. One that is new in the description and not here fails the tests.
ASKS: Mapping[str, Callable[[Api], Ask]] = {
    **{f"create{kind.capitalize()}": made(kind) for kind in FIELDS},
    **{f"update{kind.capitalize()}": changed(kind) for kind in FIELDS},
    **{f"delete{kind.capitalize()}": removed(kind) for kind in FIELDS},
    "cancelEvent": lambda api: of_event(api, None, "cancel"),
    "replayEvent": lambda api: of_event(api, [DEAD], "replay"),
    "rerouteEvent": lambda api: of_event(api, [], "reroute"),
    "eraseEvent": lambda api: of_event(api, [], "erase"),
    "cancelEndpoint": of_endpoint("cancel"),
    "testEndpoint": of_endpoint("test"),
    "startJob": started_job,
    **{f"{steer}Job": of_job(steer) for steer in ("pause", "resume", "cancel")},
    **{f"{action}Endpoint": held(action) for action in ("pause", "resume", "disable", "enable")},
    "createToken": made_token,
    "revokeToken": revoked_token,
    "setLogLevel": lambda _api: Ask(
        {}, {"level": "warning", "for_s": 1, "reason": "because"}, "", "log-level", "log level", before=True, after=True
    ),
}


def noted(api: Api, after: int) -> list[tuple[Any, ...]]:
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        return c.execute("SELECT at, who, action, what, why, detail FROM audit WHERE id > %s", (after,)).fetchall()


def last(api: Api) -> int:
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        return c.execute("SELECT coalesce(max(id), 0) FROM audit").fetchone()[0]


def test_every_operation_that_changes_something_says_that_it_is_on_record() -> None:
    """The description marks exactly those, and the tests below know how to carry each of them out."""
    marked = sorted(name for name, (_, _, described) in OPERATIONS.items() if described.get("x-madeira-audited"))
    assert marked == MUTATING
    assert sorted(ASKS) == MUTATING


@pytest.mark.parametrize("operation", MUTATING)
def test_a_change_leaves_exactly_one_row(shared_api: Api, operation: str) -> None:
    """Who, when, what, why, and what was before and after; once more with too low a role it leaves none."""
    method, path, described = OPERATIONS[operation]
    who, name = token(shared_api, Role.ADMIN)
    ask = ASKS[operation](shared_api)
    address = path.format(**ask.names) + ask.query
    viewer = bearer(token(shared_api, Role.VIEWER)[0])
    begun = last(shared_api)
    assert call(shared_api, method, address, ask.body, viewer).status == 403
    assert noted(shared_api, begun) == []
    reply = call(shared_api, method, address, ask.body, bearer(who))
    assert reply.status in (200, 201), reply.body
    [(at, by, action, what, why, detail)] = noted(shared_api, begun)
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert (by, action, what) == (f"token {name}", ask.action, ask.what)
    assert why == "because"
    assert ("before" in detail, "after" in detail) == (ask.before, ask.after)
    if ask.before and ask.after:
        assert detail["before"] != detail["after"]
    assert detail
    assert described["x-madeira-audited"]


def test_what_a_source_cancels_is_on_record_as_its_own(shared_api: Api) -> None:
    """With its name, by its signature."""
    ask = of_event(shared_api, None, "cancel")
    begun = last(shared_api)
    body = b'{"reason": "ordered twice"}'
    path = f"/v1/events/{ask.names['event_id']}/cancel"
    assert shared_api.request("POST", path, body, signed(body)).status == 200
    [(_, by, action, what, why, _)] = noted(shared_api, begun)
    assert (by, action, what, why) == ("source shop", "cancel", ask.what, "ordered twice")
    assert shared_api.request("POST", path, body, signed(body)).status == 409
    assert len(noted(shared_api, begun)) == 1
