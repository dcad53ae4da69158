"""What a dry run tells is what then happens: 200 generated events, posted to a running system with generated rules."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from madeira.dry_run import DeliveryReport, DryRun, Response, document, dry_run
from madeira.egress import Egress
from madeira.records import NewEvent
from madeira.routing.config import Rules
from madeira.routing.follow import RulesFollower
from madeira.sealing import Sealer
from madeira.store.database import Database
from tests.receiver import Call, Receiver
from tests.system.conftest import Launch
from tests.system.harness import KEY, SECRET, Madeira, toml

EVENTS = 200

PATHS = [
    "/plain",
    "/plain?x=1&y=%20",
    "/e/{event_type}/{event_id}",
    "/a/{parameters.account}",
    "/q{?routing_key,parameters.tags*}",
    "/n/{payload.n}/{payload.yes}",
    "{/source,parameters.account}",
    "/i/{payload.items.0.sku:2}",
    "/deep/{+parameters.path}",
]

BODIES = [
    None,
    None,
    "{{ payload | tojson }}",
    '{"id": {{ event_id | tojson }}, "n": {{ payload.n }}, "all": {{ payload | tojson }}, "at": {{ created_at | tojson }}}',
    '[{% for i in payload["items"] %}{{ ", " if not loop.first }}{{ i | tojson }}{% endfor %}]',
    '{"note": {{ payload.note | default("none") | tojson }}, "account": {{ parameters.account | tojson }}}',
    '{% if payload.n > 5 %}{"big": true}{% else %}{"big": false}{% endif %}',
]

HEADERS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer s3cr3t-t0ken"},
    {"X-N": "{{ payload.n }}", "X-Key": "k-{{ routing_key | default('none', true) }}", "x-lower": "as it is"},
    {"X-Note": "{{ payload.note }}"},
]

FILTERS = [
    None,
    None,
    "payload.n > 5",
    "has(parameters.account) && parameters.account != 'a/b'",
    "payload.items.exists(i, i.sku == 'x')",
    "routing_key == 'k' || event_type.endsWith('.done')",
    "payload.missing == 1",
    "source == 'test' && created_at > '2026'",
]

TYPES = ["a.done", "a.b.done", "c.d", "c", "unheard.of"]
PATTERNS = ["*", "a.*", "*.done", "c.?", "c", "a.b.done", "z.*"]

#: Texts of JSON values that a parser and a writer would change.
NUMBERS = ["1.10", "12345678901234567890", "-0", "7E0", "3", "0.5", "1e2"]
NOTES = ['"plain"', '"caf\u00e9"', '"\\u00e9 \\/ \\ud83d\\ude00"', '"a\\r\\nX-Evil: 1"', "null", '"<a & b>"']

#: Headers whose values differ between a dry run and a call, since they come from the delivery's row or the time.
OWN = {"webhook-id", "webhook-timestamp", "webhook-signature", "x-madeira-timestamp", "x-madeira-signature", "traceparent"}


@dataclass(frozen=True)
class Posted:
    """An event, by the texts that were posted."""

    event_id: str
    event_type: str
    payload: str
    parameters: str | None
    routing_key: str | None
    target_uri: str | None

    @property
    def body(self) -> bytes:
        fields = {"event_id": self.event_id, "event_type": self.event_type, "trace_id": f"trace-{self.event_id}"}
        fields |= {name: value for name, value in (("routing_key", self.routing_key), ("target_uri", self.target_uri)) if value}
        parameters = f', "parameters": {self.parameters}' if self.parameters else ""
        return f'{json.dumps(fields)[:-1]}, "payload": {self.payload}{parameters}}}'.encode()


@pytest.mark.long
def test_a_dry_run_tells_what_then_happens(launch: Launch, receiver: Receiver) -> None:
    """The same deliveries, dead ones included, and the same request for each, byte for byte."""
    rand = random.Random(20260102)
    madeira = launch({})
    madeira.configure(configuration(rand, receiver))
    posted = [make_event(rand, receiver, number) for number in range(EVENTS)]
    madeira.api()
    madeira.worker()
    for one in posted:
        assert madeira.send(one.body).status_code == 202, one
    madeira.wait_all(60)

    rules, calls = rules_of(madeira), {delivery_of(call): call for call in receiver.calls}
    egress = Egress(allow=("127.0.0.0/8",))
    kinds: Counter[str] = Counter()
    for one in posted:
        row = madeira.event(one.event_id)
        new = NewEvent(
            source="test",
            event_id=one.event_id,
            event_type=one.event_type,
            payload=one.payload,
            body_sha256=bytes(32),
            trace_id=f"trace-{one.event_id}",
            routing_key=one.routing_key,
            target_uri=one.target_uri,
            parameters=one.parameters,
        )
        told = dry_run(rules, new, egress=egress, now=row["created_at"], response=Response(200, {}, '{"success": true}'))
        kinds += compare(madeira, row, told, calls)
        assert "s3cr3t" not in json.dumps(document(told))
    assert receiver.count() == kinds["called"] == len(calls)
    assert min(kinds[kind] for kind in ("called", "dead", "unrouted", "callback", "body", "header")) >= 8, kinds


def configuration(rand: random.Random, receiver: Receiver) -> str:
    endpoints: dict[str, dict[str, Any]] = {}
    for number in range(24):
        fields: dict[str, Any] = {
            "url": receiver.url("").rstrip("/") + rand.choice(PATHS),
            "method": rand.choice(["POST", "PUT", "PATCH"]),
            "secrets": rand.choice([[], [SECRET], [SECRET, "second-secret"]]),
            "headers": rand.choice(HEADERS),
        }
        body = rand.choice(BODIES)
        endpoints[f"e{number}"] = fields | ({"body": body} if body else {})
    endpoints["back"] = {"url": "{+target_uri}", "headers": {"X-N": "{{ payload.n }}"}}
    routes = []
    for number in range(40):
        optional = {"filter": rand.choice(FILTERS), "routing_key": rand.choice([None, None, None, "k"])}
        fields = {"name": f"r{number}", "endpoint": f"e{rand.randrange(24)}", "event_type": rand.choice(PATTERNS)}
        if fields["event_type"] == "*":
            optional["routing_key"] = "k"
        routes.append(fields | {name: value for name, value in optional.items() if value})
    routes.append({"name": "back", "endpoint": "back", "event_type": "a.*", "filter": "target_uri != null"})
    return toml(endpoints, routes)


def make_event(rand: random.Random, receiver: Receiver, number: int) -> Posted:
    items = ", ".join(
        f'{{"sku": "{sku}", "q": {rand.choice(NUMBERS)}}}' for sku in rand.sample(["x", "y\u00e9", "z z"], rand.randrange(3))
    )
    note = rand.choice(NOTES)
    spacing = rand.choice(["", " ", "\n  "])
    payload = f'{{{spacing}"n":{spacing}{rand.choice(NUMBERS)}, "yes": true, "items": [{items}]{spacing}, "note": {note}}}'
    account = rand.choice(['"acme"', '"a/b"', '".."', '"\\u00fc"', "17", "1.50"])
    tags = rand.choice(['"t1", "t 2"', '"only"', ""])
    parameters = f'{{"account":{account}, "path": "x/y", "tags": [{tags}]}}'
    return Posted(
        event_id=f"evt-{number}",
        event_type=rand.choice(TYPES),
        payload=payload,
        parameters=rand.choice([parameters, parameters, None]),
        routing_key=rand.choice([None, None, "k"]),
        target_uri=rand.choice([None, receiver.url(f"/cb/{number}?a=%20b")]),
    )


def rules_of(madeira: Madeira) -> Rules:
    database = Database(url=madeira.database_url, application="dry-run", pool_max=1)
    follower = RulesFollower(database=database, sealer=Sealer((KEY,)))
    database.open()
    follower.start()
    try:
        assert follower.wait(10)
        return follower.need()
    finally:
        follower.stop()
        database.close()


def delivery_of(call: Call) -> int:
    found = re.fullmatch(r"msg_(\d+)_[0-9a-f]{16}", call.webhook_id)
    assert found is not None
    return int(found[1])


def compare(madeira: Madeira, row: dict[str, Any], told: DryRun, calls: dict[int, Call]) -> Counter[str]:
    """See that a dry run and what happened are the same; counts what was seen."""
    kinds: Counter[str] = Counter()
    deliveries = madeira.rows("SELECT * FROM delivery WHERE event_seq = %s ORDER BY id", row["seq"])
    by_endpoint = {d["endpoint"]: d for d in deliveries}
    assert {report.plan.endpoint for report in told.deliveries} == by_endpoint.keys()
    if not deliveries:
        assert (row["status"], row["reason"]) == ("dead", "unrouted")
        kinds["unrouted"] += 1
    for report in told.deliveries:
        real = by_endpoint[report.plan.endpoint]
        assert (list(report.plan.routes), report.plan.lane) == (real["routes"], real["lane"])
        assert set(report.plan.routes) <= {r.name for r in told.routes if r.matches or r.failed}
        if report.request is None:
            assert (real["status"], real["failure_class"], real["last_error"]) == ("dead", "template", report.error)
            assert real["attempt"] == 0
            kinds["dead"] += 1
            continue
        same_request(report, calls[real["id"]])
        assert report.verdict is not None
        assert (report.verdict.attempt.outcome, real["status"]) == ("succeeded", "succeeded")
        kinds["called"] += 1
        kinds["callback"] += report.endpoint.is_callback
        kinds["body"] += report.plan.body is not None
        kinds["header"] += any("{{" in value for value in report.endpoint.headers.values())
    return kinds


def same_request(report: DeliveryReport, call: Call) -> None:
    made = report.request
    assert made is not None
    assert (made.method, made.target.path, made.target.authority) == (call.method, call.path, call.headers["host"])
    assert made.body == call.body
    sent = [(name, value) for name, value in call.header_list if name.lower() not in ("host", "content-length")]
    assert [name for name, _ in made.headers] == [name for name, _ in sent]
    for (name, told), (_, real) in zip(made.headers, sent, strict=True):
        if name.lower() not in OWN:
            assert told.encode() == real.encode("latin-1"), name
    trace, real_trace = dict(made.headers)["traceparent"].split("-"), call.headers["traceparent"].split("-")
    assert (trace[0], trace[1], trace[3]) == (real_trace[0], real_trace[1], real_trace[3])
