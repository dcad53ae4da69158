"""Whoever asks for something in the wrong place is told the right one."""

import json
import uuid
from typing import Any

import pytest

from tests.api.people import ADMIN, in_json
from tests.api.serving import Api, Reply


def ask(api: Api, method: str, path: str, body: Any = None) -> Reply:
    return api.request(method, path, None if body is None else json.dumps(body).encode(), in_json(ADMIN))


def made(api: Api) -> str:
    name = f"h-{uuid.uuid4().hex}"
    assert ask(api, "POST", "/v1/endpoints", {"name": name, "url": "http://sink.example/"}).status == 201
    return name


def told(reply: Reply) -> dict[str, str]:
    """What is wrong, by field."""
    assert reply.status == 422, reply.body
    return {error["field"]: error["detail"] for error in reply.json["errors"]}


def test_who_patches_the_state_is_told_the_actions(shared_api: Api) -> None:
    """No field that is spelt a little like it."""
    name = made(shared_api)
    detail = told(ask(shared_api, "PATCH", f"/v1/endpoints/{name}", {"state": "paused"}))["state"]
    assert "/v1/endpoints/{name}/pause" in detail
    assert "did you mean" not in detail


def test_who_sends_back_what_was_shown_is_told_what_is_not_set(shared_api: Api) -> None:
    """All of it at once; without those fields it is taken."""
    path = f"/v1/endpoints/{made(shared_api)}"
    document = ask(shared_api, "GET", path).json
    found = told(ask(shared_api, "PATCH", path, {k: 1 if v is None else v for k, v in document.items()}))
    assert set(found) == {"state", "reason", "since", "by", "lane", "unfinished", "created_at", "updated_at"}
    assert all(detail.startswith("is told, and not set") for detail in found.values())
    left = {k: v for k, v in document.items() if k not in found}
    assert ask(shared_api, "PATCH", path, left | {"timeout": 7}).status == 200


@pytest.mark.parametrize(
    "path", ["/v1/endpoints/{}/pause", "/v1/endpoints/{}/cancel", "/v1/endpoints/{}/test", "/v1/jobs/1/pause"]
)
def test_a_reason_in_the_query_of_what_takes_it_in_the_body_is_sent_there(shared_api: Api, path: str) -> None:
    """Other unknown parameters are told as such."""
    where = path.format(made(shared_api))
    found = told(ask(shared_api, "POST", f"{where}?reason=x&why=y", {}))
    assert found["reason"] == 'belongs into the body: {"reason": ...}'
    assert found["why"] == "is no parameter of this query; known: none"


def test_a_name_that_is_taken_is_told_in_english(shared_api: Api) -> None:
    name = made(shared_api)
    again = ask(shared_api, "POST", "/v1/endpoints", {"name": name, "url": "http://sink.example/"})
    assert again.json["detail"].startswith(f"there is an endpoint '{name}' already")


@pytest.mark.parametrize("ordering", ["[1]", "1.0/0.0", "{'a': 1}", "null"])
def test_an_order_that_gives_no_event_a_key_is_refused(shared_api: Api, ordering: str) -> None:
    """It reads nothing of the event: every delivery would be born dead."""
    body = {"name": "never", "url": "http://sink.example/", "ordering": ordering}
    assert "an expression (CEL) that yields a key" in told(ask(shared_api, "POST", "/v1/endpoints", body))["ordering"]


@pytest.mark.parametrize("ordering", ["'one'", "1 + 1", "payload.account", "[payload.a][0]"])
def test_an_order_that_may_give_a_key_is_taken(shared_api: Api, ordering: str) -> None:
    path = f"/v1/endpoints/{made(shared_api)}"
    assert ask(shared_api, "PATCH", path, {"ordering": ordering}).status == 200
