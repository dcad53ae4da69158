"""Who is signed in: a cookie that only we can make or read, and that says which token it came from.

The token itself is not in the cookie, and the role neither: both are looked up at every request, as the API does, so that a
revoked token ends its sessions within two seconds. A session ends by itself `LIFE_S` after it began.
"""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from madeira.api.auth import Authenticator
from madeira.api.known_tokens import KnownTokens
from madeira.api.problems import Problem
from madeira.sealing import PREFIX, Sealer, SealError
from madeira.states import Role
from madeira.store import tokens as store

#: Seconds that a session lasts: a shift, and a bit.
LIFE_S: Final = 12 * 3600

#: Seconds for which a notice waits for the page that shows it.
_NOTICE_S: Final = 60

#: Characters of a cookie that are looked at.
_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody who is signed in."""

    #: As the audit calls it.
    who: str
    role: Role
    #: What every form of this session carries.
    csrf: str = field(repr=False)

    def may(self, need: Role) -> bool:
        """Whether the role suffices."""
        return self.role.suffices(need)

    @property
    def may_act(self) -> bool:
        """Whether it is more than a reader."""
        return self.may(Role.OPERATOR)

    @property
    def may_configure(self) -> bool:
        """Whether sources, endpoints and routes may be changed."""
        return self.may(Role.ADMIN)


@dataclass(frozen=True, slots=True)
class Notice:
    """What an act has done, for the next page."""

    text: str
    #: Where it stands on record.
    link: str


class Sessions:
    """Makes and reads the cookies.

    `auth` and `tokens` know the tokens, `admin_token` is the one of the settings or empty, `now` gives Unix seconds.
    """

    def __init__(
        self,
        *,
        sealer: Sealer,
        auth: Authenticator,
        tokens: KnownTokens,
        admin_token: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._sealer = sealer
        self._auth = auth
        self._tokens = tokens
        self._admin = _mark(store.digest_of(admin_token)) if admin_token else None
        self._now = now

    @property
    def can_begin(self) -> bool:
        """Whether there is a key to seal cookies with."""
        return self._sealer.has_key

    def begin(self, text: str) -> str | None:
        """The cookie for whoever shows the token `text`; None when it does not hold.

        Raises:
            StoreUnavailable: nobody knows which tokens hold.
        """
        try:
            # As the API would be asked; what could not stand in a header is no token.
            self._auth.person({"HTTP_AUTHORIZATION": f"Bearer {text}", "PATH_INFO": "/console/sign-in"}, Role.VIEWER)
        except (Problem, UnicodeError):
            return None
        mark = _mark(store.digest_of(text))
        if self._admin is not None and hmac.compare_digest(mark, self._admin):
            return self._sealed("session", LIFE_S, handle="", mark=mark, csrf=secrets.token_urlsafe(24))
        handle = store.handle_of(text)
        return self._sealed("session", LIFE_S, handle=handle, csrf=secrets.token_urlsafe(24)) if handle else None

    def read(self, cookie: str | None) -> Session | None:
        """Whose cookie it is; None when it is nobody's, or has had its time.

        Raises:
            StoreUnavailable: nobody knows which tokens hold.
        """
        found = self._opened("session", cookie)
        if found is None:
            return None
        if found["handle"] == "":
            same = self._admin is not None and hmac.compare_digest(found["mark"], self._admin)
            return Session("admin", Role.ADMIN, found["csrf"]) if same else None
        token = self._tokens.held(found["handle"])
        return Session(f"token {token.name}", token.role, found["csrf"]) if token else None

    def note(self, notice: Notice) -> str:
        """The cookie that carries `notice` to the next page."""
        return self._sealed("notice", _NOTICE_S, text=notice.text, link=notice.link)

    def noted(self, cookie: str | None) -> Notice | None:
        """What a cookie carries."""
        found = self._opened("notice", cookie)
        return Notice(found["text"], found["link"]) if found else None

    def _sealed(self, kind: str, life_s: float, **members: Any) -> str:
        text = json.dumps({"kind": kind, "until": self._now() + life_s} | members)
        # Without what a cookie would have to quote.
        return self._sealer.seal(text).removeprefix(PREFIX).rstrip("=")

    def _opened(self, kind: str, cookie: str | None) -> dict[str, Any] | None:
        if not cookie or len(cookie) > _MAX:
            return None
        try:
            found: dict[str, Any] = json.loads(self._sealer.open(cookie + "=" * (-len(cookie) % 4)))
        except (SealError, ValueError):
            return None
        # Other things are sealed with the same keys.
        if not isinstance(found, dict) or found.get("kind") != kind or found["until"] < self._now():
            return None
        return found


def _mark(digest: bytes) -> str:
    """Tells the token of the settings from another one, and nothing else."""
    return hashlib.sha256(b"console" + digest).hexdigest()[:32]
