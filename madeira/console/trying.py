"""What a rule that is being written would do with an event that was really posted: beside its form, before it is saved.

Nothing is stored or sent: it is the dry run of `madeira.dry_run`, with the rule put in its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from madeira import dry_run
from madeira.api import validation
from madeira.api.problems import Problem
from madeira.console import words
from madeira.console.dry_run import event_of, form_of, sample
from madeira.console.house import House
from madeira.dry_run import DryRun
from madeira.records import Route
from madeira.routing.config import Rules
from madeira.routing.fields import Kind
from madeira.store import listing, story
from madeira.store.listing import Wanted

#: Events to choose from.
_EVENTS: Final = 8

#: The answer that is judged when nobody has typed another.
ANSWER: Final[Mapping[str, str]] = {"try.status": "200", "try.answer": '{"ok": true}'}


def events(house: House, kind: Kind, name: str, document: Mapping[str, Any], chosen: str = "") -> Sequence[Mapping[str, Any]]:
    """The latest events that can be tried: of the route's source, or those that went to the endpoint, or else any. `chosen`,
    as ``source/id``, is among them.
    """
    wanted = Wanted(endpoint=name) if kind == "endpoint" and name else Wanted(source=document.get("source") or None)
    with house.database.connection() as connection:
        found = listing.page(connection, wanted, limit=_EVENTS).events
        if not found:
            found = listing.page(connection, Wanted(), limit=_EVENTS).events
        source, _, event_id = chosen.partition("/")
        if event_id and (source, event_id) not in {(event["source"], event["event_id"]) for event in found}:
            one = story.find(connection, source, event_id) if validation.is_event_id(event_id) else None
            found += [one] if one else []
    return [event for event in found if event["erased_at"] is None]


def tried(house: House, rules: Rules, kind: Kind, name: str, form: Mapping[str, str]) -> dict[str, Any]:
    """What `rules` make of the event that a form has chosen, as far as it is about the route or endpoint `name`.

    ``refusal`` says why it cannot be tried; else there are ``routes`` and, if any, the ``delivery``.
    """
    source, _, event_id = form.get("try.event", "").partition("/")
    if not event_id:
        return {"refusal": "there is no event yet that could be tried; post one, or use the page Dry run"}
    try:
        event = event_of(rules, form_of(house, source, event_id), house.egress)
        response = sample({"status": form.get("try.status", ""), "answer": form.get("try.answer", "")})
    except Problem as e:
        told = "; ".join(f"{error.field} {error.detail}" for error in e.errors) or str(e.description)
        return {"refusal": told}

    def run(rules: Rules) -> DryRun:
        return dry_run.dry_run(rules, event, egress=house.egress, now=datetime.now(UTC), response=response)

    found = dry_run.document(run(rules))
    endpoint = name
    if kind == "route":
        routes = [route for route in found["routes"] if route["name"] == name]
        endpoint = next((route["endpoint"] for route in routes), "")
    else:
        routes = [route for route in found["routes"] if route["endpoint"] == name]
    leads = any(route["matches"] or route["failed"] for route in routes)
    if kind == "endpoint" and not leads:
        # No route leads there: what would go out if one did.
        found = dry_run.document(run(replace(rules, routes=(Route(name="any", endpoint=name),))))
    delivery = next((one for one in found["deliveries"] if one["endpoint"] == endpoint and (leads or kind == "endpoint")), None)
    if delivery is not None:
        delivery = delivery | {"request": words.request(delivery["request"])}
    return {"refusal": None, "routes": routes, "delivery": delivery, "leads": leads}
