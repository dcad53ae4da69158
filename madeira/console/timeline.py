"""What happened to an event, step by step, and what it waits for: from what the store, the queues and the audit tell."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from madeira.console import words
from madeira.retry import names_its_class
from madeira.states import Outcome

#: Bytes of an answer that a step shows; the rest is in the JSON.
_EXCERPT: Final = 600

#: Steps that are shown, the first few and the latest; and answers, the latest. All of them are in the JSON.
_MOST: Final = (3, 30)
_ANSWERS: Final = 10

_TOLD: Final = {
    Outcome.SUCCEEDED: "the receiver took it",
    Outcome.RETRYABLE: "failed, may be tried again",
    Outcome.PERMANENT: "failed for good",
    Outcome.UNKNOWN: "an answer that nobody can tell success from",
    Outcome.BUSINESS: "answered, and said that it failed",
    Outcome.LATE: "came too late: another worker had taken over",
    Outcome.LOST: "no verdict: the worker was gone",
}

#: What was done by people, as a step says it.
_DONE: Final = {"cancel": "Cancelled", "replay": "Replayed", "reroute": "Routed again", "erase": "Payload erased"}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the timeline, or what is waited for now."""

    at: datetime
    title: str
    #: As a colour; the words say it too.
    tone: str = "off"
    detail: str | None = None
    facts: tuple[tuple[str, str], ...] = ()
    #: The beginning of an answer's body.
    answer: str | None = None
    name: str = ""
    #: A page about it, and how it is called.
    link: str | None = None
    more: tuple[str, ...] = ()


def steps(found: Mapping[str, Any], audit: Iterable[Mapping[str, Any]]) -> list[Step]:
    """All that happened, in the order of time."""
    made = [_accepted(found)]
    if found["routed_at"] is not None:
        made.append(_routed(found))
    for delivery in found["deliveries"]:
        attempts = delivery["attempts"]
        made += [_attempt(delivery, number, attempts) for number in range(len(attempts))]
    made += [_act(entry) for entry in audit]
    return _bounded(sorted(made, key=lambda step: step.at))


def _bounded(made: list[Step]) -> list[Step]:
    """What fits on a page."""
    first, last = _MOST
    if len(made) > first + last:
        left_out = made[first:-last]
        told = Step(left_out[0].at, f"{words.plural(len(left_out), 'step')} more", detail="all attempts are in the JSON")
        made = [*made[:first], told, *made[-last:]]
    with_answers = [n for n, step in enumerate(made) if step.answer][:-_ANSWERS]
    return [replace(step, answer="(in the JSON)") if n in with_answers else step for n, step in enumerate(made)]


def waits(found: Mapping[str, Any], rates: Mapping[str, float | None]) -> list[Step]:
    """What is unfinished, what it waits for, and until when; `rates` are the calls a second that endpoints allow."""
    now = datetime.now(UTC)
    if found["status"] == "pending":
        return [Step(now, "Waits to be routed", "wait", _where(found.get("waits"), found["deliver_at"]))]
    made = []
    for delivery in found["deliveries"]:
        if delivery["status"] in ("pending", "delivering"):
            place = delivery.get("waits")
            where = _where(place, delivery["next_attempt_at"], rates.get(delivery["endpoint"]))
            behind = (place or {}).get("behind")
            link = words.address("events", behind["event_id"], source=behind["source"]) if behind else None
            asked = "; it was asked to end: no retry follows" if delivery["cancel_requested_at"] else ""
            title = f"{delivery['endpoint']} " + ("is being called" if delivery["status"] == "delivering" else "waits")
            made.append(Step(now, title, "busy", where + asked, link=link))
    return made


def _accepted(found: Mapping[str, Any]) -> Step:
    facts = [("type", found["event_type"]), ("trace", found["trace_id"])]
    facts += [(name, found[key]) for name, key in (("routing key", "routing_key"), ("callback", "target_uri")) if found[key]]
    later = f"to be routed at {words.exact(found['deliver_at'])}" if found["deliver_at"] else None
    return Step(found["created_at"], f"Accepted from {found['source']}", "good", later, tuple(facts))


def attempts_removed(found: Mapping[str, Any]) -> int:
    """How many attempts are not in the log any more: numbers below that of the last one that is told of nowhere."""
    removed = 0
    for delivery in found["deliveries"]:
        known = {a["attempt"] for a in delivery["attempts"]}
        removed += sum(n not in known for n in range(1, delivery["attempt"] + (delivery["finished_at"] is not None)))
    return removed


def _routed(found: Mapping[str, Any]) -> Step:
    if not found["deliveries"]:
        why = "no route matched, and it brought no callback address" if found["reason"] == "unrouted" else found["reason"]
        return Step(found["routed_at"], "Routed nowhere", "bad", why)
    lines = []
    for delivery in found["deliveries"]:
        by = f"by {words.joined(delivery['routes'])}" if delivery["routes"] else "by the callback address it came with"
        born_dead = delivery["status"] == "dead" and not delivery["attempt"]
        its_class = "" if names_its_class(delivery) else f" ({delivery['failure_class']})"
        end = f"; dead at once{its_class}: {delivery['last_error']}" if born_dead else ""
        lines.append(f"{delivery['endpoint']} {by}{end}")
    names = [delivery["endpoint"] for delivery in found["deliveries"]]
    many = words.joined(names) if len(names) <= 5 else words.plural(len(names), "endpoint")
    return Step(found["routed_at"], f"Routed to {many}", "good", more=tuple(lines))


def _attempt(delivery: Mapping[str, Any], number: int, attempts: list[Mapping[str, Any]]) -> Step:
    a = attempts[number]
    outcome = Outcome(a["outcome"])
    answer = f"HTTP {a['status_code']}" if a["status_code"] is not None else (a["error_code"] or "no answer")
    lasted = f" in {words.span(a['duration_s'])}" if a["duration_s"] is not None else ""
    following = attempts[number + 1]["started_at"] if number + 1 < len(attempts) else None
    facts = [("outcome", f"{outcome}: {_TOLD[outcome]}")]
    facts += [(name, str(a[key])) for name, key in (("code", "error_code"), ("called", "url"), ("worker", "worker")) if a[key]]
    then = _then(delivery, a, following)
    if then:
        facts.append(("then", then))
    tone = "bad" if a["settled_as"] == "dead" else words.tone(outcome)
    title = f"Attempt {a['attempt']} to {delivery['endpoint']}: {answer}{lasted}"
    excerpt = bytes(a["excerpt"] or b"")
    return Step(
        a["started_at"],
        title,
        tone,
        a["reason"],
        tuple(facts),
        answer=_excerpt(excerpt, a["length"]) if excerpt else None,
        name=f"a{delivery['id']}-{a['attempt']}-{outcome}",
    )


def _then(delivery: Mapping[str, Any], attempt: Mapping[str, Any], following: datetime | None) -> str | None:
    match attempt["settled_as"]:
        case "dead":
            return f"given up ({delivery['failure_class']})" if delivery["failure_class"] else "given up"
        case "cancelled":
            return "cancelled, as was asked for while it was called"
        case "pending":
            due = following or delivery["next_attempt_at"]
            left = max(timedelta(0), due - attempt["recorded_at"]).total_seconds()
            again = "tried again" if following else "to be tried again"
            return f"{again} {words.span(left)} later"
    return None


def _excerpt(body: bytes, length: int | None) -> str:
    told = body[:_EXCERPT].decode("utf-8", "replace")
    whole = length if length is not None else len(body)
    return told if whole <= _EXCERPT else f"{told}…\n({words.number(whole)} bytes in all)"


def _act(entry: Mapping[str, Any]) -> Step:
    said = f": {entry['why']}" if entry["why"] else ""
    only = entry["detail"].get("endpoint")
    title = f"{_DONE.get(entry['action'], entry['action'])} by {entry['who']}{said}"
    return Step(entry["at"], title, "off", f"only {only}" if only else None)


def _where(place: Mapping[str, Any] | None, due: datetime | None, rate: float | None = None) -> str:
    """What it waits for and until when, in words."""
    if place is None:
        return "not known"
    match place["where"]:
        case "held":
            return f"in a worker's hands; should that be gone, another takes over in {words.span(place['seconds'])}"
        case "waiting":
            return _in_its_lane(place, rate)
        case "delayed":
            until = datetime.now(UTC) + timedelta(seconds=place["seconds"])
            return f"due in {words.span(place['seconds'])}, at {words.exact(until)}"
        case "ordering":
            return f"parked in its order behind {words.plural(place['ahead'], 'other')}: the first must end before"
        case "nowhere":
            when = f", due {words.ago(due)}" if due else ""
            return f"in no queue at this moment{when}; reconcile puts it there within a minute"
    return "not known: Redis cannot be reached"


def _in_its_lane(place: Mapping[str, Any], rate: float | None) -> str:
    ahead = f"behind {words.plural(place['ahead'], 'other')}" if place["ahead"] else "next in its line"
    until = f", until {words.exact(place['until'])} at least" if place.get("until") else ""
    match place.get("for"):
        case "paused":
            return f"{ahead}; the endpoint is paused, until somebody resumes it"
        case "disabled":
            return f"{ahead}; the endpoint is disabled, until somebody enables it"
        case "breaker":
            return f"{ahead}; held by the breaker, since the receiver fails{until}"
        case "retry_after":
            return f"{ahead}; the receiver asked to be left alone{until}"
        case "rate":
            return f"{ahead}; the endpoint's pace allows the next call in {words.span(place['seconds'])}{_turn(place, rate)}"
        case "cap":
            return f"{ahead}; as many calls as the endpoint may get are under way"
    return f"{ahead}; goes as soon as a worker is free{_turn(place, rate)}"


def _turn(place: Mapping[str, Any], rate: float | None) -> str:
    """When its turn comes by the pace; earlier it does not, since others may come before it."""
    if not rate or not place["ahead"]:
        return ""
    turn = datetime.now(UTC) + timedelta(seconds=place["seconds"] + place["ahead"] / rate)
    return f"; at {rate:g}/s its turn comes at {turn:%H:%M:%S} UTC or later"
