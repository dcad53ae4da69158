"""The sending side: what it promises holds against the real API, whatever stands or falls between the two."""

import email.utils
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira import strict_json
from madeira.client import (
    Client,
    ClientError,
    Conflict,
    Event,
    InvalidEvent,
    NotFound,
    Receipt,
    Refused,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
)
from madeira.client.events import document, encode
from madeira.delivery import signing
from tests.api.serving import ROOT, SECRET, rows, wait_until
from tests.client.conftest import answer_lost, passed_on
from tests.receiver import Answer, Call, closed_port, json_answer, silent_port

pytestmark = pytest.mark.long

EVENTS = "/v1/events"

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


def test_a_clock_that_is_wrong_is_told_with_the_refusal(between, connect):
    """The API must not say why a signature does not hold; the client can see for itself."""
    an_hour_ago = email.utils.formatdate(time.time() - 3600, usegmt=True)
    between.default(Answer(status=401, headers={"Date": an_hour_ago}, body="no"))
    with pytest.raises(Unauthorized, match=r"this machine's clock is 36\d\d s ahead of the server's"):
        connect(between.url("")).send("order.paid", 1)


def test_a_lost_answer_is_not_a_lost_event_and_not_a_second_one(api, between, connect, database_url):
    """The connection ends after the commit; the next try has the same id and is signed for itself."""
    between.queue(EVENTS, answer_lost(api), answer_lost(api))
    between.default(passed_on(api))
    receipt = connect(between.url("")).send("order.paid", {"n": 1})
    assert receipt.duplicate
    assert len(between.calls) == 3
    assert {call.json()["event_id"] for call in between.calls} == {receipt.event_id}
    assert rows(database_url) == 1


def test_an_api_that_goes_away_and_comes_back_gets_the_event(api, connect):
    """Who sends meanwhile waits, and is told of one new event."""
    watching = Watching()
    client = connect(url(api), transport=watching, retries=1000, patience_s=60)
    client.send("order.paid", {"n": 1}, event_id="before")
    api.stop()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(client.send, "order.paid", {"n": 2}, event_id="meanwhile")
        assert watching.failed.wait(20)
        api.start()
        receipt = sent.result(60)
    assert not receipt.duplicate
    assert client.send("order.paid", {"n": 1}, event_id="before").duplicate


def test_retry_after_is_honoured_and_each_try_is_signed_anew(api, between, connect):
    """429 with Retry-After: the next try comes no earlier, with a timestamp and a signature of its own."""
    until: list[float] = []

    def busy(_call: Call) -> Answer:
        until.append(int(time.time()) + 2)
        return Answer(status=429, headers={"Retry-After": email.utils.formatdate(until[0], usegmt=True)})

    between.queue(EVENTS, Answer(status=429, headers={"Retry-After": "1"}), busy)
    between.default(passed_on(api))
    receipt = connect(between.url("")).send("order.paid", 1)
    first, second, third = between.calls
    assert second.at - first.ended >= 1
    # Two clocks of one machine.
    assert third.wall >= until[0] - 0.01
    assert not receipt.duplicate
    stamps = [call.headers["x-madeira-timestamp"] for call in between.calls]
    assert len(set(stamps)) == 3
    for call, stamp in zip(between.calls, stamps, strict=True):
        signature = call.headers["x-madeira-signature"]
        assert signing.verify((SECRET,), stamp, signature, call.body, now=call.wall)


def test_a_source_over_its_limit_gets_its_events_in_all_the_same(serve, database_url, redis_url, connect):
    """The real API says 429; the client waits as it was told, and every event is in once."""
    limited = f'[[source]]\nname = "shop"\nsecrets = ["{SECRET}"]\nrate = 3\nburst = 2\n'
    watching = Watching()
    client = connect(url(serve(database_url, redis_url, config=limited).start()), transport=watching)
    receipts = [client.send("order.paid", {"n": n}) for n in range(5)]
    assert not any(receipt.duplicate for receipt in receipts)
    assert watching.statuses.count(202) == 5
    assert 429 in watching.statuses
    assert rows(database_url) == 5


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_an_answer_that_passes_is_tried_again(api, between, connect, status):
    """Whoever gave it, with whatever body."""
    between.queue(EVENTS, Answer(status=status, body="<html>busy</html>"), Answer(status=status))
    between.default(passed_on(api))
    assert not connect(between.url("")).send("order.paid", 1).duplicate
    assert len(between.calls) == 3


@pytest.mark.parametrize(
    "broken",
    [Answer(reset=True), Answer(no_answer=True), Answer(reset_after=60), Answer(raw=b"nonsense\r\n\r\n")],
    ids=["reset", "closed", "half", "nonsense"],
)
def test_a_broken_answer_is_tried_again(api, between, connect, broken):
    """It says nothing about the event."""
    between.queue(EVENTS, broken)
    between.default(passed_on(api))
    assert not connect(between.url("")).send("order.paid", 1).duplicate
    assert len(between.calls) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 415, 422])
def test_a_decision_is_not_asked_for_twice(between, connect, status):
    """Other answers of 4xx stay as they are."""
    between.default(Answer(status=status, body="<p>no</p>\x00", headers={"Content-Type": "text/html"}))
    with pytest.raises(Refused, match=rf"^{status} unknown: <p>no</p>") as caught:
        connect(between.url("")).send("order.paid", 1)
    assert len(between.calls) == 1
    assert caught.value.status == status
    assert "\x00" not in str(caught.value)


def test_the_number_of_tries_is_bounded(connect):
    """One try and three further ones, and the error has what is needed to go on."""
    with (
        closed_port() as port,
        pytest.raises(Unavailable, match=r"took no decision in 4 tries; the last one: ConnectError") as caught,
    ):
        connect(f"http://127.0.0.1:{port}", retries=3).send("order.paid", {"n": 1})
    error = caught.value
    assert (error.tries, error.status, error.retry_after_s) == (4, None, None)
    [fields] = error.unconfirmed
    assert uuid.UUID(fields["event_id"]).version == 7
    assert fields["payload"] == {"n": 1}


def test_the_time_of_all_tries_is_bounded(connect):
    """Also by a server that takes connections and never answers."""
    with silent_port() as port:
        client = connect(f"http://127.0.0.1:{port}", timeout_s=0.2, patience_s=0.7, retries=1000)
        started = time.monotonic()
        with pytest.raises(Unavailable, match="ReadTimeout"):
            client.send("order.paid", 1)
        assert 0.4 <= time.monotonic() - started < 3


def test_who_is_asked_to_wait_longer_than_the_patience_is_told_at_once(between, connect):
    """With how long to wait, and without waiting."""
    between.default(json_answer({"detail": "shop may send 5 events a second"}, status=429, headers={"Retry-After": "600"}))
    with pytest.raises(Unavailable, match=r"would pass patience_s=60\); the last one: 429: shop may send 5") as caught:
        connect(between.url("")).send("order.paid", 1)
    assert len(between.calls) == 1
    assert caught.value.retry_after_s == 600
    assert caught.value.status == 429


@pytest.mark.parametrize(
    "answer",
    [
        Answer(body="<html>Welcome to the hotel</html>"),
        Answer(status=204),
        json_answer(
            {
                "event_id": "another",
                "source": "shop",
                "trace_id": "t",
                "status": "pending",
                "duplicate": False,
                "created_at": "2026-01-02T03:04:05Z",
            }
        ),
        json_answer({"event_id": "mine", "duplicate": False}),
        json_answer(["mine"]),
    ],
    ids=["html", "empty", "another", "half", "list"],
)
def test_a_success_that_is_no_receipt_is_no_promise(between, connect, answer):
    """A page that answers 200 to everything does not make an event accepted."""
    between.default(answer)
    with pytest.raises(UnexpectedAnswer, match="not with a receipt for mine") as caught:
        connect(between.url("")).send("order.paid", 1, event_id="mine")
    assert [fields["event_id"] for fields in caught.value.unconfirmed] == ["mine"]


def test_a_redirect_is_not_followed(between, connect):
    """The event would go to whoever the answer names."""
    between.answer(EVENTS, Answer(status=307, headers={"Location": between.url("/elsewhere")}))
    with pytest.raises(UnexpectedAnswer, match="/elsewhere"):
        connect(between.url("")).send("order.paid", 1)
    assert between.count("/elsewhere") == 0


def test_an_answer_without_end_does_not_fill_the_memory(between, connect):
    """It is given up at a size that no answer of Madeira has."""
    between.default(Answer(body=b" " * (17 * 1024 * 1024)))
    with pytest.raises(Unavailable, match="longer than 16777216 bytes"):
        connect(between.url(""), retries=0).send("order.paid", 1)


def test_closing_wakes_whoever_waits_for_the_next_try(between, connect):
    """A program that ends does not wait for its patience."""
    between.default(Answer(status=503, headers={"Retry-After": "30"}))
    client = connect(between.url(""))
    raised: list[ClientError] = []

    def send() -> None:
        with pytest.raises(ClientError, match="is closed") as caught:
            client.send("order.paid", 1)
        raised.append(caught.value)

    thread = threading.Thread(target=send)
    thread.start()
    between.wait_until(lambda: between.answered == 1)
    wait_until(lambda: waits(thread), "the client to wait for its next try")
    client.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised[0].unconfirmed) == 1
    with pytest.raises(ClientError, match="is closed"):
        client.send("order.paid", 1)
    assert between.count() == 1


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


def test_a_cancel_whose_answer_got_lost_is_told_as_done(api, between, connect):
    """The conflict that its repetition meets is its own doing."""
    between.default(passed_on(api))
    client = connect(between.url(""))
    client.send("order.paid", {"n": 1}, event_id="lost-cancel", deliver_at=in_an_hour())
    between.queue("/v1/events/lost-cancel/cancel", answer_lost(api))
    assert client.cancel("lost-cancel").status == "cancelled"
    assert between.count("/v1/events/lost-cancel/cancel") == 2


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


class Watching(httpx.BaseTransport):
    """A transport that tells when a connection could not be made, and which answers came."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()
        self.failed = threading.Event()
        self.statuses: list[int] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = self._inner.handle_request(request)
        except httpx.ConnectError:
            self.failed.set()
            raise
        self.statuses.append(response.status_code)
        return response

    def close(self) -> None:
        self._inner.close()


def url(api) -> str:
    return f"http://127.0.0.1:{api.port}"


def waits(thread: threading.Thread) -> bool:
    """Whether a thread is in some wait of the module `threading` now."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)
