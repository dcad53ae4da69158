from pathlib import Path

import pytest

from madeira.errors import SettingsError
from madeira.records import CALLBACK_URL, RetryPolicy
from madeira.routing.config import Rules, no_rules, parse_toml
from madeira.routing.fields import FIELDS, KINDS, Kind, schema

WHOLE = """
[[source]]
name = "billing"
secrets = ["env:BILLING_SECRET", "old"]

[[endpoint]]
name = "ledger"
url = "https://partner.example/api"
method = "PUT"
rate = 30
burst = 2
concurrency = 3
timeout = 2.5
secrets = ["whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"]
require_body = true
ordering = "payload.account"
[endpoint.headers]
Authorization = "env:LEDGER_TOKEN"
[endpoint.retry]
initial = 1
max = 8
max_attempts = 4
max_age = 600
[endpoint.breaker]
enabled = false

[[route]]
name = "payments"
source = "billing"
event_type = "payment.*"
routing_key = "ledger"
endpoint = "ledger"
"""

ENVIRON = {"BILLING_SECRET": "s3cr3t-of-billing", "LEDGER_TOKEN": "Bearer t0ken"}

SOURCE = '[[source]]\nname = "s"\nsecrets = ["a-secret"]\n'
ENDPOINT = '[[endpoint]]\nname = "e"\nurl = "http://h/"\n'
ROUTE = '[[route]]\nname = "r"\nendpoint = "e"\n'


def parse(text: str) -> Rules:
    return parse_toml(text, where="rules.toml", environ=ENVIRON)


def test_every_field_of_the_file_reaches_its_record() -> None:
    """Each field of each table stands in the records, and secrets come from the environment where they say so."""
    rules = parse(WHOLE)
    ledger = rules.endpoints["ledger"]
    assert rules.sources["billing"].secrets == ("s3cr3t-of-billing", "old")
    assert ledger.ordering == "payload.account"
    assert (ledger.url, ledger.method, ledger.rate, ledger.burst) == ("https://partner.example/api", "PUT", 30.0, 2)
    assert (ledger.concurrency, ledger.timeout, ledger.require_body) == (3, 2.5, True)
    assert ledger.headers == {"Authorization": "Bearer t0ken"}
    assert ledger.retry == RetryPolicy(initial=1, max=8, max_attempts=4, max_age=600)
    route = rules.routes[0]
    assert (route.name, route.source, route.event_type) == ("payments", "billing", "payment.*")
    assert (route.routing_key, route.endpoint) == ("ledger", "ledger")


def test_no_secret_is_shown_by_the_records() -> None:
    """The text of the rules, as an error or a log line would show it, holds no secret and no header's value."""
    shown = repr(parse(WHOLE))
    assert "s3cr3t" not in shown
    assert "t0ken" not in shown
    assert "whsec_" not in shown


def test_an_object_whose_name_is_wrong_or_taken_is_checked_like_the_others() -> None:
    """The first of two with one name, and the second; what has no name; and what cannot be opened or looked up."""
    text = """
[[endpoint]]
name = "e"
url = "ftp://x/"
secrets = ["sealed:nonsense", "env:NOT_THERE"]
rate = -1
[endpoint.client_certificate]
chain = "env:NOT_THERE"
key = "sealed:nonsense"

[[endpoint]]
name = "e"
url = "http://x/"
timeout = 0

[[endpoint]]
url = "http://x/"
burst = 0

[[route]]
name = "a b"
endpoint = "nobody"
source = 5
"""
    with pytest.raises(SettingsError) as e:
        parse(text)
    told = [part.partition(": ")[0] for part in str(e.value).removeprefix("rules.toml: ").split("; ")]
    places = [
        "endpoint number 2.timeout",
        "endpoint number 3.burst",
        "endpoint number 3.name",
        "endpoint[e].client_certificate.chain",
        "endpoint[e].client_certificate.key",
        "endpoint[e].name",
        "endpoint[e].rate",
        "endpoint[e].secrets[0]",
        "endpoint[e].secrets[1]",
        "endpoint[e].url",
        "route number 1.endpoint",
        "route number 1.name",
        "route number 1.source",
    ]
    assert sorted(place for place in told if place.startswith(("endpoint", "route"))) == places


@pytest.mark.parametrize("rules", [no_rules(), parse("")])
def test_the_callback_endpoint_is_always_there(rules: Rules) -> None:
    """Without any configuration an event can still be delivered to the address that came with it."""
    assert rules.endpoints["callback"].url == CALLBACK_URL


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[source]\n", ["not valid TOML"]),
        ("[source]\nname='s'\n", ["[[source]]", "double brackets"]),
        ("[[sourse]]\n", ["sourse: unknown field", "did you mean 'source'"]),
        ("[[source]]\nsecrets=['a-secret']\n", ["source number 1.name: is missing"]),
        ("[[source]]\nname='a b'\nsecrets=['a-secret']\n", ["source number 1.name", "'a b'"]),
        ("[[source]]\nname='s'\n", ["source[s].secrets: is missing"]),
        ("[[source]]\nname='s'\nsecrets=[]\n", ["source[s].secrets: must hold at least 1"]),
        ("[[source]]\nname='s'\nsecrets='x'\n", ["source[s].secrets: must be a list of texts, not a text"]),
        ("[[source]]\nname='s'\nsecrets=[1]\n", ["source[s].secrets[0]: must be a text, not a whole number"]),
        ("[[source]]\nname='s'\nsecrets=['']\n", ["source[s].secrets[0]: must not be empty"]),
        ("[[source]]\nname='s'\nsecrets=['env:NOT_THERE']\n", ["source[s].secrets[0]", "NOT_THERE", "not set"]),
        ("[[source]]\nname='s'\nsecrets=['whsec_%%%']\n", ["source[s].secrets[0]", "base64"]),
        (SOURCE + SOURCE, ["source[s].name", "two of this name"]),
        (ENDPOINT + "tiemout=1\n", ["endpoint[e].tiemout: unknown field; did you mean 'timeout'"]),
        (ENDPOINT + "timeout=true\n", ["endpoint[e].timeout: must be a number, not a boolean"]),
        (ENDPOINT + "timeout=0\n", ["endpoint[e].timeout", "0 is not between"]),
        (ENDPOINT + "timeout=nan\n", ["endpoint[e].timeout", "nan is not between"]),
        (ENDPOINT + "rate='30'\n", ["endpoint[e].rate", "a number, not a text"]),
        (ENDPOINT + "rate=0\n", ["endpoint[e].rate", "not between"]),
        (ENDPOINT + "burst=0\n", ["endpoint[e].burst", "not between"]),
        (ENDPOINT + "concurrency=1.5\n", ["endpoint[e].concurrency", "a whole number, not a number"]),
        (ENDPOINT + "method='TRACE'\n", ["endpoint[e].method", "'TRACE'", "POST"]),
        (ENDPOINT + "require_body=1\n", ["endpoint[e].require_body", "true or false"]),
        (ENDPOINT + "ordering='endpoints'\n", ["endpoint[e].ordering: ", '"endpoint"', "no variable endpoints"]),
        (ENDPOINT + "ordering='payload.account ='\n", ["endpoint[e].ordering: ", "is no CEL"]),
        (ENDPOINT + "ordering=''\n", ["endpoint[e].ordering: ", '"none"']),
        (ENDPOINT + "ordering=true\n", ["endpoint[e].ordering: ", "not a boolean"]),
        (ENDPOINT + "[endpoint.breaker]\nhold=60\nmax=30\n", ["endpoint[e].breaker.hold", "hold = 60 is more than max = 30"]),
        (ENDPOINT + "[endpoint.breaker]\nenabled=1\n", ["endpoint[e].breaker.enabled"]),
        (ENDPOINT + "[endpoint.breaker]\nenabled_=false\n", ["endpoint[e].breaker.enabled_", "did you mean 'enabled'"]),
        (ENDPOINT + "[endpoint.headers]\nHost='x'\n", ["endpoint[e].headers.Host: ", "set by Madeira"]),
        (ENDPOINT + "[endpoint.headers]\nWebhook-Id='x'\n", ["Webhook-Id", "set by Madeira"]),
        (ENDPOINT + "[endpoint.headers]\n'a b'='x'\n", ["endpoint[e].headers.a b: ", "not the name of a header"]),
        (ENDPOINT + '[endpoint.headers]\nX="a\\r\\nb"\n', ["endpoint[e].headers.X: ", "line break"]),
        (ENDPOINT + "[endpoint.retry]\nmax_atempts=3\n", ["endpoint[e].retry.max_atempts", "did you mean 'max_attempts'"]),
        (ENDPOINT + "[endpoint.retry]\ninitial=60\nmax=5\n", ["endpoint[e].retry.initial: ", "initial = 60", "max = 5"]),
        (ENDPOINT + "[endpoint.retry]\ndelays=[1]\nfactor=2\n", ["endpoint[e].retry.delays: ", "factor"]),
        (ENDPOINT + "[endpoint.retry]\ndelays=[]\n", ["endpoint[e].retry.delays: ", "at least 1"]),
        ("[[endpoint]]\nname='e'\n", ["endpoint[e].url: is missing"]),
        ("[[endpoint]]\nname='e'\nurl='ftp://h/'\n", ["endpoint[e].url", "http:// or https://"]),
        ("[[endpoint]]\nname='e'\nurl='http:///x'\n", ["endpoint[e].url", "with a host"]),
        ("[[endpoint]]\nname='e'\nurl='http://h:99999/'\n", ["endpoint[e].url", "not a URL"]),
        ("[[endpoint]]\nname='e'\nurl='http://u:p@h/'\n", ["endpoint[e].url", "user name"]),
        ("[[endpoint]]\nname='e'\nurl='http://h/a b'\n", ["endpoint[e].url", "a space"]),
        ("[[endpoint]]\nname='e'\nurl='http://foo..bar/'\n", ["endpoint[e].url", "no possible name"]),
        ("[[endpoint]]\nname='e'\nurl='http://127.1:7777/'\n", ["endpoint[e].url", "dotted form"]),
        (ENDPOINT + "[endpoint.headers]\nAccept-Encoding='gzip'\n", ["Accept-Encoding", "set by Madeira"]),
        (ENDPOINT + "[endpoint.headers]\ntracestate='a=b'\n", ["tracestate", "set by Madeira"]),
        ("x=" + "[" * 5000 + "]" * 5000, ["TOML", "nest"]),
        ("x=" + "1" * 5000, ["not usable TOML", "4300 digits"]),
        (ENDPOINT + "rate=0x" + "f" * 5000, ["endpoint[e].rate", "not between"]),
        (ENDPOINT + "burst=0x" + "f" * 5000, ["endpoint[e].burst", "not between"]),
        (ROUTE, ["route[r].", "there is no endpoint 'e'"]),
        (ENDPOINT + ROUTE + "source='s'\n", ["route[r].", "no source 's'"]),
        (SOURCE + ENDPOINT + ROUTE + "source='S'\n", ["known are madeira, s"]),
        (ENDPOINT + "success='statsu == 200'\n", ["endpoint[e].success: ", "statsu"]),
        (ENDPOINT + "success='status =='\n", ["endpoint[e].success: "]),
        (ENDPOINT + "success=' '\n", ["endpoint[e].success: must not be empty"]),
        (ENDPOINT + "body='{{ payload'\n", ["endpoint[e].body: "]),
        (ENDPOINT + "body='{{ paylod | tojson }}'\n", ["endpoint[e].body: ", "paylod"]),
        (ENDPOINT + "body=''\n", ["endpoint[e].body: must not be empty"]),
        (ENDPOINT + "[endpoint.headers]\nX='{{ event_id '\n", ["endpoint[e].headers.X: "]),
        (ENDPOINT + "[endpoint.headers]\nX='a'\nx='b'\n", ["endpoint[e].headers.x: ", "twice"]),
        (ENDPOINT + "[endpoint.client_certificate]\nchain='x'\n", ["chain: is not PEM", "client_certificate.key: is missing"]),
        (ENDPOINT + ROUTE + "filter='payload.amount >'\n", ["route[r].filter: "]),
        (ENDPOINT + ROUTE + "filter='status == 200'\n", ["route[r].filter: ", "status"]),
        ("[[endpoint]]\nname='e'\nurl='http://{source}/'\n", ["endpoint[e].url: ", "path and query"]),
        ("[[endpoint]]\nname='e'\nurl='http://h{source}/'\n", ["endpoint[e].url: "]),
        ("[[endpoint]]\nname='e'\nurl='http://h{.source}/'\n", ["endpoint[e].url: "]),
        ("[[endpoint]]\nname='e'\nurl='http://h:{source}/'\n", ["endpoint[e].url: "]),
        ("[[endpoint]]\nname='e'\nurl='{+source}'\n", ["endpoint[e].url: "]),
        ("[[endpoint]]\nname='e'\nurl='http://h/{sourze}'\n", ["endpoint[e].url: ", "sourze"]),
        ("[[endpoint]]\nname='e'\nurl='http://h/{'\n", ["endpoint[e].url: "]),
        ("[[endpoint]]\nname='callback'\nurl='{+target_uri}'\n", ["endpoint[callback].name: ", "built in"]),
        (ENDPOINT + ROUTE + "event_type=''\n", ["event_type", "must not be empty"]),
        (ENDPOINT + ROUTE + "event_type=2024-01-01\n", ["event_type", "a text, not a date or time"]),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, parts: list[str]) -> None:
    """Each wrong value is refused with the file, the table and the field that is wrong."""
    with pytest.raises(SettingsError) as e:
        parse(text)
    assert "rules.toml" in str(e.value)
    for part in parts:
        assert part in str(e.value)


def test_an_error_tells_no_secret() -> None:
    """A header whose value is wrong is named without its value."""
    with pytest.raises(SettingsError) as e:
        parse(ENDPOINT + '[endpoint.headers]\nAuthorization="t0p\\ns3cret"\n')
    assert "s3cret" not in str(e.value)


def test_the_example_is_a_good_configuration() -> None:
    """Whoever starts from the example starts without a mistake."""
    example = Path(__file__).parents[2] / "examples" / "madeira.toml"
    environ = {"BILLING_SECRET": "x", "LEDGER_SECRET": "y", "LEDGER_TOKEN": "z"}
    rules = parse_toml(example.read_text(), where=example.name, environ=environ)
    assert set(rules.endpoints) == {"callback", "ledger", "audit"}


def test_everything_that_is_wrong_is_told_at_once() -> None:
    """Whoever corrects a file need not start it again and again."""
    with pytest.raises(SettingsError) as e:
        parse("[[endpoint]]\nname='e'\nurl='ftp://h'\nrate='x'\n[[source]]\nname='s'\n[[route]]\nname='r'\nendpoint='f'\n")
    for part in ("endpoint[e].url", "endpoint[e].rate", "source[s].secrets", "route[r].endpoint"):
        assert part in str(e.value)


@pytest.mark.parametrize(
    "url",
    [
        "{+target_uri}",
        "https://h.example/{event_type}/{parameters.account}",
        "https://h.example{/source}",
        "https://h.example{?source,event_id}",
        "http://10.0.0.1:8080/a?b={routing_key}",
    ],
)
def test_a_url_may_hold_expressions_below_its_host(url: str) -> None:
    """The host of an endpoint is fixed, so that its lane and the policy of what may be called know it."""
    assert parse(f"[[endpoint]]\nname='e'\nurl='{url}'\n").endpoints["e"].url == url


def test_templates_and_expressions_reach_their_records() -> None:
    """What an endpoint makes of an event, and what a route lets pass, stands in the records as it was written."""
    text = ENDPOINT + 'body = \'{"id": {{ event_id | tojson }}}\'\nsuccess = "status == 200"\n' + ROUTE
    rules = parse(text + 'filter = "payload.amount > 100"\n')
    assert rules.endpoints["e"].body == '{"id": {{ event_id | tojson }}}'
    assert rules.endpoints["e"].success == "status == 200"
    assert rules.routes[0].filter == "payload.amount > 100"


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_knows_every_field(kind: Kind) -> None:
    """The API's description is made from the same table as the checks."""
    made = schema(kind)
    assert list(made["properties"]) == [field.name for field in FIELDS[kind]]
    assert made["required"] == [field.name for field in FIELDS[kind] if field.required]
    assert made["additionalProperties"] is False


@pytest.mark.parametrize("ordering", ["none", "endpoint", "payload.account", "source + '/' + string(payload.n)", "routing_key"])
def test_an_order_is_a_word_or_an_expression_over_the_event(ordering: str) -> None:
    """It reaches the record as it was written."""
    rules = parse(ENDPOINT + f'ordering = "{ordering}"\n')
    assert rules.endpoints["e"].ordering == ordering


def test_the_source_in_whose_events_madeira_tells_of_itself_is_built_in() -> None:
    """Routes may name it without its being there; nobody can have a source of that name."""
    assert parse(ENDPOINT + ROUTE + "source='madeira'\n").routes[0].source == "madeira"
    with pytest.raises(SettingsError, match=r"source\[madeira\].name: the source madeira is built in"):
        parse(SOURCE.replace('"s"', '"madeira"'))
