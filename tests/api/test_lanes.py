"""Endpoints held and let go over HTTP: who may, what is needed, what is told, what is on record."""

import json
import uuid
from typing import Any

import psycopg
import pytest

from madeira.broker.queues import DELIVER, Ensure, Queues
from tests.api.people import ADMIN, audited, in_json
from tests.api.serving import Api, Reply


def made(api: Api) -> str:
    """The name of a new endpoint."""
    name = f"e-{uuid.uuid4().hex[:12]}"
    body = json.dumps({"name": name, "url": "http://127.0.0.1:9/x"}).encode()
    assert api.request("POST", "/v1/endpoints", body, in_json(ADMIN)).status == 201
    return name


def act(api: Api, name: str, action: str, **body: Any) -> Reply:
    return api.request("POST", f"/v1/endpoints/{name}/{action}", json.dumps(body).encode(), in_json(ADMIN))


def kind(reply: Reply) -> str:
    """The last word of a problem's type."""
    return str(reply.json["type"]).replace("/", ":").rsplit(":", 1)[-1]


def shown(api: Api, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api.request("GET", f"/v1/endpoints/{name}", None, ADMIN).json
    return found


@pytest.mark.parametrize(("action", "back", "state"), [("pause", "resume", "paused"), ("disable", "enable", "disabled")])
def test_an_endpoint_is_held_with_a_reason_and_let_go_without_one(shared_api: Api, action: str, back: str, state: str) -> None:
    name = made(shared_api)
    assert [shown(shared_api, name)[k] for k in ("state", "reason", "since", "by")] == ["active", None, None, None]
    version = shown(shared_api, name)["version"]
    told = act(shared_api, name, action, reason="their migration").json
    assert (told["endpoint"], told["state"], told["reason"]) == (name, state, "their migration")
    document = shown(shared_api, name)
    assert {k: document[k] for k in ("state", "reason", "since", "by")} == {
        k: v for k, v in told.items() if k not in ("endpoint", "already")
    }
    assert document["lane"] == {
        "state": state,
        "reason": "their migration",
        "until_s": None,
        "allowed": None,
        "under_way": 0,
        "waiting": {"fresh": 0, "retry": 0, "replay": 0},
    }
    assert document["version"] == version, "no part of its configuration"
    reply = shared_api.request("POST", f"/v1/endpoints/{name}/{back}", None, ADMIN)
    assert (reply.status, reply.json["state"], reply.json["reason"], reply.json["by"]) == (200, "active", None, "admin")


def test_each_change_is_one_row_of_the_audit_and_what_changes_nothing_is_none(shared_api: Api) -> None:
    name = made(shared_api)
    before = audited(shared_api)
    act(shared_api, name, "pause", reason="one")
    act(shared_api, name, "pause", reason="one")
    act(shared_api, name, "pause", reason="two")
    act(shared_api, name, "resume")
    act(shared_api, name, "resume")
    act(shared_api, name, "enable")
    assert audited(shared_api) == before + 3
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        rows = c.execute(
            "SELECT action, why, detail FROM audit WHERE what = %s AND action <> 'create' ORDER BY id", (f"endpoint {name}",)
        ).fetchall()
    active, one, two = ({"state": s, "reason": r} for s, r in (("active", None), ("paused", "one"), ("paused", "two")))
    assert rows == [
        ("pause", "one", {"before": active, "after": one}),
        ("pause", "two", {"before": one, "after": two}),
        ("resume", None, {"before": two, "after": active}),
    ]


@pytest.mark.parametrize(("action", "back"), [("pause", "resume"), ("disable", "enable")])
def test_what_was_so_before_is_told_as_such_with_its_age(shared_api: Api, action: str, back: str) -> None:
    name = made(shared_api)
    assert act(shared_api, name, back).json["already"], "nobody has held it yet"
    first = act(shared_api, name, action, reason="one").json
    same = act(shared_api, name, action, reason="one").json
    other = act(shared_api, name, action, reason="two").json
    assert [told["already"] for told in (first, same, other)] == [False, True, True]
    assert [told["since"] for told in (same, other)] == [first["since"]] * 2, "another reason does not make it younger"
    assert [told["reason"] for told in (same, other)] == ["one", "two"]
    assert [act(shared_api, name, back).json["already"] for _ in range(2)] == [False, True]


def test_what_the_state_does_not_allow_is_refused_with_the_remedy(shared_api: Api) -> None:
    name = made(shared_api)
    act(shared_api, name, "disable", reason="gone")
    for action in ("pause", "resume"):
        reply = act(shared_api, name, action, reason="x")
        assert (reply.status, kind(reply)) == (409, "disabled")
        assert "enable it first" in reply.json["detail"]
    act(shared_api, name, "enable")
    act(shared_api, name, "pause", reason="x")
    reply = act(shared_api, name, "enable")
    assert (reply.status, kind(reply)) == (409, "paused")
    assert act(shared_api, name, "disable", reason="gone after all").status == 200, "a paused one may be disabled"


@pytest.mark.parametrize("action", ["pause", "disable"])
@pytest.mark.parametrize("body", [{}, {"reason": ""}, {"reason": 7}, {"reason": " x"}, {"reason": "x\n"}, {"reason": "x" * 501}])
def test_nothing_is_held_without_a_reason_that_can_be_shown(shared_api: Api, action: str, body: dict[str, Any]) -> None:
    name = made(shared_api)
    before = audited(shared_api)
    reply = act(shared_api, name, action, **body)
    assert reply.status == 422
    assert [e["field"] for e in reply.json["errors"]] == ["reason"]
    assert (shown(shared_api, name)["state"], audited(shared_api)) == ("active", before)


@pytest.mark.parametrize("action", ["pause", "resume", "disable", "enable"])
def test_an_endpoint_that_is_not_there_or_built_in_cannot_be_held(shared_api: Api, action: str) -> None:
    assert (act(shared_api, "nobody", action, reason="x").status) == 404
    reply = act(shared_api, "callback", action, reason="x")
    assert (reply.status, kind(reply)) == (409, "built-in")


def test_an_endpoint_shows_what_waits_in_its_lane_by_line(shared_api: Api) -> None:
    name = made(shared_api)
    env = shared_api.env
    queues = Queues(redis_url=env["MADEIRA_REDIS_URL"], namespace=env.get("MADEIRA_NAMESPACE", "madeira"))
    lines = ["fresh", "fresh", "retry", "replay"]
    queues.ensure([Ensure(DELIVER, f"{10**9 + n}:{10**9 + n}:{name}", 0.0, line) for n, line in enumerate(lines)])
    try:
        assert shown(shared_api, name)["lane"]["waiting"] == {"fresh": 2, "retry": 1, "replay": 1}
    finally:
        queues.forget(DELIVER, [f"{10**9 + n}:{10**9 + n}:{name}" for n in range(len(lines))])
        queues.close()
