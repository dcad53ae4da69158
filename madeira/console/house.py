"""What all pages work with, and how a page is made.

A page is a resource with `Page` as its base, and a template. To add one: a module with the resources and a function ``add``,
named in `madeira.console.app.SECTIONS`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import falcon
import jinja2
import psycopg

from madeira import __version__
from madeira.api import problems
from madeira.api.acting import Acting
from madeira.api.admin.dry_run import NewestRules
from madeira.api.answers import jsonable
from madeira.broker.queues import Queues
from madeira.console import forms, words
from madeira.console.assets import Assets
from madeira.console.session import Notice, Session, Sessions
from madeira.egress import Egress
from madeira.routing.manage import Configurator
from madeira.states import Role
from madeira.store.database import Database
from madeira.store.replica import Lists
from madeira.trial import Trials

T = TypeVar("T")

#: Names of the cookies: of the session, of a notice, and of a form before there is a session.
SESSION: Final = "madeira_console"
NOTICE: Final = "madeira_notice"
BEFORE: Final = "madeira_before"

_HTML: Final = "text/html; charset=utf-8"

#: What is told of a status to somebody who need not know HTTP.
_TOLD: Final = {
    400: "That was not understood",
    403: "You may not",
    404: "There is no such thing",
    405: "Not this way",
    409: "Not as it is now",
    410: "It is gone",
    422: "That cannot be taken",
    500: "Something is wrong inside",
    503: "Not at the moment",
}


class Section(NamedTuple):
    """An entry of the navigation."""

    title: str
    address: str


class Templates:
    """The templates of the pages; everything that they show is escaped."""

    def __init__(self, *, assets: Assets) -> None:
        self._env = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=words.seen,
        )
        told = (words.number, words.span, words.ago, words.exact, words.short, words.cut, words.tone, words.lane, words.plural)
        self._env.filters |= {function.__name__: function for function in (*told, words.joined, words.sentence)}
        self._env.filters["json"] = _pretty
        self._env.globals |= {"address": words.address, "asset": assets.address, "version": __version__}

    def render(self, name: str, values: Mapping[str, Any]) -> bytes:
        """A page."""
        return self._env.get_template(name).render(values).encode()


@dataclass(frozen=True, eq=False)
class House:
    """The parts of which pages are made."""

    database: Database
    #: Reads lists, which may be some seconds old.
    lists: Lists
    queues: Queues
    configurator: Configurator
    trials: Trials
    rules: NewestRules
    egress: Egress
    acting: Acting
    sessions: Sessions
    assets: Assets
    templates: Templates
    sections: tuple[Section, ...]

    def show(self, req: falcon.Request, resp: falcon.Response, template: str, *, title: str, **values: Any) -> None:
        """Answer with a page; `values` are for its template."""
        session: Session | None = getattr(req.context, "session", None)
        notice = self._notice(req, resp) if session else None
        given = {
            "title": title,
            "session": session,
            "sections": self.sections,
            "path": req.path,
            "notice": notice,
            "now": datetime.now(UTC),
        }
        resp.content_type = _HTML
        resp.data = self.templates.render(template, given | values)

    def read(self, req: falcon.Request, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """What a list shows. Who has just done something reads it where it is to be seen: the notice about it tells."""
        return self.lists.read(work, newest=NOTICE in req.cookies)

    def _notice(self, req: falcon.Request, resp: falcon.Response) -> Notice | None:
        given = req.cookies.get(NOTICE)
        # What refreshes a page behind somebody's back must not take the notice away.
        if given is None or req.get_header("X-Madeira-Refresh"):
            return None
        resp.unset_cookie(NOTICE, path="/console")
        return self.sessions.noted(given)


class Page:
    """What resources of pages share."""

    def __init__(self, house: House) -> None:
        self.house = house

    def acted(self, req: falcon.Request, resp: falcon.Response, back: str, text: str, *, what: str) -> None:
        """Send the browser back to a page that tells what was done to `what`, as the audit calls it."""
        notice = Notice(text, words.address("audit", what=what))
        set_cookie(req, resp, NOTICE, self.house.sessions.note(notice))
        resp.status = falcon.HTTP_303
        resp.set_header("Location", back)


def session_of(req: falcon.Request) -> Session:
    """Who is signed in."""
    found: Session = req.context.session
    return found


def acting(req: falcon.Request, need: Role = Role.OPERATOR, *, limit: int = forms.MAX_BYTES) -> tuple[Session, Mapping[str, str]]:
    """Who acts, and the form that he has sent, of at most `limit` bytes.

    Raises:
        Problem: the form is not of his session, or his role does not suffice.
    """
    session = session_of(req)
    form = forms.guarded(req, session.csrf, limit=limit)
    if not session.may(need):
        raise problems.forbidden(session.role, need)
    return session, form


def set_cookie(req: falcon.Request, resp: falcon.Response, name: str, value: str, *, life_s: int | None = None) -> None:
    """Set a cookie that no script sees and no other site sends."""
    secure = req.env.get("wsgi.url_scheme") == "https" or req.get_header("X-Forwarded-Proto") == "https"
    resp.set_cookie(name, value, max_age=life_s, path="/console", secure=secure, http_only=True, same_site="Strict")


def phrase(status: int) -> str:
    """What is told of a status, in words; of one that nobody should meet, its reason phrase."""
    return _TOLD.get(status) or HTTPStatus(status).phrase


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=jsonable)
