"""The sending side when things go wrong in between: what is tried again, for how long, and what is decided for good."""

import email.utils
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from madeira.client import (
    ClientError,
    Refused,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
)
from madeira.delivery import signing
from tests.api.serving import SECRET, rows
from tests.client.conftest import Watching, answer_lost, in_an_hour, passed_on, url
from tests.receiver import Answer, Call, closed_port, json_answer, silent_port
from tests.system.harness import wait_until

pytestmark = pytest.mark.long

EVENTS = "/v1/events"


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
    wait_until(lambda: waits(thread), what="the client to wait for its next try")
    client.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised[0].unconfirmed) == 1
    with pytest.raises(ClientError, match="is closed"):
        client.send("order.paid", 1)
    assert between.count() == 1


def test_a_cancel_whose_answer_got_lost_is_told_as_done(api, between, connect):
    """The conflict that its repetition meets is its own doing."""
    between.default(passed_on(api))
    client = connect(between.url(""))
    client.send("order.paid", {"n": 1}, event_id="lost-cancel", deliver_at=in_an_hour())
    between.queue("/v1/events/lost-cancel/cancel", answer_lost(api))
    assert client.cancel("lost-cancel").status == "cancelled"
    assert between.count("/v1/events/lost-cancel/cancel") == 2


def waits(thread: threading.Thread) -> bool:
    """Whether a thread is in some wait of the module `threading` now."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"
