"""Signing in with a token of the API, and out again."""

import hmac
import secrets
from urllib.parse import quote, unquote

import falcon

from madeira.console import forms, words
from madeira.console.house import BEFORE, SESSION, Page, acting, set_cookie
from madeira.console.session import LIFE_S
from madeira.states import Role

#: Where one signs in.
ADDRESS = "/console/sign-in"

#: What may stand in the address of a page as it is.
SAFE = "/:@!$&'()*+,;=?%~-._"


class SignIn(Page):
    """``/console/sign-in``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show the form."""
        self._form(req, resp, onward=req.get_param("next") or "")

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Begin a session."""
        form = forms.read(req)
        onward = _onward(form.get("next", ""))
        before = req.cookies.get(BEFORE, "")
        if not before or not hmac.compare_digest(form.get("csrf", "").encode(), before.encode()):
            self._form(req, resp, onward=onward, refusal="The form was old, or your browser keeps no cookies. Try once more.")
            return
        if not self.house.sessions.can_begin:
            self._form(req, resp, onward=onward)
            return
        cookie = self.house.sessions.begin(form.get("token", "").strip())
        if cookie is None:
            self._form(req, resp, onward=onward, refusal="This token does not hold: it is unknown, revoked or expired.")
            return
        set_cookie(req, resp, SESSION, cookie, life_s=LIFE_S)
        resp.unset_cookie(BEFORE, path="/console")
        resp.status = falcon.HTTP_303
        resp.set_header("Location", onward)

    def _form(self, req: falcon.Request, resp: falcon.Response, *, onward: str, refusal: str | None = None) -> None:
        csrf = secrets.token_urlsafe(24)
        set_cookie(req, resp, BEFORE, csrf)
        resp.status = falcon.HTTP_403 if refusal else falcon.HTTP_200
        can_begin = self.house.sessions.can_begin
        values = {"csrf": csrf, "onward": _onward(onward), "refusal": refusal, "can_begin": can_begin, "hours": LIFE_S // 3600}
        self.house.show(req, resp, "sign_in.html", title="Sign in", **values)


class SignOut(Page):
    """``/console/sign-out``."""

    def on_get(self, _req: falcon.Request, _resp: falcon.Response) -> None:
        """Nothing ends by a link."""
        raise falcon.HTTPSeeOther("/console")

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """End the session in this browser."""
        acting(req, Role.VIEWER)
        resp.unset_cookie(SESSION, path="/console")
        resp.status = falcon.HTTP_303
        resp.set_header("Location", ADDRESS)


def to_sign_in(req: falcon.Request) -> falcon.HTTPStatus:
    """Sends somebody without a session to the form, and back afterwards to the page where he was."""
    path, query = req.path, req.query_string
    if req.method != "GET":
        # Acts are posted to an address below the page that shows them.
        path = path.rsplit("/", 1)[0]
    here = quote(f"{path}?{query}" if query else path, safe=SAFE)
    return falcon.HTTPSeeOther(words.address("sign-in", next=None if here == "/console" else here))


def _onward(given: str) -> str:
    """A page of the console, whatever was given: never a way to another site, or to the rest of this one."""
    inside = given == "/console" or given.startswith(("/console/", "/console?"))
    if not inside or "\\" in given or "//" in given or not given.isascii() or not given.isprintable() or _climbs(given):
        return "/console"
    return quote(given, safe=SAFE)


def _climbs(address: str) -> bool:
    """Whether a browser would take a way up out of `address`, also one whose dots are escaped."""
    path = address.partition("?")[0]
    return any(unquote(segment) in (".", "..") for segment in path.split("/"))
