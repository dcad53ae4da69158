"""What makes a request that fits its schema a good one: rules between fields and names that must be there.

A schema cannot say that a route's endpoint must exist, or that of two ways to tell the times of retries only one may stand.
The tests that make up requests from the description bring those they mean to be good through here.
"""

import base64
import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import schemathesis
import trustme
from hypothesis import strategies as st

from madeira.api.batch import NDJSON
from tests.api.people import ADMIN, in_json
from tests.api.serving import Api

#: Name of the source, the endpoint and the route that the changes are made to.
PATCHED = "patched"

#: Lines of a batch, good and bad.
_LINES = (
    '{"event_type": "order.paid", "payload": 1}',
    '{"event_type": "order.paid", "payload": 1, "event_id": "same"}',
    '{"event_type": "order.paid", "payload": 2, "event_id": "same"}',
    '{"event_type": "order paid", "payload": 1, "event_id": "e"}',
    "{",
    "",
)

_NUMBERS = itertools.count()

_CERTIFICATE = trustme.CA().issue_cert("client.example")


def register() -> None:
    """Teach the formats of the description: texts of which a pattern cannot say all, and such as only the server can make."""
    formats = {
        "http-url": st.from_regex(r"https?://[a-z]{1,20}\.example(:[1-9][0-9]{0,3})?/[a-z0-9/]{0,30}", fullmatch=True),
        "url-template": st.sampled_from(
            ["http://sink.example/{event_type}", "https://sink.example/a/{parameters.account}{?source}", "{+target_uri}"]
        ),
        "json-template": st.sampled_from(['{"id": {{ event_id | tojson }}}', "[1, 2]", "{{ payload | tojson }}"]),
        "cel-of-answer": st.sampled_from(["status == 200", "status in [200, 201] && body.code == 0"]),
        "event-type-pattern": st.sampled_from(["*", "order.*", "order.p[ao]id", "?"]),
        "cel-of-event": st.sampled_from(["payload.amount > 100", 'source == "shop"']),
        "cel-of-order": st.sampled_from(["none", "endpoint", "payload.account"]),
        "pem-certificates": st.just(b"".join(blob.bytes() for blob in _CERTIFICATE.cert_chain_pems).decode()),
        "pem-key": st.just(_CERTIFICATE.private_key_pem.bytes().decode()),
        "audit-cursor": st.builds("{}-{}".format, st.integers(0, 10**15), st.integers(0, 10**15)),
        "events-cursor": st.integers(0, 10**15).map(lambda n: base64.urlsafe_b64encode(b"e%d" % n).decode()),
        "searched-text": st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=200),
        "events-ndjson": st.lists(st.sampled_from(_LINES), min_size=1, max_size=20).map("\n".join),
    }
    for name, strategy in formats.items():
        schemathesis.openapi.format(name, strategy)

    @schemathesis.serializer(NDJSON)
    def ndjson(_context: schemathesis.SerializationContext, value: object) -> bytes:
        """A text as it is; what is none, as JSON."""
        return value.encode() if isinstance(value, str) else json.dumps(value).encode()


def make_what_is_patched(api: Api) -> None:
    """Make the objects that changes are made to."""
    for kind, fields in {
        "sources": {"secrets": ["a-secret"]},
        "endpoints": {"url": "http://sink.example/"},
        "routes": {"endpoint": "sink"},
    }.items():
        reply = api.request("POST", f"/v1/{kind}", json.dumps({"name": PATCHED} | fields).encode(), in_json(ADMIN))
        assert reply.status == 201, reply.body


def mend(case: schemathesis.Case) -> None:
    """Make a case that fits its schema a good one."""
    name = case.operation.definition.raw["operationId"]
    if name.startswith("update"):
        case.path_parameters["name"] = PATCHED
        case.headers["If-Match"] = "*"
    if name == "deleteEndpoint":
        case.query["reason"] = "tidied up"
    if name == "startJob" and isinstance(case.body, dict):
        # Whatever belongs to a cancel only, or to everything else.
        not_of = {"replay": ("among",), "reroute": ("among", "ordered"), "cancel": ("rate", "ordered")}
        case.body = {k: v for k, v in case.body.items() if k not in not_of[case.body["action"]]}
    if name.startswith(("create", "update", "postEvent", "dryRun")) and isinstance(case.body, dict):
        case.body = _mended(name, case.body)


def _mended(name: str, body: dict[str, Any]) -> dict[str, Any]:
    body = dict(body)
    if name.startswith("update"):
        body.pop("version", None)
        if "name" in body:
            body["name"] = PATCHED
    if name.startswith("create"):
        # The smallest document would else be made once, and be there already ever after; some are, all the same.
        number = next(_NUMBERS)
        body["name"] = f"made-{number}" if number % 4 else "made-again"
    if body.get("source") is not None:
        body["source"] = "shop"
    if body.get("endpoint") is not None:
        body["endpoint"] = "sink"
    if isinstance(body.get("secrets"), list):
        # A shorter one may be kept since before, and a reference is as long as its name.
        body["secrets"] = [
            one.ljust(8, "s") if isinstance(one, str) and not one.startswith("env:") else one for one in body["secrets"]
        ]
    if "deliver_at" in body:
        body["deliver_at"] = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    if name == "updateEndpoint":
        body.pop("client_certificate", None)
    body |= {
        table: mend(body[table], patch=name == "updateEndpoint")
        for table, mend in (("retry", _retry), ("breaker", _breaker))
        if isinstance(body.get(table), dict)
    }
    if isinstance(body.get("headers"), dict):
        # The case of a header's name does not matter, so two may be the same.
        body["headers"] = dict([*body["headers"].items()][:1])
    return body


def _breaker(breaker: dict[str, Any], *, patch: bool) -> dict[str, Any]:
    """The first hold is not above the longest."""
    kept = {name: value for name, value in breaker.items() if name not in ("hold", "max")}
    return kept | ({"hold": None, "max": None} if patch else {})


def _retry(retry: dict[str, Any], *, patch: bool) -> dict[str, Any]:
    """Either an explicit list of delays, or a first one that is not above the last."""
    retry = dict(retry)
    times = ("initial", "factor", "max")
    if retry.get("delays") is not None:
        for time in times:
            retry.pop(time, None)
            if patch:
                retry[time] = None
        return retry
    if patch:
        retry["delays"] = None
    for time in ("initial", "max"):
        retry.pop(time, None)
        if patch:
            retry[time] = None
    return retry
