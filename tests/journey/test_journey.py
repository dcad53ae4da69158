"""What everybody does with Madeira, from configuring it to stopping it, in one file for every way of running it.

It passes unchanged against `madeira up`, which it starts where nothing else is named, and against containers
(`deploy/try-containers`). Each test has a source and endpoints of its own, so that a Madeira may have seen others.
"""

import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests.console.browser import parse
from tests.journey.place import PATIENCE_S, Place, Up, given
from tests.receiver import Answer, Gate, Receiver
from tests.system.harness import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The Madeira that the environment names, else one of our own."""
    found = given()
    if found is not None:
        wait_until(found.ready, PATIENCE_S, what="the start", every=0.2)
        yield found
        return
    folder = Path(tempfile.mkdtemp(prefix="madeira-journey-"))
    up = Up(folder)
    up.start()
    try:
        wait_until(up.ready, PATIENCE_S, what="the start", every=0.2)
        yield up
    finally:
        up.end()
        shutil.rmtree(folder)


@pytest.fixture
def receiver(place: Place) -> Iterator[Receiver]:
    """A receiver that the workers can reach."""
    with Receiver(host=place.listen) as receiver:
        yield receiver


@dataclass(frozen=True, kw_only=True)
class Traveller:
    """Somebody with a source and an endpoint of his own."""

    place: Place
    name: str
    secret: str

    def post(self, event_id: str, **fields: object) -> httpx.Response:
        body = {"event_id": event_id, "event_type": f"{self.name}.made", "payload": {"n": 1}, **fields}
        return self.place.post(self.name, self.secret, body)

    def accepted(self, event_id: str, **fields: object) -> str:
        answer = self.post(event_id, **fields)
        assert answer.status_code == 202, answer.text
        return event_id

    def event(self, event_id: str, *statuses: str) -> dict[str, object]:
        found: dict[str, object] = self.place.event(self.name, event_id, *statuses)
        return found

    def first_arrives(self) -> bool:
        """Whether the first event was delivered; one that was routed by the rules from before is routed again."""
        delivered = self.event("first", "succeeded", "dead")["status"] == "succeeded"
        if not delivered:
            self.place.ask("POST", "/v1/events/first/reroute", {"reason": "the rules are new"}, source=self.name)
        return delivered

    def outcomes(self, event_id: str) -> list[str]:
        """The outcomes of all attempts of an event, in time order."""
        found = self.place.ask("GET", f"/v1/events/{event_id}", source=self.name)
        return [attempt["outcome"] for delivery in found["deliveries"] for attempt in delivery["attempts"]]

    def sent(self, name: str, **labels: str) -> float:
        """What a counter of the workers says of our endpoint."""
        return self.place.count(self.place.metrics, name, endpoint=self.name, **labels)


@pytest.fixture
def traveller(place: Place, receiver: Receiver) -> Traveller:
    """One whose configuration was just applied, and is known by API and workers, which follow it within two seconds each."""
    name, secret = f"t{secrets.token_hex(4)}", secrets.token_hex(16)
    told = place.run(
        "apply",
        "-",
        stdin=f"""
            [[source]]
            name = "{name}"
            secrets = ["{secret}"]

            [[endpoint]]
            name = "{name}"
            url = "{receiver.url("/in")}"
            timeout = 30
            retry = {{ initial = 0.2, max = 1, max_attempts = 3 }}
            breaker = {{ enabled = false }}

            [[route]]
            name = "{name}"
            source = "{name}"
            event_type = "{name}.*"
            endpoint = "{name}"
        """,
    )
    assert f"+ source {name}" in told
    traveller = Traveller(place=place, name=name, secret=secret)
    wait_until(lambda: traveller.post("first").status_code != 401, PATIENCE_S, what="the source's acceptance", every=0.1)
    wait_until(traveller.first_arrives, PATIENCE_S, what="the delivery of the first event", every=0.5)
    assert receiver.count("/in") == 1
    return traveller


def test_an_event_is_accepted_once_and_delivered_once(traveller: Traveller, receiver: Receiver) -> None:
    """Signed rightly it is; signed wrongly it is not; repeated it is known."""
    traveller.accepted("e", trace_id=f"trace-{traveller.name}")
    again = traveller.post("e", trace_id=f"trace-{traveller.name}")
    assert (again.status_code, again.json()["duplicate"]) == (200, True)
    stranger = Traveller(place=traveller.place, name=traveller.name, secret="another")
    assert stranger.post("f").status_code == 401
    traveller.event("e", "succeeded")
    first, call = receiver.calls_to("/in")
    assert call.headers["x-trace-id"] == f"trace-{traveller.name}"
    assert call.json()["payload"] == {"n": 1}
    assert call.webhook_id != first.webhook_id
    listed = traveller.place.ask("GET", "/v1/events", source=traveller.name)
    assert sorted(event["event_id"] for event in listed["events"]) == ["e", "first"]


def test_a_failure_is_tried_again_and_one_that_lasts_is_given_up_and_replayed(traveller: Traveller, receiver: Receiver) -> None:
    """Two bad answers and a good one are a success; a 400 is a dead letter, and a replay mends it."""
    receiver.queue("/in", Answer(status=503), Answer(status=500))
    traveller.accepted("shaky")
    assert traveller.event("shaky", "succeeded")["retry_count"] == 2
    assert traveller.outcomes("shaky") == ["retryable", "retryable", "succeeded"]

    receiver.queue("/in", Answer(status=400))
    traveller.accepted("refused")
    traveller.event("refused", "dead")
    (letter,) = traveller.place.ask("GET", "/v1/dead-letters", endpoint=traveller.name)["dead_letters"]
    assert letter["event_id"] == "refused"
    traveller.place.ask("POST", "/v1/events/refused/replay", {"reason": "it is mended"}, source=traveller.name)
    traveller.event("refused", "succeeded")
    assert traveller.outcomes("refused") == ["permanent", "succeeded"]
    calls = receiver.calls_to("/in")
    assert calls[-1].webhook_id == calls[-2].webhook_id


def test_an_event_that_waits_for_its_time_is_cancelled(traveller: Traveller, receiver: Receiver) -> None:
    """It ends there and then, and is never sent."""
    traveller.accepted("later", deliver_at=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    traveller.place.ask("POST", "/v1/events/later/cancel", {"reason": "not wanted any more"}, source=traveller.name)
    traveller.event("later", "cancelled")
    assert receiver.count("/in") == 1


def test_an_event_s_story_is_told_in_the_terminal(traveller: Traveller, receiver: Receiver) -> None:
    """`madeira trace` finds it by its trace id, with each attempt."""
    receiver.queue("/in", Answer(status=503))
    trace_id = f"story-{traveller.name}"
    traveller.accepted("e", trace_id=trace_id)
    traveller.event("e", "succeeded")
    (event,) = json.loads(traveller.place.run("trace", "--json", trace_id))
    assert (event["event_id"], event["source"]) == ("e", traveller.name)
    assert [a["outcome"] for d in event["deliveries"] for a in d["attempts"]] == ["retryable", "succeeded"]


def test_the_numbers_are_those_of_what_happened(traveller: Traveller, receiver: Receiver) -> None:
    """Accepted, refused, attempts and ends, on the pages of the API and the workers."""
    receiver.queue("/in", Answer(status=503), Answer(status=400))
    for event_id in ("a", "b"):
        traveller.accepted(event_id)
        traveller.event(event_id, "succeeded", "dead")
    Traveller(place=traveller.place, name=traveller.name, secret="another").post("c")
    api = [f"{traveller.place.api}/metrics"]
    accepted = traveller.place.count(api, "madeira_ingress_requests_total", source=traveller.name, outcome="accepted")
    assert accepted == 3

    def ended() -> float:
        return sum(traveller.sent("madeira_deliveries_settled_total", status=s) for s in ("succeeded", "dead"))

    # What has ended is counted just after its row says so.
    wait_until(lambda: ended() >= 3, PATIENCE_S, what="the count of the last one", every=0.05)
    assert ended() == 3
    assert traveller.sent("madeira_delivery_attempts_total") == receiver.count("/in")
    assert traveller.sent("madeira_delivery_attempts_total", outcome="permanent") == 1


def test_somebody_signs_in_at_the_console_and_sees_the_event(traveller: Traveller) -> None:
    """With the token; without one he is sent to the form."""
    traveller.accepted("seen")
    traveller.event("seen", "succeeded")
    with httpx.Client(base_url=traveller.place.api, timeout=15, trust_env=False, follow_redirects=True) as browser:
        page = browser.get("/console/events", params={"source": traveller.name})
        assert page.url.path == "/console/sign-in"
        form = parse(page.content).one("form", action="/console/sign-in")
        fields = {e.attributes["name"]: e.attributes["value"] for e in form.all("input", type="hidden")}
        wrong = browser.post("/console/sign-in", data=fields | {"token": "wrong"})
        assert wrong.status_code == 403
        form = parse(wrong.content).one("form", action="/console/sign-in")
        fields = {e.attributes["name"]: e.attributes["value"] for e in form.all("input", type="hidden")}
        browser.post("/console/sign-in", data=fields | {"token": traveller.place.token})
        shown = parse(browser.get("/console/events", params={"source": traveller.name}).content)
        assert "seen" in shown.one("main").text


def test_what_is_in_hand_at_a_stop_is_finished_and_what_comes_after_goes_on(traveller: Traveller, receiver: Receiver) -> None:
    """SIGTERM while a receiver thinks: its answer still counts, nobody calls it twice, and after a start all is as before."""
    place, gate = traveller.place, Gate()
    receiver.queue("/in", Answer(hold=gate))
    traveller.accepted("in-hand")
    receiver.wait_for(2, path="/in")
    stopping = place.begin_to_stop()
    wait_until(place.workers_have_heard, PATIENCE_S, what="the arrival of SIGTERM at the workers", every=0.1)
    assert stopping.poll() is None, "it ended, and a call was under way"
    gate.set()
    assert stopping.wait(PATIENCE_S) == 0
    assert receiver.count("/in") == 2
    assert receiver.answered == 2

    place.start()
    wait_until(place.ready, PATIENCE_S, what="the start", every=0.2)
    assert traveller.event("in-hand", "succeeded")["retry_count"] == 0
    assert traveller.outcomes("in-hand") == ["succeeded"]
    traveller.accepted("afterwards")
    traveller.event("afterwards", "succeeded")
    assert receiver.count("/in") == 3
    assert receiver.overlaps == {}
