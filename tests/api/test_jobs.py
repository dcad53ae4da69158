"""Jobs over HTTP: previewed, made once, listed, steered; what is asked wrongly is refused by its name, and workers are woken."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from madeira.broker.queues import Queues
from madeira.broker.waking import JOBS
from madeira.records import PlannedDelivery
from madeira.states import FailureClass, Role
from madeira.store import job_steps, routing
from tests.api.people import ADMIN, audited, in_json, person
from tests.api.serving import Api, Reply
from tests.store import making

ASKED: dict[str, Any] = {"action": "replay", "filter": {}, "reason": "the partner is back"}


@pytest.fixture
def queues(queues: Queues) -> Queues:
    """Without the wake-ups of the tests before."""
    queues.flush(JOBS)
    return queues


def ask(api: Api, path: str = "/v1/jobs", headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    return api.request("POST", path, json.dumps(fields).encode(), in_json(ADMIN if headers is None else headers))


def dead(conn: "psycopg.Connection[Any]", endpoint: str, number: int = 1) -> list[str]:
    """So many events whose delivery to an endpoint is dead; their ids."""
    ids = []
    for _ in range(number):
        [ref] = making.routed(conn, (endpoint,))
        making.settled(conn, making.claimed(conn, ref), making.GIVE_UP)
        ids.append(str(making.event(conn, ref.seq)["event_id"]))
    return ids


def test_a_dry_run_tells_how_many_and_which_and_leaves_no_trace(
    shared_api: Api, conn: "psycopg.Connection[Any]", queues: Queues
) -> None:
    ids = dead(conn, "previewed", 4)
    before, listed = audited(shared_api), len(shared_api.get("/v1/jobs", admin=True).json["jobs"])
    reply = ask(shared_api, **ASKED | {"filter": {"endpoint": "previewed"}, "dry_run": True})
    assert reply.status == 200
    assert (reply.json["dry_run"], reply.json["total"]) == (True, 4)
    assert [found["event_id"] for found in reply.json["sample"]] == ids[:3]
    assert reply.json["missing"] == ["previewed"]
    assert audited(shared_api) == before
    assert len(shared_api.get("/v1/jobs", admin=True).json["jobs"]) == listed
    assert queues.sizes([JOBS])[JOBS].ready == 0


def test_a_job_is_made_shown_and_handed_to_the_workers(shared_api: Api, conn: "psycopg.Connection[Any]", queues: Queues) -> None:
    dead(conn, "made", 2)
    reply = ask(shared_api, **ASKED | {"filter": {"endpoint": "made"}, "rate": 5})
    assert reply.status == 201
    made = reply.json
    assert (made["state"], made["total"], made["left"], made["who"]) == ("running", 2, 2, "admin")
    assert (made["ordered"], made["rate"], made["among"], made["filter"]) == (True, 5.0, "dead", {"endpoint": "made"})
    assert reply.headers["location"] == f"/v1/jobs/{made['id']}"
    assert shared_api.get(reply.headers["location"], admin=True).json == made
    assert queues.sizes([JOBS])[JOBS].ready == 1
    job_steps.step(conn, made["id"])
    assert shared_api.get(f"/v1/jobs/{made['id']}", admin=True).json["begun"] == 1


def test_a_job_about_nothing_is_not_made(shared_api: Api, queues: Queues) -> None:
    before = audited(shared_api)
    for action in ("replay", "cancel", "reroute"):
        told = ask(shared_api, action=action, filter={"endpoint": "nobody"}, reason="why")
        assert (told.status, told.json["type"]) == (409, "urn:madeira:problem:nothing-matches")
        assert "no job was made" in told.json["detail"]
    assert ask(shared_api, **ASKED | {"filter": {"endpoint": "nobody"}, "dry_run": True}).json["total"] == 0
    assert audited(shared_api) == before
    assert queues.sizes([JOBS])[JOBS].ready == 0


def test_a_cancel_is_about_what_has_not_ended_unless_it_says_otherwise(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    dead(conn, "cancelled-of-many")
    making.routed(conn, ("cancelled-of-many",))
    asked = {"action": "cancel", "filter": {"endpoint": "cancelled-of-many"}, "reason": "why"}
    assert ask(shared_api, **asked).json["among"] == "unfinished"
    assert ask(shared_api, **asked, among="dead").json["among"] == "dead"


def test_one_key_makes_one_job_however_often_it_is_sent(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    dead(conn, "clicked")
    asked = ASKED | {"key": "click-7", "filter": {"endpoint": "clicked"}}
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: ask(shared_api, **asked), range(20)))
    assert sorted(reply.status for reply in replies) == [200] * 19 + [201]
    assert len({reply.json["id"] for reply in replies}) == 1
    other = ask(shared_api, **asked | {"reason": "another"})
    assert (other.status, other.json["type"]) == (409, "urn:madeira:problem:already-there")
    assert "click-7" in other.json["detail"]


def test_a_job_is_paused_let_go_and_cancelled(shared_api: Api, conn: "psycopg.Connection[Any]", queues: Queues) -> None:
    dead(conn, "steered")
    job = ask(shared_api, **ASKED | {"filter": {"endpoint": "steered"}}).json["id"]
    path = f"/v1/jobs/{job}"
    paused = ask(shared_api, f"{path}/pause", reason="wait").json
    assert (paused["state"], paused["already"], paused["by"]) == ("paused", False, "admin")
    again = ask(shared_api, f"{path}/pause", reason="wait").json
    assert (again["already"], again["since"], again["by"]) == (True, paused["since"], "admin")
    queues.flush(JOBS)
    assert shared_api.request("POST", f"{path}/resume", None, ADMIN).json["state"] == "running"
    assert queues.sizes([JOBS])[JOBS].ready == 1
    assert ask(shared_api, f"{path}/cancel", reason="enough").json["state"] == "cancelled"
    assert ask(shared_api, f"{path}/cancel", reason="enough").status == 200
    late = ask(shared_api, f"{path}/pause", reason="late")
    assert (late.status, late.json["type"]) == (409, "urn:madeira:problem:already-finished")


def test_jobs_are_listed_page_by_page(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    dead(conn, "listed")
    ids = [ask(shared_api, **ASKED | {"filter": {"endpoint": "listed"}}).json["id"] for _ in range(3)]
    first = shared_api.get("/v1/jobs?limit=2", admin=True).json
    assert [job["id"] for job in first["jobs"]] == ids[:0:-1]
    second = shared_api.get(f"/v1/jobs?limit=2&cursor={first['next_cursor']}", admin=True).json
    assert second["jobs"][0]["id"] == ids[0]
    assert shared_api.get("/v1/jobs?state=failed", admin=True).json == {"jobs": [], "next_cursor": None}
    assert all(job["action"] == "replay" for job in shared_api.get("/v1/jobs?action=replay", admin=True).json["jobs"])


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, ["action", "filter", "reason"]),
        (ASKED | {"action": "send"}, ["action"]),
        (
            ASKED | {"filter": {"endpoints": "a", "error": "http_9", "event_ids": []}},
            ["filter.endpoints", "filter.error", "filter.event_ids"],
        ),
        (ASKED | {"filter": []}, ["filter"]),
        (ASKED | {"reason": " "}, ["reason"]),
        (ASKED | {"reason": "x" * 501}, ["reason"]),
        (ASKED | {"ordered": 1}, ["ordered"]),
        (ASKED | {"rate": 0}, ["rate"]),
        (ASKED | {"rate": True}, ["rate"]),
        (ASKED | {"action": "cancel", "rate": 5}, ["rate"]),
        (ASKED | {"action": "cancel", "ordered": True}, ["ordered"]),
        (ASKED | {"action": "reroute", "ordered": False}, ["ordered"]),
        (ASKED | {"among": "unfinished"}, ["among"]),
        (ASKED | {"key": "two words"}, ["key"]),
        (ASKED | {"dry_run": "yes"}, ["dry_run"]),
        (ASKED | {"dryrun": True}, ["dryrun"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "asked",
)
def test_what_is_wrong_is_named_field_by_field(shared_api: Api, fields: dict[str, Any], wrong: list[str]) -> None:
    reply = ask(shared_api, **fields)
    assert reply.status == 422
    assert sorted(error["field"] for error in reply.json["errors"]) == wrong


def test_a_job_is_stopped_for_a_reason(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    dead(conn, "reasoned")
    job = ask(shared_api, **ASKED | {"filter": {"endpoint": "reasoned"}}).json["id"]
    for steer in ("pause", "cancel"):
        assert ask(shared_api, f"/v1/jobs/{job}/{steer}").json["errors"][0]["field"] == "reason"


@pytest.mark.parametrize("name", ["0", "999999999999", "9" * 30, "x", "%20"])
def test_a_job_that_is_not_there_is_told_as_such(shared_api: Api, name: str) -> None:
    assert shared_api.get(f"/v1/jobs/{name}", admin=True).json["type"] == "urn:madeira:problem:unknown-job"
    assert ask(shared_api, f"/v1/jobs/{name}/pause", reason="why").status == 404


def test_a_viewer_looks_and_does_nothing(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    dead(conn, "viewed")
    viewer = person(shared_api, Role.VIEWER)
    job = ask(shared_api, **ASKED | {"filter": {"endpoint": "viewed"}}).json["id"]
    assert shared_api.request("GET", f"/v1/jobs/{job}", None, viewer).status == 200
    assert ask(shared_api, headers=viewer, **ASKED | {"dry_run": True}).status == 403
    assert ask(shared_api, f"/v1/jobs/{job}/pause", viewer, reason="why").status == 403


def test_an_event_says_which_job_sent_its_delivery_again(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    [name] = dead(conn, "traced")
    job = ask(shared_api, **ASKED | {"filter": {"endpoint": "traced"}}).json["id"]
    job_steps.step(conn, job)
    shown = shared_api.get(f"/v1/events/{name}?source=shop", admin=True).json
    assert shown["deliveries"][0]["job_id"] == job


def test_a_reroute_is_about_what_never_could_be_sent(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    seq = making.accept(conn)
    plan = PlannedDelivery("born", "born", failure_class=FailureClass.TEMPLATE, last_error="template: no")
    routing.route(conn, [(seq, [plan])])
    dead(conn, "born")
    asked = {"filter": {"endpoint": "born"}, "reason": "mended", "dry_run": True}
    assert ask(shared_api, action="reroute", **asked).json["total"] == 1
    assert ask(shared_api, action="replay", **asked).json["total"] == 2
