"""The sending side: what it promises holds against the real API, whatever stands or falls between the two."""

import json
import os
import subprocess
import sys
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira import strict_json
from madeira.client import (
    Client,
    Conflict,
    Event,
    InvalidEvent,
    NotFound,
    Receipt,
    Refused,
    Unauthorized,
)
from madeira.client.events import document, encode
from tests.api.serving import ROOT, SECRET
from tests.client.conftest import in_an_hour, url
from tests.receiver import Answer, closed_port

pytestmark = pytest.mark.long

_WATCH = """
import os, sys
read = set()
for name in ("__getitem__", "__contains__", "__iter__"):
    def watched(self, *args, original=getattr(os._Environ, name)):
        read.update(args or self._data)
        return original(self, *args)
    setattr(os._Environ, name, watched)
import madeira.client
server = {"actors", "dramatiq", "falcon", "gunicorn", "jinja2", "prometheus_client", "psycopg", "psycopg_pool", "redis",
          "structlog", "madeira.log", "madeira.settings"}
print(sorted(server & sys.modules.keys()), sorted(str(name) for name in read if "MADEIRA_" in str(name)))
"""


def test_importing_the_client_imports_nothing_of_the_server_and_reads_no_setting():
    """An upstream needs no database driver, and may have settings of Madeira that make no sense."""
    env = os.environ | {"MADEIRA_PORT": "none", "MADEIRA_NONSENSE": "1"}
    done = subprocess.run([sys.executable, "-c", _WATCH], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"


def test_an_event_that_was_sent_is_committed_with_every_field(shared_api, connect):
    """What goes in by arguments is what the API shows."""
    client = connect(url(shared_api))
    at = datetime.now(timezone(timedelta(hours=5))).replace(microsecond=0) + timedelta(hours=1)
    receipt = client.send(
        "order.paid",
        {"price": 1.5, "name": "Zo\u00eb \u2028 \U0001f600", "none": None},
        event_id="all-fields",
        target_uri="https://partner.example/hook",
        parameters={"account": "7"},
        routing_key="ledger",
        deliver_at=at,
        trace_id="trace-7",
    )
    assert receipt.event_id == "all-fields"
    assert (receipt.source, receipt.trace_id, receipt.status, receipt.duplicate) == ("shop", "trace-7", "pending", False)
    assert abs(receipt.created_at - datetime.now(UTC)) < timedelta(minutes=1)
    found = client.event("all-fields")
    assert found["payload"] == {"price": 1.5, "name": "Zo\u00eb \u2028 \U0001f600", "none": None}
    assert found["target_uri"] == "https://partner.example/hook"
    assert found["parameters"] == {"account": "7"}
    assert found["routing_key"] == "ledger"
    assert datetime.fromisoformat(found["deliver_at"]) == at


def test_an_event_without_an_id_gets_a_uuid_of_version_7_from_the_client(shared_api, connect):
    """Before the first try: the API never makes one."""
    receipt = connect(url(shared_api)).send("order.paid", None)
    assert uuid.UUID(receipt.event_id).version == 7


def test_the_same_event_again_is_a_duplicate(shared_api, connect):
    """The receipt says so, and is the first one's in all else."""
    client = connect(url(shared_api))
    first, second = (client.send("order.paid", {"n": 1}, event_id="twice") for _ in range(2))
    assert not first.duplicate
    assert second.duplicate
    assert (first.trace_id, first.created_at) == (second.trace_id, second.created_at)


def test_another_event_under_the_same_id_is_a_conflict(shared_api, connect):
    """Not a duplicate, and not tried again."""
    client = connect(url(shared_api))
    client.send("order.paid", {"n": 1}, event_id="taken")
    with pytest.raises(Conflict, match=r"^409 conflict: an event with this id was accepted before") as caught:
        client.send("order.paid", {"n": 2}, event_id="taken")
    assert caught.value.status == 409
    assert caught.value.type == "conflict"
    assert caught.value.tries == 1


def test_a_refusal_names_each_field_that_is_wrong(shared_api, connect):
    """As the API told them, in one error."""
    with pytest.raises(Refused) as caught:
        connect(url(shared_api)).send("not a type", 1, trace_id="no spaces", event_id="x y")
    assert caught.value.status == 422
    assert {problem.field for problem in caught.value.errors} == {"event_type", "trace_id", "event_id"}
    assert all(problem.field in str(caught.value) and problem.detail for problem in caught.value.errors)
    assert caught.value.unconfirmed == ()


@pytest.mark.parametrize(
    "who", [{"secret": "a-wrong-secret"}, {"source": "nobody", "secret": "a-wrong-secret"}], ids=["secret", "source"]
)
def test_a_wrong_secret_is_told_as_such_and_shown_nowhere(shared_api, connect, who):
    """Neither in the error nor in its traceback, nor in the client's own representation."""
    client = connect(url(shared_api), **who)
    with pytest.raises(Unauthorized, match="source, its signature or its timestamp") as caught:
        client.send("order.paid", 1)
    assert "a-wrong-secret" not in "".join(traceback.format_exception(caught.value))
    assert "a-wrong-secret" not in repr(caught.value) + repr(client) + repr(vars(caught.value))
    assert repr(client) == f"Client('{url(shared_api)}', source='{who.get('source', 'shop')}')"


def test_proxies_and_netrc_of_the_environment_are_not_used(shared_api, connect, monkeypatch, tmp_path):
    """Credentials out of .netrc would make somebody else of the source."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login admin password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with closed_port() as port:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        assert connect(url(shared_api), retries=0).send("order.paid", 1).source == "shop"


def test_threads_share_a_client(shared_api, connect):
    """Every event is accepted once, under its own id."""
    client = connect(url(shared_api))

    def send(n: int) -> Receipt:
        return client.send("order.paid", {"n": n}, event_id=f"shared-{n}")

    with ThreadPoolExecutor(12) as pool:
        receipts = list(pool.map(send, range(200)))
    assert [receipt.event_id for receipt in receipts] == [f"shared-{n}" for n in range(200)]
    assert not any(receipt.duplicate for receipt in receipts)


def test_a_base_address_with_a_path_is_kept(api, between, connect):
    """A gateway may have Madeira below a path of its own."""
    between.default(Answer(status=404))
    with pytest.raises(NotFound):
        connect(between.url("/gateway/")).event("evt:1/2?")
    [call] = between.calls
    assert call.path == "/gateway/v1/events/evt%3A1%2F2%3F"


def test_an_event_of_its_own_is_read_and_nobody_elses(shared_api, connect):
    """By the source's signature alone."""
    client = connect(url(shared_api))
    client.send("order.paid", {"n": 1}, event_id="to-read", deliver_at=in_an_hour())
    assert client.event("to-read")["status"] == "pending"
    stranger = connect(url(shared_api), source="other", secret="another-secret-old")
    with pytest.raises(NotFound, match="404 unknown-event: there is no event 'to-read'"):
        stranger.event("to-read")
    with pytest.raises(NotFound):
        stranger.cancel("to-read", "curious")
    assert client.event("to-read")["status"] == "pending"


def test_a_cancel_ends_the_event_and_a_second_one_is_told_so(shared_api, connect):
    """The second has nothing left to end."""
    client = connect(url(shared_api))
    client.send("order.paid", {"n": 1}, event_id="to-cancel", deliver_at=in_an_hour())
    done = client.cancel("to-cancel", "the order was withdrawn")
    assert (done.event_id, done.source, done.status) == ("to-cancel", "shop", "cancelled")
    assert client.event("to-cancel")["status"] == "cancelled"
    with pytest.raises(Conflict, match="is cancelled already"):
        client.cancel("to-cancel", "again")


@pytest.mark.parametrize("event_id", ["", ".", ".."])
def test_an_id_that_means_another_address_is_not_asked_for(between, connect, event_id):
    """The signature of a read covers no address."""
    with pytest.raises(InvalidEvent, match="cannot be the id"):
        connect(between.url("")).event(event_id)
    assert between.count() == 0


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (object(), "a object is no JSON value"),
        (float("nan"), "not JSON compliant"),
        ("\ud800", "half of a surrogate pair"),
        ({(1, 2): 3}, "keys must be"),
        (b"bytes", "a bytes is no JSON value"),
    ],
    ids=["object", "nan", "surrogate", "key", "bytes"],
)
def test_what_json_cannot_say_is_refused_before_it_is_sent(between, connect, payload, reason):
    """The error is a ValueError too."""
    with pytest.raises(InvalidEvent, match=reason) as caught:
        connect(between.url("")).send("order.paid", payload)
    assert isinstance(caught.value, ValueError)
    assert between.count() == 0


def test_a_time_without_a_zone_is_refused_before_it_is_sent(between, connect):
    """It would mean another moment on another machine."""
    with pytest.raises(InvalidEvent, match="deliver_at needs a zone"):
        connect(between.url("")).send("order.paid", 1, deliver_at=datetime(2030, 1, 2))
    assert between.count() == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"url": "madeira.example"}, "http:// or https://"),
        ({"url": "ftp://madeira.example"}, "http:// or https://"),
        ({"url": "http://"}, "name a host"),
        ({"url": "http://a:b@madeira.example"}, "credentials"),
        ({"url": "http://madeira.example/?a=1"}, "a query"),
        ({"source": ""}, "source must be"),
        ({"source": "a\r\nX-Evil: 1"}, "source must be"),
        ({"secret": ""}, "everybody could sign"),
        ({"secret": "s3cret\ud800"}, "cannot be written in UTF-8"),
        ({"timeout_s": 0}, "timeout_s is a number of seconds above 0"),
        ({"patience_s": float("nan")}, "patience_s is a number of seconds above 0"),
        ({"retries": -1}, "retries is a number of tries"),
    ],
    ids=repr,
)
def test_a_client_that_could_not_work_is_not_made(changed, reason):
    """The message names the argument and the remedy, and no secret."""
    arguments = {"url": "http://127.0.0.1:9", "source": "shop", "secret": SECRET} | changed
    with pytest.raises(ValueError, match=reason) as caught:
        Client(arguments.pop("url"), **arguments)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_any_json_value_is_a_payload_that_the_strict_parser_reads_as_it_was(payload):
    """On one line, as a batch needs it."""
    line = encode(document(Event(event_type="a.b", payload=payload)))
    assert b"\n" not in line
    parsed = strict_json.parse(line)
    assert parsed is not None
    assert json.dumps(parsed.values["payload"]) == json.dumps(payload)
