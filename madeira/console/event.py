"""One event: what happened to it, what it waits for, and what can be done."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import falcon

from madeira.api import listing, query, validation
from madeira.api.answers import envelope
from madeira.api.problems import FieldError, Problem, invalid
from madeira.console import asking, forms, timeline, words
from madeira.console.house import House, Page, acting
from madeira.errors import IllegalTransition
from madeira.store import audit, replay

#: Characters of a payload that the page shows; all of it is a link away.
_PAYLOAD: Final = 6_000

#: Entries of the audit that are among the steps.
_ACTS: Final = 50

_CHECKS: Final = {"source": query.text}


class Possible(NamedTuple):
    """Something that can be done, or why it cannot."""

    #: What exactly would happen.
    told: str = ""
    refusal: str | None = None
    #: Endpoints of which one can be chosen.
    endpoints: tuple[str, ...] = ()


def add(app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
    """Add the pages."""
    app.add_route("/console/events/{event_id}", EventPage(house))
    app.add_route("/console/events/{event_id}/json", EventJson(house))
    app.add_route("/console/events/{event_id}/cancel", Cancel(house))
    app.add_route("/console/events/{event_id}/replay", Replay(house))
    app.add_route("/console/events/{event_id}/reroute", Reroute(house))


class _OfEvent(Page):
    """What is about one event, whose source the query names."""

    def find(self, req: falcon.Request, event_id: str) -> dict[str, Any]:
        """The event.

        Raises:
            Problem: 404; 422 when its source is not named.
        """
        source = self.source(req, event_id)
        found = listing.find(source, event_id, database=self.house.database, queues=self.house.queues)
        if found is None:
            raise listing.missing(source, event_id, database=self.house.database)
        return found

    def source(self, req: falcon.Request, event_id: str) -> str:
        """Whose event it is."""
        source: str | None = asking.read(req, _CHECKS).values.get("source")
        if source is None:
            raise invalid([FieldError("source", "is missing in the address; search for the event instead")])
        if not validation.is_event_id(event_id):
            raise listing.unknown(event_id)
        return source


class EventPage(_OfEvent):
    """``/console/events/{event_id}``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Show it."""
        found = self.find(req, event_id)
        with self.house.database.connection() as connection:
            acts = audit.page(connection, limit=_ACTS, what=f"event {found['source']}/{event_id}")
        self.house.show(
            req,
            resp,
            "event.html",
            title=f"Event {event_id}",
            event=found,
            source=found["source"],
            steps=timeline.steps(found, acts),
            attempts_removed=timeline.attempts_removed(found),
            waits=timeline.waits(found, self._rates(found)),
            cancel=_cancel(found),
            replay=_possible(found, _replay),
            again=_possible(found, _again),
            reroute=_possible(found, _reroute),
            payload=found["payload"],
            most=_PAYLOAD,
            curl=_curl(found),
        )

    def _rates(self, found: Mapping[str, Any]) -> dict[str, float | None]:
        """The pace of the endpoints for which something of it is unfinished."""
        names = {d["endpoint"] for d in found["deliveries"] if d["status"] in ("pending", "delivering")}
        endpoints = self.house.rules.read().endpoints if names else {}
        return {name: endpoints[name].rate for name in names & endpoints.keys()}


class EventJson(_OfEvent):
    """``/console/events/{event_id}/json``: as the API gives it, to be read and copied whole."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Give it."""
        resp.content_type = "application/json"
        resp.data = envelope(self.find(req, event_id))


class _Act(_OfEvent, ABC):
    """What is done with an event."""

    #: Nothing is done by a link; who comes here by one is shown the event.
    def on_get(self, req: falcon.Request, _resp: falcon.Response, event_id: str) -> None:
        """Lead to the event."""
        raise falcon.HTTPSeeOther(_page(self.source(req, event_id), event_id))

    def on_post(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Do it."""
        session, form = acting(req)
        source = self.source(req, event_id)
        endpoint = form.get("endpoint") or None
        try:
            told = self.act(source, event_id, endpoint, form, session.who)
        except IllegalTransition as e:
            raise Problem(409, _refused(e), name=e.code) from None
        if told is None:
            raise listing.missing(source, event_id, database=self.house.database)
        self.acted(req, resp, _page(source, event_id), told, what=f"event {source}/{event_id}")

    @abstractmethod
    def act(self, source: str, event_id: str, endpoint: str | None, form: Mapping[str, str], who: str) -> str | None:
        """Do it and say what was done; None when there is no such event or delivery."""


class Cancel(_Act):
    """``/console/events/{event_id}/cancel``."""

    def act(self, source: str, event_id: str, endpoint: str | None, form: Mapping[str, str], who: str) -> str | None:
        """End what is unfinished."""
        why = forms.reason(form) or ""
        done = self.house.acting.cancel(source, event_id, who=who, why=why, endpoint=endpoint)
        if done is None:
            return None
        asked = f"; {done.requested} being called now, of which no retry follows" if done.requested else ""
        return f"Cancelled {words.plural(len(done.cancelled), 'delivery', 'deliveries')}{asked}. The event is {done.status}."


class Replay(_Act):
    """``/console/events/{event_id}/replay``."""

    def act(self, source: str, event_id: str, endpoint: str | None, form: Mapping[str, str], who: str) -> str | None:
        """Send again."""
        why = forms.reason(form) or ""
        force = form.get("force") == "1"
        done = self.house.acting.replay(source, event_id, who=who, why=why, endpoint=endpoint, force=force)
        if done is None:
            return None
        return f"Sent again to {words.joined(done.endpoints)}. {words.waits(done.missing)}".rstrip()


class Reroute(_Act):
    """``/console/events/{event_id}/reroute``."""

    def act(self, source: str, event_id: str, endpoint: str | None, form: Mapping[str, str], who: str) -> str | None:
        """Have it routed again."""
        done = self.house.acting.reroute(source, event_id, who=who, why=forms.reason(form) or "")
        return "It is routed again by the rules as they are now." if done else None


def _page(source: str, event_id: str) -> str:
    return words.address("events", event_id, source=source)


def _cancel(found: Mapping[str, Any]) -> Possible:
    if found["status"] not in ("pending", "delivering"):
        return Possible(refusal=f"it is {found['status']} already, and only what is unfinished can be cancelled")
    if found["status"] == "pending":
        return Possible("Ends the event before it is routed: nobody will be called.")
    left = [d for d in found["deliveries"] if d["status"] in ("pending", "delivering")]
    called = [d["endpoint"] for d in left if d["status"] == "delivering"]
    now = f" {words.joined(called)} is being called now: no retry follows, and a success still counts." if called else ""
    names = tuple(d["endpoint"] for d in left)
    return Possible(f"Ends {words.plural(len(left), 'delivery', 'deliveries')}: {words.joined(names)}.{now}", endpoints=names)


def _replay(found: Mapping[str, Any]) -> Possible:
    names = tuple(replay.replayable(found))
    return Possible(f"Sends it again, with fresh retries, to {words.joined(names)}.", endpoints=names)


def _again(found: Mapping[str, Any]) -> Possible:
    names = tuple(replay.replayable(found, force=True))
    return Possible(f"Sends it again to {words.joined(names)}, also where it succeeded: the receiver gets it twice.", None, names)


def _reroute(found: Mapping[str, Any]) -> Possible:
    gone = replay.reroutable(found)
    instead = f" What is dead for {words.joined(gone)} is taken away first." if gone else ""
    return Possible(f"Has it routed again by the rules as they are now.{instead}")


def _possible(found: Mapping[str, Any], ask: Callable[[Mapping[str, Any]], Possible]) -> Possible:
    try:
        return ask(found)
    except IllegalTransition as e:
        return Possible(refusal=_refused(e))


def _refused(error: IllegalTransition) -> str:
    """Why something cannot be done; what the API asks for with a field, a page has a form for."""
    if error.code == "nothing-to-replay":
        return "nothing of it is dead; what succeeded goes out once more by the form named Send again"
    return str(error)


def _curl(found: Mapping[str, Any]) -> str:
    path = f"/v1/events/{found['event_id']}?source={found['source']}"
    return f'curl -H "Authorization: Bearer $TOKEN" "$MADEIRA_URL"{shlex.quote(path)}'
