"""What holds an endpoint's deliveries back, seen from outside: a person, a receiver that is gone, that asks for patience, or
that fails. Whatever waits, nothing is lost, nothing counted, and the order kept.
"""

import email.utils
import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests import terminal
from tests.receiver import Answer, Call, Gate, Receiver
from tests.system.bulk import Site, site
from tests.system.conftest import Launch
from tests.system.harness import TOKEN, Madeira, wait_until

#: Seconds within which what a person does counts everywhere.
AT_ONCE_S = 1.0

#: Timings of the breakers, in seconds.
HOLD_S = 0.6

#: Calls at a time to the receiver that dies.
CAP = 8

BEARER = {"Authorization": f"Bearer {TOKEN}"}


def endpoints(receiver: Receiver) -> dict[str, dict[str, Any]]:
    def at(name: str, **more: Any) -> dict[str, Any]:
        return {"url": receiver.url(f"/{name}"), "timeout": 3, **more}

    patient = {"retry": {"initial": 0.2, "max": 0.2, "max_attempts": 3}}
    return {
        "stream": at("stream", rate=40, concurrency=1),
        "cases": at("cases", concurrency=1, retry={"initial": 3, "max": 3, "jitter": 0}),
        "terminal": at("terminal"),
        "wiped": at("wiped"),
        "bystander": at("bystander"),
        "gone": at("gone", concurrency=1),
        "seconds": at("seconds", **patient),
        "date": at("date", **patient),
        "absurd": at("absurd", **patient),
        "dying": at(
            "dying",
            concurrency=CAP,
            breaker={"enabled": True, "hold": HOLD_S, "max": 4 * HOLD_S},
            retry={"initial": 0.3, "max": 1.0, "max_attempts": 6},
        ),
        "dead": at("dead", concurrency=CAP, breaker={"enabled": True, "hold": 300, "max": 600}, retry={"initial": 60, "max": 60}),
        "quiet": at("quiet", breaker={"enabled": True, "hold": 300, "max": 600}, retry={"initial": 60, "max": 60}),
    }


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, postgres_url: str, template_database: str, shared_redis_url: str
) -> Iterator[Site]:
    with site(
        folder=tmp_path_factory.mktemp("lanes"),
        postgres_url=postgres_url,
        template_database=template_database,
        redis_url=shared_redis_url,
        endpoints=endpoints,
        threads=24,
    ) as shared:
        yield shared


def act(madeira: Madeira, name: str, action: str, reason: str | None = None) -> dict[str, Any]:
    """Do something with an endpoint over HTTP."""
    body = {"json": {"reason": reason}} if reason else {}
    answer = madeira.http.post(f"/v1/endpoints/{name}/{action}", headers=BEARER, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def shown(madeira: Madeira, name: str) -> dict[str, Any]:
    """An endpoint as the API shows it."""
    answer = madeira.http.get(f"/v1/endpoints/{name}", headers=BEARER)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def waits(madeira: Madeira, event_id: str) -> dict[str, Any]:
    """Where the one delivery of an event waits."""
    answer = madeira.http.get(f"/v1/events/{event_id}", params={"source": "test"}, headers=BEARER)
    deliveries = answer.json()["deliveries"]
    return dict(deliveries[0].get("waits", {})) if deliveries else {}


def cli(madeira: Madeira, *args: str) -> Any:
    """Run a command of the terminal; what it printed as JSON."""
    return json.loads(terminal.run(madeira.env, *args, "--json").stdout)


def ids(calls: list[Call]) -> list[str]:
    return [call.json()["event_id"] for call in calls]


# -- a person ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.alone
def test_a_pause_counts_within_a_second_and_what_waited_goes_on_in_order(shared: Site) -> None:
    madeira, receiver = shared.madeira, shared.receiver
    posted = [madeira.post("stream.x") for _ in range(3)]
    posted += [a.event_id for a in sorted(shared.bulk.post(117, "stream.x"), key=lambda a: a.seq)]
    receiver.wait_for(20, path="/stream")
    paused = time.monotonic()
    told = act(madeira, "stream", "pause", "their migration")
    assert (told["state"], told["reason"], told["by"]) == ("paused", "their migration", "admin")
    wait_until(lambda: time.monotonic() > paused + 2.5)
    calls = receiver.calls_to("/stream")
    late = max(call.at for call in calls) - paused
    print(f"the last call was {late:.3f} s after the pause was asked for")
    assert late < AT_ONCE_S
    assert waits(madeira, posted[-1])["for"] == "paused"
    document = shown(madeira, "stream")
    assert (document["state"], document["lane"]["state"]) == ("paused", "paused")
    assert document["lane"]["waiting"]["fresh"] == 120 - len(calls)

    resumed = time.monotonic()
    act(madeira, "stream", "resume")
    receiver.wait_for(120, 10, path="/stream")
    first = next(call for call in receiver.calls_to("/stream") if call.at > resumed)
    print(f"the first call was {first.at - resumed:.3f} s after the resume was asked for")
    assert first.at - resumed < AT_ONCE_S
    # What was routed side by side before the pause may have gone in another order than it was accepted in.
    seen = ids(receiver.calls_to("/stream"))
    assert seen[len(calls) :] == [e for e in posted if e not in seen[: len(calls)]]
    shared.bulk.wait_done("stream")
    assert madeira.value("SELECT count(*) FROM delivery WHERE endpoint = 'stream' AND (attempt <> 1 OR failures > 0)") == 0


def test_what_is_disabled_is_not_called_whatever_comes_due_and_all_of_it_goes_on_uncounted(shared: Site) -> None:
    """Three wait for a retry, one is in flight, three are queued."""
    madeira, receiver = shared.madeira, shared.receiver
    gate = Gate()
    receiver.queue("/cases", *[Answer(status=503)] * 3, Answer(hold=gate))
    failed = [madeira.post("cases.x") for _ in range(3)]
    for event_id in failed:
        wait_until(lambda e=event_id: len(madeira.attempts(e)) == 1, what="a failure")
    queued = [madeira.post("cases.x")]
    receiver.wait_for(4, path="/cases")
    queued += [madeira.post("cases.x") for _ in range(3)]
    act(madeira, "cases", "disable", "wrong address")
    gate.set()
    due = "SELECT bool_and(next_attempt_at < now() - interval '0.3 s') FROM delivery WHERE endpoint = 'cases' AND attempt = 1"
    wait_until(lambda: madeira.value(f"{due} AND status = 'pending'"), what="all due times")
    wait_until(lambda: waits(madeira, failed[0]).get("for") == "disabled", what="what came due is in its lane")
    assert receiver.count("/cases") == 4, "the one in flight was the last one"
    attempts = {event_id: madeira.delivery(event_id)["attempt"] for event_id in failed + queued}
    assert attempts == {**dict.fromkeys(failed, 1), queued[0]: 1, **dict.fromkeys(queued[1:], 0)}
    refused = madeira.http.post("/v1/endpoints/cases/resume", headers=BEARER)
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1].rsplit(":", 1)[-1]) == (409, "disabled")

    act(madeira, "cases", "enable")
    shared.bulk.wait_done("cases")
    rows = {e: madeira.delivery(e) for e in failed + queued}
    assert {e: (row["status"], row["attempt"], row["failures"]) for e, row in rows.items()} == {
        **dict.fromkeys(failed, ("succeeded", 2, 1)),
        **dict.fromkeys(queued, ("succeeded", 1, 0)),
    }
    after = ids(receiver.calls_to("/cases"))[4:]
    assert [e for e in after if e in failed] == failed
    assert [e for e in after if e in queued] == queued[1:]


@pytest.mark.long
def test_the_terminal_holds_and_lets_go_too_and_the_audit_says_who_and_why(shared: Site) -> None:
    madeira, receiver = shared.madeira, shared.receiver
    assert cli(madeira, "endpoints", "pause", "terminal", "--reason", "lunch")["state"] == "paused"
    event_id = madeira.post("terminal.x")
    wait_until(lambda: waits(madeira, event_id).get("for") == "paused", what="the event waits")
    (row,) = [row for row in cli(madeira, "endpoints", "lanes") if row["endpoint"] == "terminal"]
    assert (row["state"], row["waiting"]) == ("paused", 1)
    assert cli(madeira, "endpoints", "pause", "terminal", "--reason", "lunch")["changed"] is False
    assert receiver.count("/terminal") == 0
    assert cli(madeira, "endpoints", "resume", "terminal")["state"] == "active"
    receiver.wait_for(1, path="/terminal")
    audit = madeira.rows("SELECT action, who, why FROM audit WHERE what = 'endpoint terminal' AND action <> 'create' ORDER BY id")
    assert [(row["action"], row["why"]) for row in audit] == [("pause", "lunch"), ("resume", None)]
    assert all(row["who"].startswith("cli ") for row in audit)


def test_a_pause_outlives_a_wipe_of_redis_and_the_same_file_applied_again(shared: Site) -> None:
    madeira, receiver = shared.madeira, shared.receiver
    act(madeira, "wiped", "pause", "still")
    event_id = madeira.post("wiped.x")
    wait_until(lambda: waits(madeira, event_id).get("for") == "paused", what="the event waits")
    shared.redis.flushall()
    wait_until(lambda: shared.redis.exists("m:epoch"), what="the rebuild")
    madeira.configure(madeira.config)
    other = madeira.post("bystander.x")
    madeira.wait_status(other, "succeeded")
    wait_until(lambda: waits(madeira, event_id).get("for") == "paused", what="the event waits again")
    assert receiver.count("/wiped") == 0
    act(madeira, "wiped", "resume")
    madeira.wait_status(event_id, "succeeded")


# -- a receiver that is gone ------------------------------------------------------------------------------------------


def test_a_receiver_that_is_gone_disables_its_endpoint_and_enabling_it_sends_everything_in_order(shared: Site) -> None:
    madeira, receiver = shared.madeira, shared.receiver
    receiver.answer("/gone", Answer(status=410))
    posted = [a.event_id for a in shared.bulk.post(5, "gone.x")]
    call = receiver.wait_for(1, path="/gone")[0]
    wait_until(lambda: shown(madeira, "gone")["state"] == "disabled", what="the endpoint is disabled", every=0.005)
    print(f"disabled {time.monotonic() - (call.ended or 0.0):.3f} s after the answer")
    document = shown(madeira, "gone")
    assert document["by"] == "madeira"
    assert posted[0] in document["reason"]
    wait_until(lambda: waits(madeira, posted[0]).get("for") in ("disabled", "retry_after"), what="the first one waits again")
    row = madeira.delivery(posted[0])
    assert (row["status"], row["attempt"], row["failures"], row["retries"], row["line"]) == ("pending", 1, 0, 0, "fresh")
    assert [a["outcome"] for a in madeira.attempts(posted[0])] == ["permanent"]
    assert madeira.event(posted[0])["retry_count"] == 0
    wait_until(lambda: waits(madeira, posted[0]).get("for") == "disabled", what="it waits for a person")
    assert receiver.count("/gone") == 1, "nobody asked again"

    receiver.answer("/gone", Answer())
    act(madeira, "gone", "enable", "they have moved")
    shared.bulk.wait_done("gone")
    assert ids(receiver.calls_to("/gone")) == [posted[0], *posted]


def test_a_callback_address_that_is_gone_ends_that_delivery_only(shared: Site) -> None:
    madeira, receiver = shared.madeira, shared.receiver
    receiver.answer("/back", Answer())
    receiver.queue("/back", Answer(status=410))
    first = madeira.post("callback.x", target_uri=receiver.url("/back"))
    assert madeira.wait_status(first, "dead", "succeeded")["status"] == "dead"
    second = madeira.post("callback.x", target_uri=receiver.url("/back"))
    madeira.wait_status(second, "succeeded")


# -- a receiver that asks for patience --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(("name", "status", "wait_s"), [("seconds", 429, 2.0), ("date", 503, 2.0)])
def test_a_receiver_that_asks_for_patience_gets_it_for_its_whole_lane(
    shared: Site, name: str, status: int, wait_s: float
) -> None:
    madeira, receiver = shared.madeira, shared.receiver

    def asks(call: Call) -> Answer:
        until = datetime.now(UTC) + timedelta(seconds=wait_s + 1)
        value = "2" if name == "seconds" else email.utils.format_datetime(until, usegmt=True)
        return Answer(status=status, headers={"Retry-After": value})

    receiver.queue(f"/{name}", asks)
    first = madeira.post(f"{name}.x")
    call = receiver.wait_for(1, path=f"/{name}")[0]
    wait_until(lambda: shown(madeira, name)["lane"]["state"] == "retry_after", what="the wish is seen", every=0.005)
    print(f"seen {time.monotonic() - (call.ended or 0.0):.3f} s after the answer")
    second = madeira.post(f"{name}.x")
    wait_until(lambda: waits(madeira, second).get("for") == "retry_after", what="others wait too")
    assert datetime.fromisoformat(waits(madeira, second)["until"]) > datetime.now(UTC)
    calls = receiver.wait_for(3, path=f"/{name}")
    assert call.ended is not None
    assert wait_s - 0.05 <= calls[1].at - call.ended < wait_s + 2
    madeira.wait_status(first, "succeeded")
    row = madeira.delivery(second)
    assert (row["attempt"], row["failures"]) == (1, 0)
    assert madeira.delivery(first)["failures"] == (0 if status == 429 else 1)


def test_a_receiver_that_asks_for_a_lifetime_is_left_alone_for_five_minutes_and_may_ask_again(shared: Site) -> None:
    madeira, receiver = shared.madeira, shared.receiver
    receiver.answer("/absurd", Answer(status=429, headers={"Retry-After": "99999999999"}))
    madeira.post("absurd.x")
    receiver.wait_for(1, path="/absurd")
    wait_until(lambda: shown(madeira, "absurd")["lane"]["state"] == "retry_after", what="the wish is seen")
    until_s = shown(madeira, "absurd")["lane"]["until_s"]
    assert 290 < until_s <= 300


# -- a receiver that fails --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.alone
def test_a_receiver_that_dies_is_left_alone_and_comes_back_step_by_step(shared: Site) -> None:
    madeira, receiver = shared.madeira, shared.receiver
    receiver.answer("/dying", Answer(delay_s=0.03))
    shared.bulk.post(60, "dying.x")
    receiver.wait_for(20, path="/dying")
    receiver.answer("/dying", Answer(status=503, delay_s=0.03))
    died = time.monotonic()
    shared.bulk.post(300, "dying.x")
    wait_until(lambda: shown(madeira, "dying")["lane"]["state"] == "open", what="the breaker opens", every=0.005)
    print(f"open {time.monotonic() - died:.3f} s after it died: {shown(madeira, 'dying')['lane']['reason']}")
    assert shown(madeira, "dying")["lane"]["until_s"] <= HOLD_S
    # Held 0.6, 1.2 and 2.4 seconds: three may try while it is dead, the fourth finds it well.
    receiver.wait_until(lambda: sum(call.at > died + 2 * HOLD_S for call in receiver.calls_to("/dying")) >= 2, 15)
    dead = [call for call in receiver.calls_to("/dying") if call.status == 503 or call.at > died]
    failed = [call for call in dead if call.status != 200]
    probes = 3
    # A failure that was under way together with a good call may be heard of before it, and then is none of five in a row.
    last_good = max(call.ended or 0.0 for call in receiver.calls_to("/dying") if call.status == 200 and call.at < died + HOLD_S)
    mixed = sum(call.at < last_good for call in failed)
    print(f"{len(failed)} calls while it was dead, {mixed} of them beside good ones of before")
    assert mixed <= CAP
    assert len(failed) <= probes + mixed + 5 + CAP
    retries = madeira.value("SELECT sum(retries) FROM delivery WHERE endpoint = 'dying'")
    assert retries <= len(failed), "nothing that waits is counted"

    # Long enough that what a slow machine adds to each call does not keep them from overlapping.
    receiver.answer("/dying", Answer(delay_s=0.1))
    back = time.monotonic()
    shared.bulk.wait_done("dying", timeout=30)
    print(f"{time.monotonic() - back:.3f} s from its return to the last delivery")
    assert madeira.value("SELECT count(*) FROM delivery WHERE endpoint = 'dying' AND status <> 'succeeded'") == 0
    calls = [call for call in receiver.calls_to("/dying") if call.at > back]
    overlaps = []
    for n, call in enumerate(calls[:40]):
        under_way = 1 + sum(other.at <= call.at < (other.ended or 0.0) for other in calls[:n])
        ended = sum((other.ended or 0.0) <= call.at for other in calls[:n])
        overlaps.append(under_way)
        # A call that starts is counted by when it arrives, and an answer by when it was sent.
        assert under_way <= min(CAP, 1 + ended), (n, under_way, ended)
    print("under way at each start:", overlaps)
    assert overlaps[0] == 1
    assert max(overlaps) == CAP, "it came back all the way"
    failures = madeira.value(
        "SELECT count(*) FROM delivery_log l JOIN delivery d ON d.id = l.delivery_id "
        "WHERE d.endpoint = 'dying' AND l.outcome = 'retryable'"
    )
    assert madeira.value("SELECT sum(retries) FROM delivery WHERE endpoint = 'dying'") == failures
    assert shown(madeira, "dying")["lane"]["state"] == "active"


def test_a_receiver_that_is_dead_before_the_first_call_gets_what_opens_it_and_what_is_under_way_then(shared: Site) -> None:
    receiver = shared.receiver
    receiver.answer("/dead", Answer(status=503, delay_s=0.03))
    shared.bulk.post(60, "dead.x")
    wait_until(lambda: shown(shared.madeira, "dead")["lane"]["state"] == "open", what="the breaker opens")
    receiver.wait_idle()
    assert 5 <= receiver.count("/dead") <= 5 + CAP
    shared.bulk.call_off("dead")


def test_a_receiver_that_is_called_rarely_is_left_alone_after_five_failures_too(shared: Site) -> None:
    madeira, receiver = shared.madeira, shared.receiver
    receiver.answer("/quiet", Answer(status=500))
    for n in range(5):
        event_id = madeira.post("quiet.x")
        wait_until(lambda e=event_id: len(madeira.attempts(e)) == 1, what=f"failure {n}")
    last = madeira.post("quiet.x")
    wait_until(lambda: waits(madeira, last).get("for") == "breaker", what="the breaker is open")
    lane = shown(madeira, "quiet")["lane"]
    assert (lane["state"], lane["reason"], lane["waiting"]["fresh"]) == ("open", "5 failures in a row", 1)
    assert 290 < lane["until_s"] <= 300
    assert receiver.count("/quiet") == 5
    page = madeira.http.get("/metrics").text
    assert 'madeira_lane_state{endpoint="quiet",state="open"} 1.0' in page
    assert 'madeira_lane_state{endpoint="quiet",state="active"} 0.0' in page


@pytest.mark.long
def test_a_prober_that_is_killed_in_the_middle_does_not_wedge_its_lane(launch: Launch, receiver: Receiver) -> None:
    """Another process tries when the lease of the one that is gone has run out; then everything is delivered."""
    madeira = launch(
        {
            "frail": {
                "url": receiver.url("/frail"),
                "timeout": 1,
                "breaker": {"enabled": True, "hold": HOLD_S, "max": 2},
                "retry": {"initial": 0.2, "max": 0.5},
            }
        },
        env={"MADEIRA_LEASE_MARGIN_S": "1"},
    )
    madeira.api()
    workers = [madeira.worker(name=f"worker{n}", threads=8) for n in range(2)]
    receiver.answer("/frail", Answer(status=500))
    posted = [madeira.post("frail.x") for _ in range(8)]
    redis = madeira.redis
    wait_until(lambda: redis.hget("m:lane:frail:breaker", "till"), what="the breaker opens")
    gate = Gate()
    receiver.answer("/frail", Answer(hold=gate))
    probe = wait_until(lambda: redis.hget("m:lane:frail:breaker", "probe"), what="a probe")
    pid = int(probe.split(b"#")[0].split(b".")[-2])
    master = next(w for w in workers if os.getpgid(pid) == w.pid)
    receiver.wait_until(lambda: receiver.in_progress == 1, what="the probe's call")
    master.kill()
    killed = time.monotonic()
    gate.set()
    wait_until(lambda: redis.hget("m:lane:frail:breaker", "probe") not in (probe, b""), what="another probe", every=0.005)
    print(f"another one tried {time.monotonic() - killed:.3f} s after the kill")
    madeira.wait_all(40)
    assert {madeira.event(e)["status"] for e in posted} <= {"succeeded", "dead"}
    assert madeira.value("SELECT count(*) FROM delivery WHERE status = 'succeeded'") == len(posted)
    os.kill(workers[1 - workers.index(master)].pid, signal.SIGTERM)
