"""Where is the event that one is asked about? Found by its id, its trace, or words; narrowed by filters."""

from collections.abc import Mapping
from typing import Any, Final

import falcon

from madeira.api import listing as api
from madeira.api import query
from madeira.console import asking, words
from madeira.console.asking import Asked
from madeira.console.house import House, Page
from madeira.states import EventStatus
from madeira.store import listing, story
from madeira.store.listing import Wanted

#: Events of a page.
PAGE: Final = 50

#: Endpoints that a row names.
_NAMED: Final = 3

_CHECKS: Final[Mapping[str, query.Check]] = {
    "q": query.text,
    **{name: api.PARAMETERS[name] for name in ("status", "event_type", "source", "endpoint", "trace_id")},
    "since": asking.moment,
    "until": asking.moment,
    "before": query.whole(0, 2**62),
    "follow": asking.flag,
}

#: How the filters are called.
_NAMES: Final = {
    "q": "search",
    "status": "status",
    "event_type": "type",
    "source": "source",
    "endpoint": "endpoint",
    "trace_id": "trace",
    "since": "since",
    "until": "until",
}


def add(app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
    """Add the page."""
    app.add_route("/console/events", EventsPage(house))


class EventsPage(Page):
    """``/console/events``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show a page of events, the newest first."""
        asked = asking.read(req, _CHECKS)
        named = self._named(asked)
        if len(named) == 1 and not req.get_header("X-Madeira-Refresh"):
            (found,) = named
            raise falcon.HTTPSeeOther(words.address("events", found["event_id"], source=found["source"]))
        events, before, complete = (named, None, True) if named else self._page(req, asked)
        follows = "follow" in asked.values and "before" not in asked.values
        self.house.show(
            req,
            resp,
            "events.html",
            title="Events",
            asked=asked,
            chips=asked.chips("events", names=_NAMES),
            events=[_shown(event) for event in events],
            follows=follows,
            complete=complete,
            older=None if before is None else asked.address("events", before=before, follow=None),
            newest=asked.address("events", before=None),
            follow=asked.address("events", before=None, follow=None if follows else "1"),
            statuses=list(EventStatus),
            cancels=_cancels(asked),
        )

    def _named(self, asked: Asked) -> list[dict[str, Any]]:
        """The events whose id or trace is what is searched for, where nothing else is asked."""
        wanted = asked.values.get("q")
        if wanted is None or set(asked.values) - {"q", "follow"}:
            return []
        with self.house.database.connection() as connection:
            return story.find_trace(connection, wanted.strip(), PAGE)[::-1]

    def _page(self, req: falcon.Request, asked: Asked) -> tuple[list[dict[str, Any]], int | None, bool]:
        filters = {name: value for name, value in asked.values.items() if name not in ("q", "before", "follow")}
        wanted = Wanted(**filters, words=asked.values.get("q"))
        before = asked.values.get("before")
        found = self.house.read(req, lambda connection: listing.page(connection, wanted, limit=PAGE, before=before))
        return found.events, found.before, found.before is None or len(found.events) == PAGE


def _shown(event: dict[str, Any]) -> dict[str, Any]:
    deliveries = event["deliveries"]
    return {
        "seq": event["seq"],
        "event_id": event["event_id"],
        "source": event["source"],
        "event_type": event["event_type"],
        "status": event["status"],
        "reason": event["reason"],
        "created_at": event["created_at"],
        "endpoints": [delivery["endpoint"] for delivery in deliveries[:_NAMED]],
        "more": max(0, len(deliveries) - _NAMED),
        "attempts": sum(delivery["attempt"] for delivery in deliveries),
    }


#: Filters by which a job can choose, too.
_OF_JOBS: Final = ("source", "endpoint", "event_type", "since", "until")


def _cancels(asked: Asked) -> str | None:
    """The preview of a cancel of everything unfinished that matches; None when a job cannot choose as the page does."""
    others = {name for name in asked.given if name not in (*_OF_JOBS, "before", "follow")}
    if others and (others != {"status"} or asked.given["status"] != EventStatus.DELIVERING or "endpoint" not in asked.given):
        return None
    filters = {name: asked.given[name] for name in _OF_JOBS if name in asked.given}
    return words.address("jobs", "new", action="cancel", among="unfinished", **filters)
