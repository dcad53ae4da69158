"""Who may do what: each operation, asked by everybody, and by those whose signature or token is odd."""

import time
from collections.abc import Mapping

import pytest

from madeira.api import openapi
from madeira.states import Role
from tests.api.people import ADMIN, audited, bearer, person, token
from tests.api.serving import Api, check, event, signed

#: Operation -> the role that a token needs (None: none helps), and whether a source may ask for it by its signature.
#: Open to everybody: ``OPEN``. Written by hand, so that a slip in the code or in the description is not repeated here.
OPEN = ("", False)
ACCESS: Mapping[str, tuple[str | None, bool]] = {
    "postEvent": (None, True),
    "postBatch": (None, True),
    "listEvents": ("viewer", True),
    "showEvent": ("viewer", True),
    "showEventNamedBatch": ("viewer", True),
    "cancelEvent": ("operator", True),
    "replayEvent": ("operator", False),
    "rerouteEvent": ("operator", False),
    "eraseEvent": ("admin", False),
    "cancelEndpoint": ("operator", False),
    **{f"{verb}DeadLetter{s}": ("viewer", False) for verb, s in (("list", "s"), ("group", "s"), ("show", ""))},
    **{f"list{kind}s": ("viewer", False) for kind in ("Source", "Endpoint", "Route")},
    **{f"show{kind}": ("viewer", False) for kind in ("Source", "Endpoint", "Route")},
    **{f"create{kind}": ("admin", False) for kind in ("Source", "Endpoint", "Route")},
    **{f"update{kind}": ("admin", False) for kind in ("Source", "Endpoint", "Route")},
    **{f"delete{kind}": ("admin", False) for kind in ("Source", "Endpoint", "Route")},
    "testEndpoint": ("operator", False),
    **{f"{action}Endpoint": ("operator", False) for action in ("pause", "resume", "disable", "enable")},
    "startJob": ("operator", False),
    "listJobs": ("viewer", False),
    "showJob": ("viewer", False),
    **{f"{steer}Job": ("operator", False) for steer in ("pause", "resume", "cancel")},
    "dryRun": ("viewer", False),
    "readAudit": ("viewer", False),
    "readReconcile": ("viewer", False),
    "readLogLevel": ("viewer", False),
    "setLogLevel": ("admin", False),
    "listTokens": ("admin", False),
    "createToken": ("admin", False),
    "revokeToken": ("admin", False),
    "isAlive": OPEN,
    "isReady": OPEN,
    "readMetrics": OPEN,
    "describe": OPEN,
}

WHO = ("nobody", "source", "viewer", "operator", "admin", "admin of the settings", "revoked admin", "viewer and source")

OPERATIONS = {
    described["operationId"]: (method.upper(), path, described)
    for path, item in openapi.document()["paths"].items()
    for method, described in item.items()
}


def headers_of(api: Api, who: str) -> dict[str, str]:
    match who:
        case "nobody":
            return {}
        case "source":
            return signed(b"")
        case "admin of the settings":
            return ADMIN
        case "revoked admin":
            text, name = token(api, Role.ADMIN)
            assert api.request("DELETE", f"/v1/tokens/{name}", None, ADMIN).status == 200
            return bearer(text)
        case "viewer and source":
            return signed(b"") | person(api, Role.VIEWER)
    return person(api, Role(who))


def expected(operation: str, who: str) -> int | None:
    """401 or 403; None when it is let in."""
    if ACCESS[operation] == OPEN:
        return None
    need, source = ACCESS[operation]
    if operation in ("postEvent", "postBatch"):
        # What posts is the source; a token beside its signature changes nothing.
        return None if "source" in who else 401
    role = {"admin of the settings": "admin", "viewer and source": "viewer"}.get(who, who)
    if role == "source":
        return None if source else 401
    ranked = ["viewer", "operator", "admin"]
    if role not in ranked or need is None:
        return 401
    return None if ranked.index(role) >= ranked.index(need) else 403


def test_the_table_of_this_test_has_every_operation() -> None:
    """None is left out, and the description says of each what the table says."""
    told = {}
    for name, (_, _, described) in OPERATIONS.items():
        ways = [sorted(way) for way in described["security"]]
        told[name] = (described.get("x-madeira-role"), ["signature", "signatureSource", "signatureTimestamp"] in ways)
        assert (["token"] in ways) == ("x-madeira-role" in described)
    assert told == {name: (None, False) if access == OPEN else access for name, access in ACCESS.items()}


@pytest.mark.parametrize("operation", ACCESS)
def test_each_operation_lets_in_whom_it_should_and_nobody_else(shared_api: Api, operation: str) -> None:
    """By the status: 401 for strangers, 403 for too low a role; whoever is refused leaves no row in the audit."""
    method, path, described = OPERATIONS[operation]
    path = path.replace("{name}", "nothing-here").replace("{event_id}", "nothing-here").replace("{delivery_id}", "0")
    found = {}
    for who in WHO:
        headers = headers_of(shared_api, who)
        before = audited(shared_api)
        media_type = next(iter(described.get("requestBody", {"content": {"application/json": {}}})["content"]))
        reply = shared_api.request(method, path, None, headers | {"Content-Type": media_type})
        found[who] = reply.status if reply.status in (401, 403) else None
        if reply.status >= 400:
            assert audited(shared_api) == before
            assert reply.headers["content-type"] == "application/problem+json"
    assert found == {who: expected(operation, who) for who in WHO}


def test_a_wrong_token_beside_a_right_signature_is_refused(shared_api: Api) -> None:
    """Who shows a token is judged by it."""
    headers = signed(b"") | bearer("wrong")
    assert shared_api.request("GET", "/v1/events/nothing-here", None, headers).status == 401
    assert shared_api.request("GET", "/v1/events/nothing-here", None, signed(b"")).status == 404


# -- what is odd about a signature or a token --------------------------------------------------------------------------

BODY = event("never")

#: A post that is refused leaves nothing behind.
odd = pytest.mark.usefixtures("leaves_no_row")


@odd
@pytest.mark.parametrize(
    "headers",
    [
        {"X-Madeira-Source": "nobody"},
        {"X-Madeira-Source": ""},
        {"X-Madeira-Source": "SHOP"},
        {"X-Madeira-Source": "shop,shop"},
        {"X-Madeira-Source": "sh\xf6p"},
        {"X-Madeira-Source": "other"},
        {"X-Madeira-Source": "x" * 4000},
        {"X-Madeira-Timestamp": ""},
        {"X-Madeira-Timestamp": "0"},
        {"X-Madeira-Timestamp": "-1"},
        {"X-Madeira-Timestamp": "1e9"},
        {"X-Madeira-Timestamp": "+5"},
        {"X-Madeira-Timestamp": "+NOW"},
        {"X-Madeira-Timestamp": "NOW.0"},
        {"X-Madeira-Timestamp": "NOW,NOW"},
        {"X-Madeira-Timestamp": "0xHEXNOW"},
        {"X-Madeira-Timestamp": "9" * 4000},
        {"X-Madeira-Timestamp": "\xb2\xb3"},
        {"X-Madeira-Timestamp": "nan"},
        {"X-Madeira-Timestamp": "1_000_000_000"},
        {"X-Madeira-Signature": ""},
        {"X-Madeira-Signature": "0" * 64},
        {"X-Madeira-Signature": "zz"},
        {"X-Madeira-Signature": "\xe9" * 64},
        {"X-Madeira-Signature": "," * 4000},
        {"X-Madeira-Signature": "a" * 8000},
    ],
    ids=lambda h: ascii(h)[:60],
)
def test_an_odd_signature_header_is_unauthorized(shared_api: Api, headers: dict[str, str]) -> None:
    """An unknown source and every odd timestamp or signature get 401."""
    now = int(time.time())
    sent = {name: value.replace("HEXNOW", f"{now:x}").replace("NOW", str(now)) for name, value in headers.items()}
    check(shared_api.post(BODY, sent), 401)


@odd
@pytest.mark.parametrize("name", ["X-Madeira-Source", "X-Madeira-Timestamp", "X-Madeira-Signature"])
def test_a_missing_signature_header_is_unauthorized(shared_api: Api, name: str) -> None:
    """Without one of the three headers nobody is recognised."""
    headers = {k: v for k, v in signed(BODY).items() if k != name}
    check(shared_api.request("POST", "/v1/events", BODY, headers), 401)


@odd
@pytest.mark.parametrize("off", [-301, -100_000, 302, 100_000])
def test_a_stale_or_early_timestamp_is_unauthorized(shared_api: Api, off: int) -> None:
    """A timestamp more than 300 s off is refused although its signature fits."""
    check(shared_api.post(BODY, at=time.time() + off), 401)


@odd
def test_all_refusals_of_a_sender_look_the_same(shared_api: Api) -> None:
    """An unknown source, a wrong signature and a stale one cannot be told apart by the answer."""
    replies = [
        shared_api.post(BODY, {"X-Madeira-Source": "nobody"}),
        shared_api.post(BODY, secret="wrong"),
        shared_api.post(BODY, at=1),
        shared_api.request("POST", "/v1/events", BODY, {"Content-Type": "application/json"}),
    ]
    assert len({r.body for r in replies}) == 1
    assert len({tuple(sorted((k, v) for k, v in r.headers.items() if k != "date")) for r in replies}) == 1


@odd
def test_a_signature_over_other_bytes_is_unauthorized(shared_api: Api) -> None:
    """One space more inside of the body, and the signature no longer fits."""
    for body in (b'{"event_id": "s","event_type":"a","payload":1}', b'{"event_id":"s","event_type":"a","payload":1}\n'):
        altered = body.replace(b": ", b":  ") if b": " in body else body.rstrip()
        check(shared_api.request("POST", "/v1/events", altered, signed(body)), 401)


ODD_TOKENS = ["", "Bearer", "Bearer ", "Bearer wrong", "Basic YTpi", "bearer \xe9", "Bearer " + "x" * 5000, "Bearer a, Bearer b"]


@odd
@pytest.mark.parametrize("authorization", ODD_TOKENS)
@pytest.mark.parametrize("path", ["/v1/reconcile", "/v1/events/x?source=shop"])
def test_a_wrong_token_is_unauthorized(shared_api: Api, path: str, authorization: str) -> None:
    """Any token but the administrator's gets 401."""
    check(shared_api.request("GET", path, None, {"Authorization": authorization}), 401)
