"""What a browser posts: bounded, from a page of ours, and by whoever is signed in.

Three things keep another site from posting in somebody's name, and each would do: the cookie is not sent with its requests
(``SameSite=Strict``), the browser tells where a post comes from, and every form carries a text that only the session's own
pages know.
"""

import hmac
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import falcon

from madeira.api import reading
from madeira.api.admin import bodies
from madeira.api.problems import FieldError, Problem, invalid

#: Bytes of a form; a payload to try an endpoint with fits.
MAX_BYTES: Final = 32_768

#: Bytes of a form for a source, an endpoint or a route: what the API takes, as a browser writes it.
LARGE: Final = 3 * bodies.MAX_BODY

#: Fields of a form; an endpoint may have a hundred headers.
_MAX_FIELDS: Final = 500

_FORM: Final = "application/x-www-form-urlencoded"


def read(req: falcon.Request, *, limit: int = MAX_BYTES) -> Mapping[str, str]:
    """The fields of a form of at most `limit` bytes.

    Raises:
        Problem: 400, 403, 408, 413 or 415.
    """
    refuse_other_sites(req)
    reading.only(req.env, _FORM)
    raw = reading.body(req.env, limit=limit)
    try:
        pairs = parse_qsl(raw.decode("utf-8"), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:
        raise Problem(400, "the form cannot be read: it is not what a browser sends") from None
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Problem(400, "the form cannot be read: it has a field twice")
    return found


def guarded(req: falcon.Request, csrf: str, *, limit: int = MAX_BYTES) -> Mapping[str, str]:
    """The fields of a form of at most `limit` bytes that carries `csrf`.

    Raises:
        Problem: as `read`; 403 when it carries another one, or none.
    """
    found = read(req, limit=limit)
    if not hmac.compare_digest(found.get("csrf", "").encode("utf-8", "replace"), csrf.encode()):
        raise Problem(403, "the form is not of this session: go back, load the page again, and repeat what you did")
    return {name: value for name, value in found.items() if name != "csrf"}


def reason(form: Mapping[str, str], *, required: bool = True) -> str | None:
    """Why somebody does it.

    Raises:
        Problem: 422, when it is missing though needed, or is no line of text.
    """
    given = form.get("reason", "").strip()
    if not given and required:
        raise invalid([FieldError("reason", "is needed: say why in a few words; it stands in the audit")])
    try:
        return bodies.reason(given) or None
    except ValueError as e:
        raise invalid([FieldError("reason", str(e))]) from None


def refuse_other_sites(req: falcon.Request) -> None:
    """Refuse what a page of another site has posted, as far as the browser tells.

    Raises:
        Problem: 403.
    """
    site, origin = req.get_header("Sec-Fetch-Site"), req.get_header("Origin")
    if site is not None:
        comes_from_us = site in ("same-origin", "none")
    elif origin is not None:
        comes_from_us = urlsplit(origin).netloc in (req.get_header("Host"), req.get_header("X-Forwarded-Host"))
    else:
        comes_from_us = True
    if not comes_from_us:
        raise Problem(403, "this was posted by a page of another site; nothing was done")
