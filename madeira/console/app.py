"""The console as an application: its pages, who may see them, and what is told when something is wrong."""

from typing import Any, Final, Protocol
from urllib.parse import quote

import falcon

from madeira import log
from madeira.api import problems
from madeira.api.acting import Acting
from madeira.api.admin.dry_run import NewestRules
from madeira.api.auth import Authenticator
from madeira.api.known_tokens import KnownTokens
from madeira.api.problems import Problem
from madeira.broker.queues import Queues
from madeira.console import (
    audit,
    dead_letters,
    dry_run,
    editing,
    endpoints,
    event,
    events,
    house,
    jobs,
    objects,
    overview,
    sign_in,
)
from madeira.console.assets import Assets
from madeira.console.house import House, Section, Templates
from madeira.console.session import Sessions
from madeira.egress import Egress
from madeira.errors import BrokerUnavailable, StoreUnavailable
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.store.database import Database
from madeira.store.replica import Lists
from madeira.trial import Trials


class _Module(Protocol):
    """What adds pages."""

    def add(self, app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
        """Add them."""


#: The navigation, and the modules that add the pages of each entry. A new page is a line here and a module with ``add``.
SECTIONS: Final[tuple[tuple[Section, tuple[_Module, ...]], ...]] = (
    (Section("Overview", "/console"), (overview,)),
    (Section("Events", "/console/events"), (events, event)),
    (Section("Dead letters", "/console/dead-letters"), (dead_letters,)),
    (Section("Jobs", "/console/jobs"), (jobs,)),
    (Section("Endpoints", "/console/endpoints"), (endpoints, editing.endpoints)),
    (Section("Routes", "/console/routes"), (objects.routes, editing.routes)),
    (Section("Sources", "/console/sources"), (objects.sources, editing.sources)),
    (Section("Dry run", "/console/dry-run"), (dry_run,)),
    (Section("Audit", "/console/audit"), (audit,)),
)

#: What every answer carries. A page may load what is ours, run no script that is written into it, and stand in no frame. The
#: referrer goes nowhere else; were it left out altogether, browsers would not tell where a post comes from.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_log = log.get(__name__)


def create(
    *,
    database: Database,
    lists: Lists,
    queues: Queues,
    configurator: Configurator,
    trials: Trials,
    rules: NewestRules,
    egress: Egress,
    auth: Authenticator,
    tokens: KnownTokens,
    sealer: Sealer,
    admin_token: str,
) -> "falcon.App[falcon.Request, falcon.Response]":
    """The WSGI application for everything under ``/console``.

    `sealer` seals the cookies: without a key nobody can sign in. `admin_token` is the one of the settings, or empty.
    """
    assets = Assets()
    of_all = House(
        database=database,
        lists=lists,
        queues=queues,
        configurator=configurator,
        trials=trials,
        rules=rules,
        egress=egress,
        acting=Acting(database=database, queues=queues),
        sessions=Sessions(sealer=sealer, auth=auth, tokens=tokens, admin_token=admin_token),
        assets=assets,
        templates=Templates(assets=assets),
        sections=tuple(section for section, _ in SECTIONS),
    )
    app = falcon.App(middleware=[_Door(of_all)])
    app.req_options.strip_url_path_trailing_slash = True
    _install_errors(app, of_all)
    app.add_route("/console/static/{name}", assets)
    app.add_route(sign_in.ADDRESS, sign_in.SignIn(of_all))
    app.add_route("/console/sign-out", sign_in.SignOut(of_all))
    for module in (module for _, modules in SECTIONS for module in modules):
        module.add(app, of_all)
    return app


class _Door:
    """Lets in who is signed in, and gives every answer its headers."""

    def __init__(self, of_all: House) -> None:
        self._house = of_all

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Find out who it is."""
        if req.path.startswith("/console/static/"):
            return
        session = self._house.sessions.read(req.cookies.get(house.SESSION))
        req.context.session = session
        if session is None and req.path != sign_in.ADDRESS:
            if _comes_from_elsewhere(req):
                # A link in a chat: the browser keeps the cookie back, though there may be one. Asked for by a page of ours it
                # comes along.
                here = f"{req.path}?{req.query_string}" if req.query_string else req.path
                self._house.show(req, resp, "knock.html", title="One moment", here=quote(here, safe=sign_in.SAFE))
                resp.complete = True
                return
            raise sign_in.to_sign_in(req)

    def process_response(self, req: falcon.Request, resp: falcon.Response, _resource: object, _succeeded: bool) -> None:
        """Add the headers."""
        for name, value in _HEADERS.items():
            if resp.get_header(name) is None:
                resp.set_header(name, value)
        if resp.get_header("Cache-Control") is None:
            resp.set_header("Cache-Control", "no-store")


def _comes_from_elsewhere(req: falcon.Request) -> bool:
    return req.method == "GET" and req.get_header("Sec-Fetch-Site") in ("cross-site", "same-site")


def _install_errors(app: "falcon.App[falcon.Request, falcon.Response]", of_all: House) -> None:
    """Tell every error in words."""

    def told(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError, _params: dict[str, Any]) -> None:
        status = error.status_code
        detail = error.description or _described(status)
        errors = error.errors if isinstance(error, Problem) else ()
        resp.status = status
        for name, value in dict(error.headers or {}).items():
            if name != "WWW-Authenticate":
                resp.set_header(name, value)
        of_all.show(req, resp, "problem.html", title=house.phrase(status), status=status, detail=detail, errors=errors)

    def away(req: falcon.Request, resp: falcon.Response, error: Exception, params: dict[str, Any]) -> None:
        _log.warning("console.unavailable", reason=str(error))
        store = "Postgres" if isinstance(error, StoreUnavailable) else "Redis"
        told(req, resp, problems.unavailable(f"{problems.why_away(error, store)}; nothing is lost, try again"), params)

    def unexpected(req: falcon.Request, resp: falcon.Response, error: Exception, params: dict[str, Any]) -> None:
        if isinstance(error, falcon.HTTPStatus):
            raise error
        _log.error("console.failed", method=req.method, path=req.path, exc_info=error)
        told(req, resp, Problem(500, "an error inside Madeira; it is in the log of the API"), params)

    app.add_error_handler(Exception, unexpected)
    app.add_error_handler(falcon.HTTPError, told)
    app.add_error_handler(StoreUnavailable, away)
    app.add_error_handler(BrokerUnavailable, away)


def _described(status: int) -> str:
    match status:
        case 404:
            return "there is no page at this address"
        case 405:
            return "this address is for a form; go back and use the page"
        case _:
            return house.phrase(status)
