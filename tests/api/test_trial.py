"""Test calls and dry runs over HTTP: one really calls, the other only tells; neither stores an event."""

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from madeira import client
from madeira.delivery.signing import verify
from madeira.headers import is_reserved
from madeira.states import Role
from madeira.trial import CALLS, HEADER
from tests.api.people import ADMIN, audited, in_json, person
from tests.api.serving import Api, Reply, rows
from tests.receiver import Answer, Gate, Receiver, json_answer
from tests.system.harness import wait_until

SECRET = "a-signing-secret-of-this-test"
CREDENTIAL = "a-credential-of-this-test"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def ask(api: Api, path: str, body: Any = None, headers: dict[str, str] = ADMIN) -> Reply:
    return api.request("POST", path, None if body is None else json.dumps(body).encode(), in_json(headers))


def endpoint(api: Api, url: str, **fields: Any) -> str:
    name = f"e-{uuid.uuid4().hex}"
    document = {"name": name, "url": url, "secrets": [SECRET], "headers": {"Authorization": f"Bearer {CREDENTIAL}"}} | fields
    assert ask(api, "/v1/endpoints", document).status == 201
    return name


def stored(api: Api) -> tuple[int, int]:
    return rows(api.env["MADEIRA_DATABASE_URL"]), rows(api.env["MADEIRA_DATABASE_URL"], "delivery")


def test_a_test_call_is_a_real_call_with_a_mark(shared_api: Api, receiver: Receiver) -> None:
    """Signed, with the credentials, by the template; the answer shows what went out without them; nothing is stored."""
    name = endpoint(shared_api, receiver.url("/{event_type}"), body='{"was": {{ payload | tojson }}}')
    before = stored(shared_api)
    reply = ask(
        shared_api, f"/v1/endpoints/{name}/test", {"event_type": "order.paid", "payload": {"n": 1.0}, "reason": "does it work?"}
    )
    assert reply.status == 200, reply.body
    [call] = receiver.calls
    assert (call.method, call.path, call.body) == ("POST", "/order.paid", b'{"was": {"n": 1.0}}')
    assert call.headers["x-madeira-test"] == "1"
    assert call.headers["authorization"] == f"Bearer {CREDENTIAL}"
    signature = call.headers["x-madeira-signature"]
    assert verify((SECRET,), call.headers["x-madeira-timestamp"], signature, call.body, now=call.wall)
    told = reply.json
    assert (told["request"]["url"], told["request"]["body"]) == (receiver.url("/order.paid"), call.body.decode())
    shown = {header.lower(): value for header, value in told["request"]["headers"]}
    assert shown["x-madeira-test"] == "1"
    assert {shown[h] for h in ("authorization", "x-madeira-signature", "webhook-signature")} == {"***"}
    assert told["answer"] == {"status": 200, "excerpt": '{"success": true}', "length": 17}
    assert told["verdict"] == {"outcome": "succeeded", "error_code": None, "reason": None}
    assert stored(shared_api) == before
    for secret in (SECRET, CREDENTIAL, signature):
        assert secret.encode() not in reply.body
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        statement = "SELECT who, action, why, detail FROM audit WHERE what = %s ORDER BY id"
        noted = c.execute(statement, (f"endpoint {name}",)).fetchall()[1:]
    detail = {
        "event_type": "order.paid",
        "url": receiver.url("/order.paid"),
        "outcome": "succeeded",
        "status_code": 200,
        "error_code": None,
    }
    assert noted == [("admin", "test", "does it work?", detail)]


def test_without_a_body_a_small_event_is_sent(shared_api: Api, receiver: Receiver) -> None:
    """Of the type madeira.test; by the endpoint as it is at this moment."""
    name = endpoint(shared_api, "http://127.0.0.1:9/")
    url = json.dumps({"url": receiver.url("/new")}).encode()
    assert shared_api.request("PATCH", f"/v1/endpoints/{name}", url, in_json(ADMIN)).status == 200
    reply = shared_api.request("POST", f"/v1/endpoints/{name}/test", None, person(shared_api, Role.OPERATOR))
    assert reply.status == 200
    [call] = receiver.calls
    sent = json.loads(call.body)
    assert (sent["event_type"], sent["payload"], call.path) == ("madeira.test", {"test": True}, "/new")


@pytest.mark.parametrize(
    ("answer", "outcome", "error_code"),
    [
        (Answer(status=503), "retryable", "http_503"),
        (Answer(status=404), "permanent", "http_404"),
        (json_answer({"code": 7}), "business", "business"),
        (Answer(body="<html>"), "unknown", "unparseable"),
        (Answer(reset=True), "retryable", "reset"),
    ],
)
def test_whatever_comes_of_it_is_the_answer(
    shared_api: Api, receiver: Receiver, answer: Answer, outcome: str, error_code: str
) -> None:
    """A failure of the receiver is no failure of the request."""
    receiver.default(answer)
    reply = ask(shared_api, f"/v1/endpoints/{endpoint(shared_api, receiver.url('/'))}/test")
    assert reply.status == 200
    assert (reply.json["verdict"]["outcome"], reply.json["verdict"]["error_code"]) == (outcome, error_code)
    assert (reply.json["answer"] is None) == answer.reset


def test_what_cannot_be_sent_is_told_without_a_call(shared_api: Api, receiver: Receiver) -> None:
    """A template that fails, a callback without an address, a name that leads nowhere: a verdict, and its row."""
    failing = endpoint(shared_api, receiver.url("/"), body='{"n": {{ payload.missing | tojson }}}')
    nowhere = endpoint(shared_api, "http://no-such-host.invalid/")
    before = audited(shared_api)
    verdicts = [ask(shared_api, f"/v1/endpoints/{name}/test").json for name in (failing, "callback", nowhere)]
    assert [v["verdict"]["error_code"] for v in verdicts] == ["template", "bad_url", "dns"]
    assert "endpoint callback calls the target_uri of the event, which brought none" in verdicts[1]["verdict"]["reason"]
    assert [v["answer"] for v in verdicts] == [None] * 3
    assert audited(shared_api) == before + 3
    assert ask(shared_api, "/v1/endpoints/callback/test", {"target_uri": receiver.url("/back")}).json["answer"]["status"] == 200
    assert [call.path for call in receiver.calls] == ["/back"]


def test_an_endpoint_that_cannot_be_used_here_is_not_called(shared_api: Api, receiver: Receiver) -> None:
    """409 with the variable that is not set in this process, and no row."""
    name = endpoint(shared_api, receiver.url("/"), secrets=["env:NOT_SET_IN_THIS_PROCESS"])
    before = audited(shared_api)
    reply = ask(shared_api, f"/v1/endpoints/{name}/test")
    assert (reply.status, reply.json["type"]) == (409, "urn:madeira:problem:unusable")
    assert "NOT_SET_IN_THIS_PROCESS" in reply.json["detail"]
    assert not receiver.calls
    assert audited(shared_api) == before


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("event_type", {"event_type": "two words"}),
        ("target_uri", {"target_uri": "http://169.254.169.254/"}),
        ("event_id", {"event_id": "mine"}),
        ("reason", {"reason": 5}),
        ("parameters", {"parameters": []}),
    ],
)
def test_a_wrong_field_of_a_test_call_is_named(shared_api: Api, receiver: Receiver, field: str, body: dict[str, Any]) -> None:
    """As for an event: nothing is called, and nothing noted."""
    name = endpoint(shared_api, receiver.url("/"))
    before = audited(shared_api)
    reply = ask(shared_api, f"/v1/endpoints/{name}/test", body)
    assert (reply.status, [e["field"] for e in reply.json["errors"]]) == (422, [field])
    assert ask(shared_api, "/v1/endpoints/nobody/test").status == 404
    assert not receiver.calls
    assert audited(shared_api) == before


@pytest.mark.parametrize(
    "what",
    [{"secrets": [SECRET]}, {"headers": {"X-Key": CREDENTIAL}}, {"secrets": ["env:NOT_SET"]}],
    ids=["secrets", "headers", "env"],
)
def test_only_an_admin_has_credentials_taken_to_an_address_of_his_choice(
    shared_api: Api, receiver: Receiver, what: dict[str, Any]
) -> None:
    """An operator is told the role, whatever else is wrong with the endpoint; without credentials he may."""
    operator = person(shared_api, Role.OPERATOR)
    name = endpoint(shared_api, "{+target_uri}", **({"secrets": [], "headers": {}} | what))
    body = {"target_uri": receiver.url("/mine"), "payload": "signed?"}
    before = audited(shared_api)
    refused = ask(shared_api, f"/v1/endpoints/{name}/test", body, operator)
    assert (refused.status, refused.json["role"], refused.json["needed"]) == (403, "operator", "admin")
    assert next(iter(what)) in refused.json["detail"]
    assert "role admin" in refused.json["detail"]
    assert not receiver.calls
    assert audited(shared_api) == before
    bare = endpoint(shared_api, "{+target_uri}", secrets=[], headers={})
    fixed = endpoint(shared_api, receiver.url("/{event_type}"))
    for free in (bare, "callback", fixed):
        assert ask(shared_api, f"/v1/endpoints/{free}/test", body, operator).json["answer"]["status"] == 200
    if "env:NOT_SET" not in what.get("secrets", []):
        assert ask(shared_api, f"/v1/endpoints/{name}/test", body).json["answer"]["status"] == 200


def test_a_test_call_is_known_by_what_is_signed(shared_api: Api, receiver: Receiver) -> None:
    """The client turns it away unless it is told otherwise, and with another id it is no call of Madeira's."""
    assert ask(shared_api, f"/v1/endpoints/{endpoint(shared_api, receiver.url('/'))}/test").status == 200
    [call] = receiver.calls
    with pytest.raises(client.UnwantedTest, match="allow_tests=True"):
        client.verify(call.headers, call.body, SECRET)
    delivery = client.verify(call.headers, call.body, SECRET, allow_tests=True)
    assert (delivery.is_test, delivery.payload) == (True, {"test": True})
    renamed = {name: value.replace("msg_test_", "msg_1_") for name, value in call.headers.items()}
    with pytest.raises(client.VerificationFailed, match="no signature"):
        client.verify(renamed, call.body, SECRET)


def test_test_calls_hold_a_few_threads_at_most(shared_api: Api, receiver: Receiver) -> None:
    """As many as a process makes at a time are made, the others are told to come again; the API goes on meanwhile."""
    gate = Gate()
    receiver.default(Answer(hold=gate))
    name = endpoint(shared_api, receiver.url("/"), timeout=60)
    many = 2 * CALLS + 6
    with ThreadPoolExecutor(many) as pool:
        asked = [pool.submit(ask, shared_api, f"/v1/endpoints/{name}/test") for _ in range(many)]
        wait_until(lambda: sum(f.done() for f in asked) + receiver.in_progress == many, what="each to be called or refused")
        assert shared_api.get("/healthz").status == 200
        gate.set()
        answers = [f.result(30) for f in asked]
    called = [a for a in answers if a.status == 200]
    assert CALLS <= len(called) == len(receiver.calls) <= 2 * CALLS
    assert {(a.status, "retry-after" in a.headers) for a in answers if a not in called} == {(503, True)}


def test_the_mark_cannot_be_forged_by_a_configuration() -> None:
    """No endpoint can have the header itself."""
    assert is_reserved(HEADER[0])


def test_everything_that_is_wrong_with_a_dry_run_is_told_at_once(shared_api: Api) -> None:
    """A source that is not there or no text, the fields of the event, and those of the answer."""
    for source in ({"source": "nobody"}, {"source": 5}, {}):
        body = source | {"event_type": 5, "colour": "red", "response": {"status": 1}}
        reply = ask(shared_api, "/v1/dry-run", body)
        assert reply.status == 422
        fields = ["colour", "event_type", "payload", "response.status", "source"]
        assert sorted(e["field"] for e in reply.json["errors"]) == fields


def test_a_dry_run_tells_which_source_may_have_been_meant(shared_api: Api) -> None:
    """As the command does."""
    reply = ask(shared_api, "/v1/dry-run", {"source": "shopp", "event_type": "a", "payload": 1})
    assert "'shopp' cannot post: there is none; did you mean 'shop'?" in reply.json["errors"][0]["detail"]


def test_a_dry_run_tells_and_does_nothing(shared_api: Api, receiver: Receiver) -> None:
    """Which routes match and why the others do not, the request, the verdict on an answer; nothing is called or stored."""
    name = endpoint(shared_api, receiver.url("/{event_type}"))
    mark = uuid.uuid4().hex
    for route, more in ((f"yes-{mark}", {}), (f"no-{mark}", {"filter": "payload.n > 5"})):
        document = {"name": route, "endpoint": name, "event_type": f"{mark}.*"} | more
        assert ask(shared_api, "/v1/routes", document).status == 201
    viewer = person(shared_api, Role.VIEWER)
    before, noted = stored(shared_api), audited(shared_api)
    body = {
        "source": "shop",
        "event_type": f"{mark}.paid",
        "payload": {"n": 1},
        "response": {"status": 200, "headers": {"Content-Type": "application/json"}, "body": '{"ok": false}'},
    }
    reply = ask(shared_api, "/v1/dry-run", body, viewer)
    assert reply.status == 200, reply.body
    routes = {route["name"]: route for route in reply.json["routes"]}
    assert (routes[f"yes-{mark}"]["matches"], routes[f"no-{mark}"]["matches"]) == (True, False)
    assert routes[f"no-{mark}"]["reason"]
    [mine] = [d for d in reply.json["deliveries"] if d["endpoint"] == name]
    assert mine["request"]["url"] == receiver.url(f"/{mark}.paid")
    assert mine["verdict"]["outcome"] == "business"
    assert not receiver.calls
    assert (stored(shared_api), audited(shared_api)) == (before, noted)
    for secret in (SECRET, CREDENTIAL):
        assert secret.encode() not in reply.body


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("source", {"source": "nobody"}),
        ("source", {"source": None}),
        ("event_type", {"event_type": ""}),
        ("response", {"response": 200}),
        ("response.status", {"response": {}}),
        ("response.status", {"response": {"status": 99}}),
        ("response.body", {"response": {"status": 200, "body": {"ok": True}}}),
        ("response.headers", {"response": {"status": 200, "headers": {"a": 1}}}),
        ("response.cookies", {"response": {"status": 200, "cookies": []}}),
        ("colour", {"colour": "red"}),
    ],
)
def test_a_wrong_field_of_a_dry_run_is_named(shared_api: Api, field: str, change: dict[str, Any]) -> None:
    """422, with the field."""
    body = {"source": "shop", "event_type": "order.paid", "payload": 1} | change
    reply = ask(shared_api, "/v1/dry-run", body)
    assert (reply.status, [e["field"] for e in reply.json["errors"]]) == (422, [field])
