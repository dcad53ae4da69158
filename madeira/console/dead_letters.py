"""What died, and is it one cause or many? Groups first, then each; and one of them with all that was tried."""

import json
from collections.abc import Mapping
from typing import Any, Final

import falcon

from madeira import digits
from madeira.api import query
from madeira.api.answers import jsonable, show_digests
from madeira.api.problems import Problem
from madeira.console import asking, picking
from madeira.console.asking import Asked
from madeira.console.house import House, Page
from madeira.states import FailureClass
from madeira.store import dead_letters as store
from madeira.store.dead_letters import Groups, Place

#: Dead letters and groups of a page.
PAGE: Final = 25
_GROUPS: Final = 15

#: Attempts that the page of one lists, and of how many of the latest it shows what was sent and what came back.
_ATTEMPTS: Final = 40
_SHOWN: Final = 5

#: Filters that are looked up in each event: too much work to be done every two seconds.
_OF_EVENT: Final = frozenset({"source", "event_type", "text"})

#: Digits of an id.
_DIGITS: Final = 18


def add(app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
    """Add the pages."""
    app.add_route("/console/dead-letters", DeadLettersPage(house))
    app.add_route("/console/dead-letters/{delivery_id}", DeadLetterPage(house))
    app.add_route("/console/dead-letters/{delivery_id}/json", DeadLetterJson(house))


class DeadLettersPage(Page):
    """``/console/dead-letters``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show the groups, and a page of the dead letters, the latest first."""
        asked = asking.read(req, {**picking.CHECKS, "before": query.place})
        wanted = picking.wanted(asked.values)
        before = asked.values.get("before")
        after = Place(*before) if before else None
        groups, found = self.house.read(
            req,
            lambda connection: (
                store.groups(connection, wanted, limit=_GROUPS),
                store.page(connection, wanted, limit=PAGE, after=after),
            ),
        )
        following = None if found.after is None else query.cursor(*found.after)
        self.house.show(
            req,
            resp,
            "dead_letters.html",
            title="Dead letters",
            asked=asked,
            chips=asked.chips("dead-letters", names=picking.NAMES),
            groups=[_with_link(group, asked) for group in groups.groups],
            matching=_matching(groups),
            counted=groups.counted,
            is_live=not _OF_EVENT & asked.values.keys(),
            items=found.items,
            older=asked.address("dead-letters", before=following) if following else None,
            complete=found.after is None or len(found.items) == PAGE,
            newest=asked.address("dead-letters", before=None),
            of_all={
                action: asked.address("jobs", "new", before=None, action=action) for action in ("replay", "cancel", "reroute")
            },
            classes=list(FailureClass),
        )


def _matching(groups: Groups) -> str:
    """How many match, in words."""
    if groups.complete:
        return f"{groups.counted:,}"
    return f"more than {groups.counted:,}" if groups.counted else f"none of the latest {groups.among:,}"


def _with_link(group: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    by = {"error": group["error_code"]} if group["error_code"] else {"failure_class": group["failure_class"]}
    return {**group, "link": asked.address("dead-letters", before=None, endpoint=group["endpoint"], **by)}


class _OfDeadLetter(Page):
    """What is about one dead letter."""

    def find(self, delivery_id: str) -> dict[str, Any]:
        """It, with its attempts.

        Raises:
            Problem: 404.
        """
        found = None
        number = digits.plain(delivery_id, _DIGITS)
        if number is not None:
            with self.house.database.connection() as connection:
                found = store.find(connection, number)
        if found is None:
            said = f"there is no dead letter {delivery_id[:32]!a}: it is not dead (any more), or there is no such delivery"
            raise Problem(404, said, name="unknown-dead-letter")
        show_digests(found["attempts"])
        return found


class DeadLetterPage(_OfDeadLetter):
    """``/console/dead-letters/{delivery_id}``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, delivery_id: str) -> None:
        """Show it."""
        asking.read(req, {})
        found = self.find(delivery_id)
        attempts = found["attempts"][-_ATTEMPTS:]
        shown = [_shown(attempt, whole=n >= len(attempts) - _SHOWN) for n, attempt in enumerate(attempts)]
        self.house.show(
            req,
            resp,
            "dead_letter.html",
            title=f"Dead letter {found['id']}",
            letter=found,
            attempts=shown[::-1],
            earlier=len(found["attempts"]) - len(attempts),
        )


class DeadLetterJson(_OfDeadLetter):
    """``/console/dead-letters/{delivery_id}/json``: as the API gives it."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, delivery_id: str) -> None:
        """Give it."""
        asking.read(req, {})
        resp.content_type = "application/json"
        resp.data = json.dumps(self.find(delivery_id), default=jsonable).encode()


def _shown(attempt: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """An attempt, and if `whole` what was sent and what came back, as on the wire."""
    exchange = attempt["exchange"] or {}
    sent, came = exchange.get("request"), exchange.get("answer")
    body = bytes(attempt["excerpt"] or b"").decode("utf-8", "replace")
    request = _head(f"{sent['method']} {attempt['url'] or ''}", sent["headers"]) if sent else None
    answer = _head(f"HTTP {attempt['status_code']}", came["headers"] if came else []) if attempt["status_code"] else None
    return {
        **attempt,
        "request": request if whole else None,
        "request_body": sent and f"{sent['body_length']:,} bytes, SHA-256 {sent['body_sha256']}",
        "answer": answer if whole else None,
        "body": body if whole else "",
        "is_whole": whole,
    }


def _head(first: str, headers: list[list[str]]) -> str:
    return "\n".join([first, *(f"{name}: {value}" for name, value in headers)])
