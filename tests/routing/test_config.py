from pathlib import Path

import pytest

from madeira.errors import SettingsError
from madeira.records import CALLBACK_URL, RetryPolicy
from madeira.routing.config import Rules, no_rules, parse_toml

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
ordering = "none"
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

SOURCE = '[[source]]\nname = "s"\nsecrets = ["x"]\n'
ENDPOINT = '[[endpoint]]\nname = "e"\nurl = "http://h/"\n'
ROUTE = '[[route]]\nname = "r"\nendpoint = "e"\n'


def parse(text: str) -> Rules:
    return parse_toml(text, where="rules.toml", environ=ENVIRON)


def test_every_field_of_the_file_reaches_its_record() -> None:
    """Each field of each table stands in the records, and secrets come from the environment where they say so."""
    rules = parse(WHOLE)
    ledger = rules.endpoints["ledger"]
    assert rules.sources["billing"].secrets == ("s3cr3t-of-billing", "old")
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


@pytest.mark.parametrize("rules", [no_rules(), parse("")])
def test_the_callback_endpoint_is_always_there(rules: Rules) -> None:
    """Without any configuration an event can still be delivered to the address that came with it."""
    assert rules.endpoints["callback"].url == CALLBACK_URL


def test_the_callback_endpoint_can_be_redefined() -> None:
    """The file may give the built-in endpoint another pace."""
    rules = parse('[[endpoint]]\nname = "callback"\nurl = "{+target_uri}"\nrate = 5\n')
    assert rules.endpoints["callback"].rate == 5.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[source]\n", ["not valid TOML"]),
        ("[source]\nname='s'\n", ["[[source]]", "double brackets"]),
        ("[[sourse]]\n", ["'sourse'", "did you mean 'source'"]),
        ("[[source]]\nsecrets=['x']\n", ["source number 1", "field name is missing"]),
        ("[[source]]\nname='a b'\nsecrets=['x']\n", ["field name", "'a b'"]),
        ("[[source]]\nname='s'\n", ["source 's'", "field secrets is missing"]),
        ("[[source]]\nname='s'\nsecrets=[]\n", ["source 's'", "at least one"]),
        ("[[source]]\nname='s'\nsecrets='x'\n", ["field secrets", "a list of texts, not a text"]),
        ("[[source]]\nname='s'\nsecrets=[1]\n", ["field secrets", "a text, not a whole number"]),
        ("[[source]]\nname='s'\nsecrets=['']\n", ["must not be empty"]),
        ("[[source]]\nname='s'\nsecrets=['env:NOT_THERE']\n", ["NOT_THERE", "not set"]),
        ("[[source]]\nname='s'\nsecrets=['whsec_%%%']\n", ["number 1", "base64"]),
        (SOURCE + SOURCE, ["source 's'", "two of this name"]),
        (ENDPOINT + "tiemout=1\n", ["endpoint 'e'", "'tiemout'", "did you mean 'timeout'"]),
        (ENDPOINT + "timeout=true\n", ["field timeout", "a number, not a boolean"]),
        (ENDPOINT + "timeout=0\n", ["field timeout", "0 is not between"]),
        (ENDPOINT + "timeout=nan\n", ["field timeout", "nan is not between"]),
        (ENDPOINT + "rate='30'\n", ["field rate", "a number, not a text"]),
        (ENDPOINT + "rate=0\n", ["field rate", "not between"]),
        (ENDPOINT + "burst=0\n", ["field burst", "not between"]),
        (ENDPOINT + "concurrency=1.5\n", ["field concurrency", "a whole number, not a number"]),
        (ENDPOINT + "method='TRACE'\n", ["field method", "'TRACE'", "POST"]),
        (ENDPOINT + "require_body=1\n", ["field require_body", "true or false"]),
        (ENDPOINT + "success='status == 200'\n", ["success", "not available in this version"]),
        (ENDPOINT + "body='{}'\n", ["body", "not available in this version"]),
        (ENDPOINT + "ordering='endpoint'\n", ["ordering", "not available in this version"]),
        (ENDPOINT + "[endpoint.breaker]\nenabled=true\n", ["breaker", "not available in this version"]),
        (ENDPOINT + "[endpoint.breaker]\nenbled=false\n", ["breaker", "did you mean 'enabled'"]),
        (ENDPOINT + "[endpoint.headers]\nHost='x'\n", ["headers", "Host", "set by Madeira"]),
        (ENDPOINT + "[endpoint.headers]\nWebhook-Id='x'\n", ["Webhook-Id", "set by Madeira"]),
        (ENDPOINT + "[endpoint.headers]\n'a b'='x'\n", ["a b", "not the name of a header"]),
        (ENDPOINT + '[endpoint.headers]\nX="a\\r\\nb"\n', ["header X", "line break"]),
        (ENDPOINT + "[endpoint.retry]\nmax_atempts=3\n", ["retry", "did you mean 'max_attempts'"]),
        (ENDPOINT + "[endpoint.retry]\ninitial=60\nmax=5\n", ["initial = 60", "max = 5"]),
        (ENDPOINT + "[endpoint.retry]\ndelays=[1]\nfactor=2\n", ["delays", "factor"]),
        (ENDPOINT + "[endpoint.retry]\ndelays=[]\n", ["delays", "at least one"]),
        ("[[endpoint]]\nname='e'\n", ["field url is missing"]),
        ("[[endpoint]]\nname='e'\nurl='ftp://h/'\n", ["field url", "http:// or https://"]),
        ("[[endpoint]]\nname='e'\nurl='http:///x'\n", ["field url", "with a host"]),
        ("[[endpoint]]\nname='e'\nurl='http://h:99999/'\n", ["field url", "not a URL"]),
        ("[[endpoint]]\nname='e'\nurl='http://u:p@h/'\n", ["field url", "user name"]),
        ("[[endpoint]]\nname='e'\nurl='http://h/{event_id}'\n", ["field url", "not available in this version"]),
        ("[[endpoint]]\nname='e'\nurl='http://h/a b'\n", ["field url", "a space"]),
        ("[[endpoint]]\nname='e'\nurl='http://foo..bar/'\n", ["endpoint 'e'", "field url", "no possible name"]),
        ("[[endpoint]]\nname='e'\nurl='http://127.1:7777/'\n", ["endpoint 'e'", "field url", "dotted form"]),
        (ENDPOINT + "[endpoint.headers]\nAccept-Encoding='gzip'\n", ["Accept-Encoding", "set by Madeira"]),
        (ENDPOINT + "[endpoint.headers]\ntracestate='a=b'\n", ["tracestate", "set by Madeira"]),
        ("x=" + "[" * 5000 + "]" * 5000, ["TOML", "nest"]),
        ("x=" + "1" * 5000, ["not usable TOML", "4300 digits"]),
        (ENDPOINT + "rate=0x" + "f" * 5000, ["field rate", "not between"]),
        (ENDPOINT + "burst=0x" + "f" * 5000, ["field burst", "not between"]),
        (ROUTE, ["route 'r'", "no endpoint 'e'"]),
        (ENDPOINT + ROUTE + "source='s'\n", ["route 'r'", "no source 's'"]),
        (SOURCE + ENDPOINT + ROUTE + "source='S'\n", ["known are s"]),
        (ENDPOINT + ROUTE + "filter='true'\n", ["filter", "not available in this version"]),
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
