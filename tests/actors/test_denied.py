"""What the policy denies, from the queue to the log: one attempt on record, dead as policy, and nobody called."""

import json
import socket
from typing import Any

import pytest

from madeira.broker.queues import DEAD_LETTER, ROUTE, Ensure, ensure_delivery
from madeira.delivery.client import Caller
from madeira.delivery.resolve import FRESH_S
from madeira.egress import Egress
from madeira.store import replay
from madeira.store.database import Database
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.delivery.places import Names
from tests.receiver import Answer, Receiver
from tests.store import making
from tests.system.harness import wait_until


def log_rows(process: InProcess) -> list[dict[str, Any]]:
    """Every attempt that is on record, oldest first."""
    rows = process.conn.execute("SELECT to_jsonb(l) FROM delivery_log l ORDER BY id")
    return [row for (row,) in rows]


def reconcile(process: InProcess) -> None:
    """Look for what is unfinished and not known to the broker: twice, in full."""
    from actors.reconcile import run

    database = Database(url=process.settings.database_url, application="test", pool_max=2)
    database.open()
    try:
        for _ in range(2):
            assert run(process.queues, database, period_s=60.0, force=True) is not None
    finally:
        database.close()


def call_by(process: InProcess, *allow: str, names: Names | None = None) -> None:
    """Let the worker call by a policy that allows `allow`, and resolve by `names`, each attempt anew."""
    resolver = None
    if names is not None:
        names.step = FRESH_S
        resolver = names.resolver()
    process.tools.caller.close()
    process.tools.caller = Caller(max_connections=32, egress=Egress(allow=allow), resolver=resolver)


def test_a_denied_address_is_one_attempt_and_the_end(make: Make, receiver: Receiver) -> None:
    """Recorded, dead with the class policy, told as a dead letter, and not queued again by anybody."""
    process = make(egress_allow=())
    process.start()
    ref = process.routed()
    row = process.wait_status(ref, "dead")
    assert (row["failure_class"], row["attempt"], row["failures"]) == ("policy", 1, 1)
    assert "MADEIRA_EGRESS_ALLOW=127.0.0.1" in row["last_error"]
    process.wait_place(ref, "nowhere")
    process.wait_place_of(DEAD_LETTER, f"{ref.delivery_id}:{ref.seq}:{ref.lane}", "nowhere")
    reconcile(process)
    assert process.place(ref).kind == "nowhere"
    [attempt] = log_rows(process)
    assert (attempt["outcome"], attempt["error_code"], attempt["settled_as"]) == ("permanent", "denied_by_policy", "dead")
    assert attempt["status_code"] is None
    assert receiver.connections == 0


def test_a_denied_address_is_dead_as_soon_as_it_is_routed(make: Make, receiver: Receiver) -> None:
    """No attempt is made of what is known to be denied; the event is dead, and may be routed again once the policy is mended."""
    process = make(egress_allow=())
    process.start()
    seq = making.accept(process.conn, target_uri=receiver.url("/callback"))
    process.queues.ensure([Ensure(ROUTE, str(seq))])
    process.wait_place_of(ROUTE, str(seq), "nowhere")
    rows = process.conn.execute("SELECT status, failure_class, last_error FROM delivery WHERE event_seq = %s", (seq,)).fetchall()
    assert {(status, failure_class) for status, failure_class, _ in rows} == {("dead", "policy")}
    assert all("denied_by_policy" in error for _, _, error in rows)
    assert log_rows(process) == []
    assert receiver.connections == 0


def test_a_name_that_becomes_internal_is_not_called_again(make: Make, receiver: Receiver) -> None:
    """The first attempt is answered 503; the retry finds this machine behind the name, and so does a replay by hand."""
    receiver.default(Answer(status=503))
    process = make({"url": f"http://some.test:{receiver.port}/a", "retry": {"initial": 0.1, "max": 0.1}})
    names = Names("127.0.0.1")
    names.later.append(["169.254.169.254"])
    call_by(process, "127.0.0.1", names=names)
    process.start()
    ref = process.routed()
    row = process.wait_status(ref, "dead")
    assert (row["failure_class"], row["attempt"]) == ("policy", 2)
    event_id, source = process.event(ref)["event_id"], process.event(ref)["source"]
    replay.replay(process.conn, source, event_id, "the tests", "the same again")
    process.queues.ensure([ensure_delivery(ref)])
    wait_until(lambda: len(log_rows(process)) == 3, what="the third attempt")
    assert process.wait_status(ref, "dead")["failure_class"] == "policy"
    assert [r["error_code"] for r in log_rows(process)] == ["http_503", "denied_by_policy", "denied_by_policy"]
    assert (receiver.count(), receiver.connections) == (1, 1)


def test_a_replay_after_the_policy_is_mended_is_delivered(make: Make, receiver: Receiver) -> None:
    """Dead as policy is not dead for ever."""
    process = make(egress_allow=())
    process.start()
    ref = process.routed()
    process.wait_status(ref, "dead")
    call_by(process, "127.0.0.1")
    replay.replay(process.conn, process.event(ref)["source"], process.event(ref)["event_id"], "the tests", "mended")
    process.queues.ensure([ensure_delivery(ref)])
    process.wait_status(ref, "succeeded")
    assert process.outcomes(ref) == ["permanent", "succeeded"]
    assert receiver.count() == 1


def test_a_name_that_does_not_resolve_is_tried_again_to_the_limit(make: Make, receiver: Receiver) -> None:
    """It is the network's failure, counted and retried, and then a dead letter that says so."""
    process = make({"url": "https://does-not-exist.invalid/a", "retry": {"initial": 0.1, "max": 0.1, "max_attempts": 3}})
    names = Names()
    names.failure = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    call_by(process, "127.0.0.1", names=names)
    process.start()
    ref = process.routed()
    row = process.wait_status(ref, "dead")
    assert (row["failure_class"], row["attempt"], row["failures"]) == ("network", 3, 3)
    assert [(r["outcome"], r["error_code"]) for r in log_rows(process)] == [("retryable", "dns")] * 3
    assert names.asked == ["does-not-exist.invalid"] * 3


@pytest.mark.parametrize(
    "url",
    [
        "http://xn--/",
        "http://\u2460\u2461\u2466.0.0.1/",
        "http://a b/",
        "http://x\r\ny/",
        "http://a:99999/",
        f"http://{'a' * 300}/",
    ],
    ids=ascii,
)
def test_an_impossible_url_that_came_past_the_checks_is_one_attempt_and_the_end(make: Make, receiver: Receiver, url: str) -> None:
    """Put into the database by hand: recorded, terminal, with a reason; the worker goes on with others."""
    process = make()
    process.conn.execute("UPDATE endpoint SET spec = jsonb_set(spec, '{url}', %s::jsonb) WHERE name = 'a'", (json.dumps(url),))
    process.start()
    ref = process.routed()
    row = process.wait_status(ref, "dead")
    assert row["attempt"] == 1
    [attempt] = log_rows(process)
    assert (attempt["outcome"], attempt["error_code"], attempt["settled_as"]) == ("permanent", "bad_url", "dead")
    process.wait_place(ref, "nowhere")
    reconcile(process)
    assert process.place(ref).kind == "nowhere"
    assert receiver.connections == 0
