"""The configuration is changed while everything runs: by the next attempt, in every process, nothing lost, nothing doubled."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from madeira.delivery.signing import sign
from madeira.store.database import Database
from tests.receiver import Answer, Call, Gate, Receiver
from tests.servers import OwnPostgres
from tests.system.conftest import Launch
from tests.system.harness import SECRET, Madeira, configurator, wait_until
from tests.system.states import most_at_once

#: Seconds within which a change counts in every process.
SOON_S = 2.0

OLD = "whsec_dGhlIG9sZCBzZWNyZXQgb2YgdGhlIHRlc3Rz"
NEW = "whsec_dGhlIG5ldyBzZWNyZXQgb2YgdGhlIHRlc3Rz"


class Load:
    """Posts events without a pause, from several threads, until it is stopped; every one must be accepted."""

    def __init__(self, madeira: Madeira, event_type: str, *, threads: int = 3) -> None:
        self._madeira = madeira
        self._type = event_type
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]
        #: What posts are signed with.
        self.secret = SECRET
        self.accepted: list[str] = []
        self.refused: list[str] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=str(self._madeira.http.base_url), timeout=15, trust_env=False) as client:
            n = 0
            while not self._stopped.is_set():
                n += 1
                event_id = f"load-{number}-{n}"
                body = json.dumps({"event_id": event_id, "event_type": self._type, "payload": n}).encode()
                stamp = str(int(time.time()))
                headers = self._madeira.sign(body) | {"X-Madeira-Timestamp": stamp}
                headers["X-Madeira-Signature"] = sign(self.secret, stamp, body)
                answer = client.post("/v1/events", content=body, headers=headers)
                (self.accepted if answer.status_code == 202 else self.refused).append(event_id)


@contextmanager
def changing(madeira: Madeira) -> Iterator[Any]:
    """What changes the configuration of a running system."""
    database = Database(url=madeira.database_url, application="tests", pool_max=1)
    database.open()
    try:
        yield configurator(database)
    finally:
        database.close()


def has_passed(seconds: float) -> None:
    """Let so much time pass: what is claimed holds from then on."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= until, seconds + 5)


def verifies(call: Call, secret: str) -> bool:
    """Whether a call is signed with `secret`, by both schemes."""
    try:
        Webhook(secret).verify(call.body, call.headers)
    except WebhookVerificationError:
        return False
    signatures = call.headers["x-madeira-signature"].split(",")
    return sign(secret, call.headers["x-madeira-timestamp"], call.body) in signatures


@pytest.mark.long
@pytest.mark.alone
def test_a_changed_url_secret_and_limit_are_used_within_two_seconds(launch: Launch, receiver: Receiver) -> None:
    """In two worker processes under load: later calls go to the new URL, with the new secret, at most two at a time."""
    for path in ("/old", "/new"):
        receiver.answer(path, Answer(delay_s=0.02))
    madeira = launch({"a": {"url": receiver.url("/old"), "secrets": [OLD], "concurrency": 12}})
    madeira.api()
    madeira.worker(processes=2)
    with Load(madeira, "a.x") as load, changing(madeira) as found:
        receiver.wait_for(100, 30)
        patch = {"url": receiver.url("/new"), "secrets": [NEW], "concurrency": 2}
        found.update("endpoint", "a", patch, expected=None, who="the test")
        changed_at = time.monotonic()
        has_passed(SOON_S + 1.5)
    madeira.wait_all(60)

    late = [call for call in receiver.calls if call.at > changed_at + SOON_S]
    assert len(late) > 20
    assert {call.path for call in late} == {"/new"}
    assert all(verifies(call, NEW) and not verifies(call, OLD) for call in late)
    assert most_at_once(late) <= 2
    assert all(verifies(call, OLD if call.path == "/old" else NEW) for call in receiver.calls), "no call mixes old and new"
    assert load.refused == []
    assert sorted(call.json()["event_id"] for call in receiver.calls) == sorted(load.accepted), "each exactly once"
    assert madeira.value("SELECT count(DISTINCT worker) FROM delivery_log") == 2
    assert madeira.value("SELECT count(*) FROM event WHERE status <> 'succeeded'") == 0


@pytest.mark.long
@pytest.mark.alone
def test_secrets_are_changed_under_load_without_a_failed_verification(launch: Launch, receiver: Receiver) -> None:
    """Both directions: a receiver that knows old and new verifies every call, and no post of the source is refused."""
    madeira = launch({"a": {"url": receiver.url("/a"), "secrets": [OLD], "concurrency": 12}})
    madeira.api(workers=2)
    madeira.worker(processes=2)
    with Load(madeira, "a.x") as load, changing(madeira) as found:
        receiver.wait_for(50, 30)
        for secrets in (["hidden:1", NEW], ["hidden:2"]):
            found.update("endpoint", "a", {"secrets": secrets}, expected=None, who="the test")
            has_passed(SOON_S)
        found.update("source", "test", {"secrets": ["hidden:1", NEW]}, expected=None, who="the test")
        has_passed(SOON_S)
        load.secret = NEW
        # A post that was signed before is on its way for a moment.
        has_passed(0.5)
        found.update("source", "test", {"secrets": ["hidden:2"]}, expected=None, who="the test")
        has_passed(SOON_S)
        done = receiver.count()
        receiver.wait_for(done + 20, 30)
    madeira.wait_all(60)

    assert load.refused == []
    assert not [call for call in receiver.calls if not (verifies(call, OLD) or verifies(call, NEW))]
    assert verifies(receiver.calls[0], OLD)
    assert not verifies(receiver.calls[0], NEW)
    assert verifies(receiver.calls[-1], NEW)
    assert not verifies(receiver.calls[-1], OLD)
    assert madeira.send(b"{}").status_code == 401, "the old secret is gone"


def test_an_endpoint_that_cannot_be_used_waits_and_goes_on_when_it_is_mended(launch: Launch, receiver: Receiver) -> None:
    """Its deliveries use up nothing meanwhile, those of others go on, and the log says once what is missing."""
    madeira = launch(
        {
            "good": {"url": receiver.url("/good")},
            "broken": {"url": receiver.url("/broken"), "headers": {"Authorization": "env:NOT_SET"}},
        }
    )
    madeira.api()
    worker = madeira.worker()
    waiting = [madeira.post("broken.x") for _ in range(3)]
    madeira.wait_status(madeira.post("good.x"), "succeeded")
    wait_until(lambda: all(madeira.event(e)["status"] == "delivering" for e in waiting), what="their routing")
    assert worker.tail(10**7).count("rules.unusable") == 1
    assert "NOT_SET is not set" in worker.tail(10**7)
    with changing(madeira) as found:
        found.update("endpoint", "broken", {"headers": {"Authorization": "Bearer x"}}, expected=None, who="the test")
    for event in waiting:
        madeira.wait_status(event, "succeeded")
        assert madeira.delivery(event)["attempt"] == 1
    assert receiver.count("/broken") == 3


def test_a_removed_endpoint_ends_what_waits_for_it(launch: Launch, receiver: Receiver) -> None:
    """What is being called ends with its call; what waits ends at once; the events say so."""
    gate = Gate()
    receiver.answer("/a", Answer(hold=gate))
    madeira = launch({"a": {"url": receiver.url("/a"), "concurrency": 1}})
    madeira.api()
    madeira.worker()
    events = [madeira.post("a.x") for _ in range(5)]
    receiver.wait_for(1)
    wait_until(lambda: all(madeira.event(e)["status"] == "delivering" for e in events), what="their routing")
    with changing(madeira) as found:
        found.delete("route", "a", expected=None, who="the test")
        removed = found.delete("endpoint", "a", expected=None, who="the test", why="gone", unfinished="cancel")
    assert (len(removed.cancelled), removed.requested) == (4, 1)
    wait_until(lambda: sorted(madeira.event(e)["status"] for e in events) == ["cancelled"] * 4 + ["delivering"], what="the end")
    gate.set()
    madeira.wait_all()
    assert sorted(madeira.event(e)["status"] for e in events) == ["cancelled"] * 4 + ["succeeded"]
    assert receiver.count("/a") == 1


@pytest.mark.long
def test_what_a_killed_worker_was_calling_ends_though_its_endpoint_was_removed(launch: Launch, receiver: Receiver) -> None:
    """No claim comes any more that would end it; reconcile does, once the lease has run out."""
    receiver.answer("/a", Answer(hold=Gate()))
    madeira = launch({"a": {"url": receiver.url("/a"), "timeout": 1}})
    madeira.api()
    worker = madeira.worker()
    event = madeira.post("a.x")
    receiver.wait_for(1)
    worker.kill()
    with changing(madeira) as found:
        found.delete("route", "a", expected=None, who="the test")
        removed = found.delete("endpoint", "a", expected=None, who="the test", why="gone", unfinished="cancel")
    assert (removed.cancelled, removed.requested) == ([], 1)
    madeira.worker(name="another")
    madeira.wait_status(event, "cancelled", timeout=30)
    assert receiver.count() == 1


@pytest.mark.long
def test_processes_that_start_without_postgres_work_once_it_is_there(
    launch: Launch, receiver: Receiver, own_postgres: OwnPostgres
) -> None:
    """Until then the API answers 503 and workers hand out nothing; nobody has to start them again."""
    madeira = launch({"a": {"url": receiver.url("/a")}}, database_url=own_postgres.url)
    own_postgres.stop()
    madeira.api()
    madeira.worker()
    answer = madeira.send(json.dumps({"event_type": "a.x", "payload": 1}).encode())
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    own_postgres.start()
    wait_until(lambda: madeira.http.get("/readyz").status_code == 200, 30, what="the API's readiness")
    wait_until(lambda: accepts(madeira), 10, what="the rules in the API")
    receiver.wait_for(1, 20)


def accepts(madeira: Madeira) -> bool:
    body: Mapping[str, Any] = {"event_id": "one", "event_type": "a.x", "payload": 1}
    return madeira.send(json.dumps(body).encode()).status_code in (200, 202)


@pytest.mark.long
def test_nobody_is_told_to_cancel_what_waits_for_a_variable(launch: Launch, receiver: Receiver) -> None:
    """The endpoint is there: the log says what it lacks in that process."""
    madeira = launch({"a": {"url": receiver.url("/a"), "headers": {"Authorization": "env:ONLY_HERE"}}})
    madeira.api()
    without = madeira.worker(name="without")
    madeira.post_many(1, "a.x")
    wait_until(lambda: "lane.unusable" in without.tail(10**7), what="the line about the lane")
    [line] = [json.loads(line) for line in without.tail(10**7).splitlines() if "lane.unusable" in line]
    assert "ONLY_HERE is not set" in line["lanes"]["a"]
    assert "cancel" not in line["detail"]
    assert "lane.unknown" not in without.tail(10**7)


@pytest.mark.long
def test_what_one_process_cannot_use_another_delivers(launch: Launch, receiver: Receiver) -> None:
    """A variable that is missing on one machine only uses up no attempt: whoever has it makes the calls."""
    madeira = launch({"a": {"url": receiver.url("/a"), "headers": {"Authorization": "env:ONLY_HERE"}}})
    madeira.api()
    without = madeira.worker(name="without")
    with_it = madeira.worker(name="with", env={"ONLY_HERE": "Bearer x"})
    events = madeira.post_many(40, "a.x")
    madeira.wait_all()
    assert {madeira.delivery(event)["attempt"] for event in events} == {1}
    assert {call.headers["authorization"] for call in receiver.calls} == {"Bearer x"}
    assert receiver.count() == 40
    assert "rules.unusable" in without.tail(10**7)
    assert "rules.unusable" not in with_it.tail(10**7)
