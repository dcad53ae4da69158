"""The endpoints: how each is, how it is configured, who changed it; held, let go, and tried."""

from collections.abc import Mapping
from typing import Any, Final

import falcon

from madeira import trial
from madeira.api import query, validation
from madeira.api.admin import lanes
from madeira.api.problems import Problem, unavailable
from madeira.console import asking, changes, forms, trouble, words
from madeira.console.house import House, Page, acting
from madeira.console.sparks import Sparks
from madeira.errors import IllegalTransition, NotThere
from madeira.ids import NAME
from madeira.routing.config import CALLBACK, callback
from madeira.states import Role
from madeira.store import endpoints as counts
from madeira.store import holding, overview
from madeira.store.holding import MOVES, Action
from madeira.strict_json import Document, NotStrictJson, parse
from madeira.trial import Trial, Tried

#: Endpoints of a page.
PAGE: Final = 40

#: What is said after an action.
_DONE: Final[dict[Action, str]] = {
    "pause": "is paused: what waits for it stays where it is, and nothing of it is counted",
    "resume": "goes on",
    "disable": "is disabled: what waits for it stays where it is, until somebody enables it",
    "enable": "is enabled",
}

#: What exactly an action would do.
_TOLD: Final[dict[Action, str]] = {
    "pause": "Nothing is called until somebody resumes it. Calls under way end. What waits keeps its place and its retries.",
    "resume": "What waits goes on at the endpoint's pace.",
    "disable": "As a pause, for an endpoint that is broken or gone: it says so wherever the endpoint is shown.",
    "enable": "What waits goes on at the endpoint's pace.",
}


def add(app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
    """Add the pages."""
    app.add_route("/console/endpoints", EndpointsPage(house))
    app.add_route("/console/endpoints/{name}", EndpointPage(house))
    for action in _DONE:
        app.add_route(f"/console/endpoints/{{name}}/{action}", Hold(house, action))
    app.add_route("/console/endpoints/{name}/test", Try(house))


class EndpointsPage(Page):
    """``/console/endpoints``."""

    def __init__(self, house: House) -> None:
        super().__init__(house)
        self._sparks = Sparks()

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show them, by their trouble."""
        asked = asking.read(req, {"q": query.text, "skip": query.whole(0, 10**6)})
        house = self.house
        configured = house.configurator.list("endpoint")
        with house.database.connection() as connection:
            found, held = overview.read(connection), holding.states(connection)
            sparks = self._sparks.read(connection)
        wanted = asked.values.get("q", "").lower()
        rows = [row for row in trouble.rows(configured, found, held=held, queues=house.queues) if wanted in row.name.lower()]
        skipped = asked.values.get("skip", 0)
        following = skipped + PAGE if len(rows) > skipped + PAGE else None
        house.show(
            req,
            resp,
            "endpoints.html",
            title="Endpoints",
            rows=rows[skipped : skipped + PAGE],
            sparks=sparks,
            count=len(rows),
            asked=asked,
            further=asked.address("endpoints", skip=following) if following else None,
            chips=asked.chips("endpoints", names={"q": "name"}),
        )


class _OfEndpoint(Page):
    """What is about one endpoint."""

    def page(self, req: falcon.Request, resp: falcon.Response, name: str, **more: Any) -> None:
        """Show the endpoint, with `more`."""
        house = self.house
        document, shown = self._document(name)
        with house.database.connection() as connection:
            unfinished = counts.unfinished(connection, name)
        lane = lanes.shown(name, database=house.database, queues=house.queues)
        values = {
            "name": name,
            "document": document,
            "shown": shown,
            "lane": lane,
            "unfinished": unfinished,
            "actions": [] if name == CALLBACK else _possible(lane["state"]),
            "told": _TOLD,
            "entries": changes.history(house, f"endpoint {name}"),
            "event_type": trial.EVENT_TYPE,
            "test_payload": trial.PAYLOAD,
            "tried": None,
            "form": {},
        }
        house.show(req, resp, "endpoint.html", title=f"Endpoint {name}", **(values | more))

    def _document(self, name: str) -> tuple[Mapping[str, Any], Any]:
        """How it is configured, and what else the configuration tells of it."""
        if name == CALLBACK:
            return {"url": callback().url}, None
        try:
            found = self.house.configurator.get("endpoint", known(name))
        except NotThere:
            raise _unknown(name) from None
        return found.document, found


class EndpointPage(_OfEndpoint):
    """``/console/endpoints/{name}``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Show it."""
        asking.read(req, {})
        self.page(req, resp, name)


class Hold(Page):
    """``/console/endpoints/{name}/pause`` and the other actions."""

    def __init__(self, house: House, action: Action) -> None:
        super().__init__(house)
        self._action: Action = action

    def on_get(self, _req: falcon.Request, _resp: falcon.Response, name: str) -> None:
        """Nothing is done by a link: lead to the endpoint."""
        raise falcon.HTTPSeeOther(words.address("endpoints", name))

    def on_post(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Hold it, or let it go."""
        session, form = acting(req)
        why = forms.reason(form, required=self._action in ("pause", "disable"))
        if name == CALLBACK:
            raise Problem(409, f"the endpoint {CALLBACK} is built in: it cannot be held", name="built-in")
        try:
            changed = self.house.acting.hold(known(name), self._action, who=session.who, why=why)
        except IllegalTransition as e:
            raise Problem(409, str(e), name=e.code) from None
        if changed is None:
            raise _unknown(name)
        text = f"The endpoint {name} {_DONE[self._action]}."
        if changed.already:
            reason = "; only the reason is new" if changed.version is not None else ""
            text = f"The endpoint {name} is {changed.now.state}{words.already(changed.before.since, changed.before.by)}{reason}."
        self.acted(req, resp, words.address("endpoints", name), text, what=f"endpoint {name}")


class Try(_OfEndpoint):
    """``/console/endpoints/{name}/test``."""

    def on_get(self, _req: falcon.Request, _resp: falcon.Response, name: str) -> None:
        """Nothing is called by a link: lead to the endpoint."""
        raise falcon.HTTPSeeOther(words.address("endpoints", name))

    def on_post(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Call it once, and show the request, the answer, and the verdict."""
        session, form = acting(req)
        why = forms.reason(form, required=False)
        asked = self._asked(form)
        try:
            tried = self.house.trials.call(known(name), asked, who=session.who, why=why, anywhere=session.may(Role.ADMIN))
        except NotThere:
            raise _unknown(name) from None
        except trial.Elsewhere as e:
            raise Problem(403, f"{e}: this needs a token with the role {Role.ADMIN}") from None
        except trial.Unusable as e:
            raise Problem(409, str(e), name="unusable") from None
        except trial.Busy as e:
            raise unavailable(str(e)) from None
        self.page(req, resp, name, tried=_shown(tried), form=form)

    def _asked(self, form: Mapping[str, str]) -> Trial:
        """What is to be sent, checked as an event is."""
        event_type = form.get("event_type") or trial.EVENT_TYPE
        payload = form.get("payload") or trial.PAYLOAD
        values: dict[str, Any] = {"event_type": event_type, "payload": None}
        if form.get("target_uri"):
            values["target_uri"] = form["target_uri"]
        try:
            parse(payload.encode())
        except NotStrictJson as e:
            raise Problem(422, f"the payload is not strict JSON: {e}", name="invalid") from None
        document = Document(values, {"payload": payload})
        event = validation.new_event(document, source=trial.SOURCE, raw=b"", environ={}, egress=self.house.egress)
        return Trial(event_type=event.event_type, payload=event.payload, target_uri=event.target_uri)


def known(name: str) -> str:
    """`name`, if something can be called so.

    Raises:
        Problem: 404.
    """
    if not NAME.fullmatch(name):
        raise _unknown(name)
    return name


def _possible(state: str) -> list[Action]:
    """What can be done with an endpoint that somebody holds so."""
    return [action for action, (allowed, after) in MOVES.items() if state in allowed and state != after]


def _shown(tried: Tried) -> dict[str, Any]:
    found = tried.shown()
    return found | {"request": words.request(found["request"])}


def _unknown(name: str) -> Problem:
    return Problem(
        404, f"there is no endpoint {name[:64]!a}; it may have been removed, which the audit tells", name="unknown-endpoint"
    )
