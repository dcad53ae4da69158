"""Events in every state at once, in a system that runs; what a test of losses breaks, and what it then finds.

One cast of events is on the stage at a time: some wait behind a cap, some are in flight, one waits for its retry, one for
its time, one for a person who holds its endpoint, some behind a breaker, some for a router that is frozen, and some have
ended. The test breaks something, the curtain is opened, and every event must end as if nothing had happened: each called once
per attempt, and never more than the cap at once.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from madeira.broker.queues import DELIVER, Place, Queues
from tests.receiver import Answer, Call, Gate, Receiver
from tests.system.harness import TOKEN, Madeira, Process, later, wait_until

#: Timings of the systems that these casts enter, shorter still than the harness's own.
BRISK: Mapping[str, str] = {
    "MADEIRA_BEAT_S": "0.2",
    "MADEIRA_SILENCE_S": "1.5",
    "MADEIRA_LEASE_MARGIN_S": "2",
    "MADEIRA_RECONCILE_S": "0.25",
}

#: Calls that the endpoint `capped` takes at once.
CAP = 2

#: Events for the endpoint `capped`: the first ones are in flight, the others wait behind the cap.
CROWD = 5

#: Events for the endpoint `shy`, whose first attempts fail and open its breaker.
SHY = 5

#: Seconds that a call may take: longer than the curtain stays closed, on a busy machine too.
CALL_S = 10.0

#: Seconds until the one event's retry, and until the other's time.
LATER_S = 0.7


def endpoints(receiver: Receiver) -> dict[str, dict[str, Any]]:
    """The endpoints that the cast needs."""
    return {
        "good": {"url": receiver.url("/good"), "timeout": CALL_S, "breaker": {"enabled": True}},
        "refuse": {"url": receiver.url("/refuse"), "timeout": CALL_S, "rate": 50},
        "flaky": {"url": receiver.url("/flaky"), "timeout": CALL_S, "retry": {"initial": LATER_S, "max": LATER_S}},
        "capped": {"url": receiver.url("/capped"), "timeout": CALL_S, "concurrency": CAP},
        "shy": {
            "url": receiver.url("/shy"),
            "timeout": CALL_S,
            "retry": {"initial": LATER_S, "max": LATER_S},
            "breaker": {"enabled": True, "hold": 1.5, "max": 1.5},
        },
        "asking": {"url": receiver.url("/asking"), "timeout": CALL_S, "retry": {"initial": LATER_S, "max": LATER_S}},
        "paused": {"url": receiver.url("/paused"), "timeout": CALL_S},
    }


#: Whether the first attempt of an event's delivery has failed.
_WAITS_FOR_ITS_RETRY = (
    "SELECT true FROM delivery d JOIN event e ON e.seq = d.event_seq WHERE e.event_id = %s AND d.attempt = 1 "
    "AND d.status = 'pending'"
)


@dataclass(frozen=True)
class End:
    """How an event must end: its status, and how often it was called."""

    status: str
    calls: int


@dataclass
class Cast:
    """The events on the stage. `ends` says how each must end."""

    madeira: Madeira
    receiver: Receiver
    router: Process
    #: Opens to let the calls to `capped` be answered.
    curtain: Gate = field(default_factory=Gate)
    ends: dict[str, End] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)

    def enter(self) -> None:
        """Post the events and wait until each is where it belongs."""
        self.receiver.forget()
        failed: set[str] = set()

        def fails_once(call: Call) -> Answer:
            first = call.webhook_id not in failed
            failed.add(call.webhook_id)
            return Answer(status=503 if first else 200)

        def asks_for_patience(call: Call) -> Answer:
            return replace(fails_once(call), headers={"Retry-After": "2"})

        self.receiver.answer("/flaky", fails_once)
        self.receiver.answer("/shy", fails_once)
        self.receiver.answer("/asking", asks_for_patience)
        self.receiver.answer("/refuse", Answer(status=400))
        self.receiver.answer("/capped", Answer(hold=self.curtain))

        self._hold("pause")
        dead = self._post("refuse.x", End("dead", 1))
        good = self._post("good.x", End("succeeded", 1))
        for _ in range(CROWD):
            self._post("capped.x", End("succeeded", 1))
        self._post("paused.x", End("succeeded", 1))
        for _ in range(SHY):
            self._post("shy.x", End("succeeded", 2))
        unrouted = self._post("good.x", End("cancelled", 0), deliver_at=later(60))
        self.cancel(unrouted)
        self.receiver.wait_for(CAP, path="/capped")
        failing = self._post("flaky.x", End("cancelled", 1))
        self._wait(_WAITS_FOR_ITS_RETRY, failing)
        self.cancel(failing)
        self._wait("SELECT true FROM event WHERE event_id = %s AND status = 'succeeded'", good)
        redis = self.madeira.redis
        wait_until(lambda: redis.exists("m:lane:shy:breaker"), 10, what="an open breaker")
        self._wait(
            "SELECT true FROM delivery d JOIN event e ON e.seq = d.event_seq WHERE e.event_id = %s AND d.notified_at IS NOT NULL",
            dead,
        )
        self._wait("SELECT count(*) = %s FROM event WHERE event_type = 'capped.x' AND status = 'delivering'", CROWD)
        self._post("asking.x", End("succeeded", 2))
        wait_until(lambda: redis.exists("m:lane:asking:until"), 10, what="a wish", every=0.005)
        # Last, since they wait for a moment only, and the test is to meet them waiting.
        retried = self._post("flaky.x", End("succeeded", 2))
        self._post("good.x", End("succeeded", 1), deliver_at=later(LATER_S))
        self._wait(_WAITS_FOR_ITS_RETRY, retried)
        # Only now: a router that is frozen for long would count as gone.
        self.router.freeze()
        for _ in range(2):
            self._post("good.x", End("succeeded", 1))

    def _post(self, event_type: str, end: End, **fields: Any) -> str:
        event_id = f"e-{uuid4().hex}"
        body = json.dumps({"event_id": event_id, "event_type": event_type, "payload": {"n": len(self.ends)}, **fields}).encode()
        assert self.madeira.send(body).status_code == 202
        self.ends[event_id], self.bodies[event_id] = end, body
        return event_id

    def _wait(self, statement: str, *params: Any) -> None:
        wait_until(lambda: [*self.madeira.rows(statement, *params), {"x": False}][0].popitem()[1], 10, what=statement)

    def cancel(self, event_id: str) -> None:
        answer = self.madeira.http.post(f"/v1/events/{event_id}/cancel", headers=self.madeira.sign(b""))
        assert answer.status_code == 200, answer.text

    def outlast_a_reconcile(self) -> None:
        """Wait until a reconcile has looked at what there is now; that takes a heartbeat or two."""
        begun = "SELECT count(*) FROM reconcile_run WHERE finished_at - duration_s * interval '1 s' > %s"
        now = self.madeira.value("SELECT clock_timestamp()")
        wait_until(lambda: self.madeira.value(begun, now), what="a reconcile")

    def leave(self, *, timeout: float = 12.0) -> None:
        """Open the curtain, and see every event end as it must."""
        self.let_go()
        self.madeira.wait_all(timeout)
        self.receiver.wait_idle()
        self.check()

    def let_go(self) -> None:
        """Thaw the router, open the curtain, let the endpoint go that a person holds."""
        self.router.thaw()
        self.curtain.set()
        self._hold("resume")

    def _hold(self, action: str) -> None:
        answer = self.madeira.http.post(
            f"/v1/endpoints/paused/{action}", headers={"Authorization": f"Bearer {TOKEN}"}, json={"reason": "the test"}
        )
        assert answer.status_code == 200, answer.text

    def post_again(self) -> None:
        """Post every event once more: each is a duplicate, and nothing follows."""
        for body in self.bodies.values():
            answer = self.madeira.send(body)
            assert (answer.status_code, answer.json()["duplicate"]) == (200, True)
        self.check()

    def check(self) -> None:
        """Each event ended as it must, was called once per attempt, alone, and within the cap."""
        rows = self.madeira.rows(
            "SELECT e.event_id, e.status, count(l.id) AS attempts FROM event e LEFT JOIN delivery d ON d.event_seq = e.seq "
            "LEFT JOIN delivery_log l ON l.delivery_id = d.id WHERE e.event_id = ANY(%s) GROUP BY e.seq",
            list(self.ends),
        )
        assert {row["event_id"]: End(row["status"], row["attempts"]) for row in rows} == self.ends
        assert calls_by_event(self.receiver) == Counter({k: end.calls for k, end in self.ends.items() if end.calls})
        assert self.receiver.overlaps == {}
        assert most_at_once(self.receiver.calls_to("/capped")) <= CAP


def calls_by_event(receiver: Receiver) -> Counter[str]:
    """How often each event was called."""
    return Counter(call.json()["event_id"] for call in receiver.calls)


def most_at_once(calls: Iterable[Call]) -> int:
    """The largest number of `calls` that were unanswered at one moment; an end and a start at one instant do not overlap."""
    moments = sorted(moment for call in calls for moment in ((call.at, 1), (call.ended or float("inf"), -1)))
    now = most = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def queues_of(madeira: Madeira) -> Queues:
    """The queues of a system, as seen from outside."""
    return Queues(redis_url=madeira.redis_url, namespace=madeira.namespace)


def places(madeira: Madeira, queues: Queues, event_ids: Sequence[str]) -> dict[str, Place]:
    """Where the deliveries of events are."""
    rows = madeira.rows(
        "SELECT e.event_id, d.id || ':' || e.seq || ':' || d.lane AS key FROM event e JOIN delivery d ON d.event_seq = e.seq "
        "WHERE e.event_id = ANY(%s)",
        list(event_ids),
    )
    return dict(zip([row["event_id"] for row in rows], queues.where(DELIVER, [row["key"] for row in rows]), strict=True))
