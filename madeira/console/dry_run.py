"""What would become of an event by the rules as they are now? Nothing is stored or sent.

A real event is tried by its address, so that the answer can be pasted into a chat; another one by a form.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import falcon

from madeira import dry_run, strict_json
from madeira.api import query, validation
from madeira.api.problems import FieldError, Problem, invalid
from madeira.console import asking, words
from madeira.console.house import House, Page, acting
from madeira.dry_run import Response
from madeira.egress import Egress
from madeira.records import NewEvent
from madeira.routing.config import Rules
from madeira.states import Role
from madeira.store import story
from madeira.strict_json import NotStrictJson

#: Routes and requests that a page shows.
_MOST: Final = (60, 6)

#: Characters of a payload that the form holds; a longer one is tried by the event's address only.
_PAYLOAD: Final = 8_000

_CHECKS: Final = {"source": query.text, "event": query.text}


def add(app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
    """Add the page."""
    app.add_route("/console/dry-run", DryRunPage(house))


class DryRunPage(Page):
    """``/console/dry-run``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show the form; with an event in the query, what would become of that one."""
        asked = asking.read(req, _CHECKS).values
        rules = self.house.rules.read()
        if "event" not in asked:
            self._show(req, resp, rules, {"source": asked.get("source", "")})
            return
        form = form_of(self.house, asked.get("source"), asked["event"])
        self._show(req, resp, rules, form, self._run(rules, form))

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show what would become of the event in the form."""
        _, form = acting(req, Role.VIEWER)
        rules = self.house.rules.read()
        self._show(req, resp, rules, form, self._run(rules, form))

    def _show(self, req: falcon.Request, resp: falcon.Response, rules: Rules, form: Mapping[str, str], found: Any = None) -> None:
        routes, requests = _MOST
        if found is not None:
            left_out = (max(0, len(found["routes"]) - routes), max(0, len(found["deliveries"]) - requests))
            found = found | {
                "routes": found["routes"][:routes],
                "deliveries": [d | {"request": words.request(d["request"])} for d in found["deliveries"][:requests]],
                "left_out": left_out,
            }
        shown = {name: value if len(value) <= _PAYLOAD else "" for name, value in form.items()}
        sources = sorted(rules.sources)[:500]
        self.house.show(req, resp, "dry_run.html", title="Dry run", form=shown, found=found, sources=sources)

    def _run(self, rules: Rules, form: Mapping[str, str]) -> dict[str, Any]:
        response = sample(form)
        event = event_of(rules, form, self.house.egress)
        run = dry_run.dry_run(rules, event, egress=self.house.egress, now=datetime.now(UTC), response=response)
        return dry_run.document(run)


def form_of(house: House, source: str | None, event_id: str) -> dict[str, str]:
    """What the form holds for an event that is there.

    Raises:
        Problem: 404, 409 or 422; it cannot be tried.
    """
    if source is None:
        raise invalid([FieldError("source", "is missing in the address: whose event is it?")])
    with house.database.connection() as connection:
        found = story.find(connection, source, event_id) if validation.is_event_id(event_id) else None
    if found is None:
        raise Problem(404, f"there is no event {event_id[:128]!a} of this source", name="unknown-event")
    if found["erased_at"] is not None:
        raise Problem(409, f"the payload of event {event_id} was erased: there is nothing to try", name="erased")
    names = ("event_type", "routing_key", "target_uri", "payload", "parameters")
    return {"source": source, "event_id": event_id} | {name: found[name] or "" for name in names}


def event_of(rules: Rules, form: Mapping[str, str], egress: Egress) -> NewEvent:
    """The event of a form, checked as one that is posted.

    Raises:
        Problem: 422.
    """
    source = form.get("source", "")
    reason = dry_run.no_source(rules, source)
    beside = [FieldError("source", reason)] if reason else []
    # Payload and parameters as they are written: numbers must not change on the way.
    texts = {name: json.dumps(form[name]) for name in ("event_id", "event_type", "routing_key", "target_uri") if form.get(name)}
    texts |= {name: form[name] for name in ("payload", "parameters") if form.get(name, "").strip()}
    for name in ("payload", "parameters"):
        _parsed(f'{{"{name}": {texts.get(name, "null")}}}', name)
    document = _parsed("{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}", "event")
    return validation.new_event(document, source=source, raw=b"", environ={}, egress=egress, beside=beside)


def _parsed(text: str, name: str) -> Any:
    try:
        found = strict_json.parse(text.encode("utf-8", "surrogatepass"))
    except NotStrictJson as e:
        raise invalid([FieldError(name, f"is not strict JSON: {e}")]) from None
    if found is None or (name != "event" and set(found.values) != {name}):
        raise invalid([FieldError(name, "is not one JSON value")])
    return found


def sample(form: Mapping[str, str]) -> Response | None:
    """The answer that is to be judged; None when there is none.

    Raises:
        Problem: 422.
    """
    given = form.get("status", "").strip()
    if not given:
        return None
    try:
        status = query.whole(100, 999)(given)
    except ValueError as e:
        raise invalid([FieldError("status of the answer", str(e))]) from None
    return Response(status, {"content-type": "application/json"}, form.get("answer", ""))
