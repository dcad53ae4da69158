"""Who is asking: a source by its signature, a person or a program by a bearer token with a role.

Nobody is told why they were refused: an unknown name, a wrong signature and a stale timestamp get the same answer, after the
same work, so that names cannot be found out by trying; and so do unknown, revoked and expired tokens. The one exception is a
source with secrets that cannot be used in this process: who is told 401 gives up, and what a sender did right must not be lost
by our fault. So a signature that fits none of the others, and is recent, is told 503.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from madeira import log, metrics
from madeira.api import problems
from madeira.api.known_tokens import KnownTokens
from madeira.delivery import signing
from madeira.errors import StoreUnavailable
from madeira.routing.config import Rules
from madeira.states import Role

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who was recognised."""

    #: Name of the source that signed; None for people and programs, who have a role instead.
    source: str | None
    role: Role | None
    #: How the audit calls it: ``admin`` (of MADEIRA_ADMIN_TOKEN), ``token NAME`` or ``source NAME``.
    name: str


class Authenticator:
    """Recognises callers.

    `rules` gives the rules as they are now; `tokens` knows the tokens that hold; `admin_token` is one more, of an
    administrator, or empty; `now` gives Unix seconds.
    """

    def __init__(
        self,
        *,
        rules: Callable[[], Rules],
        tokens: KnownTokens,
        admin_token: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._rules = rules
        self._tokens = tokens
        self._admin_digest = _digest(admin_token.encode()) if admin_token else None
        self._now = now
        self._nobody = (secrets.token_hex(32),)

    def source(self, environ: Mapping[str, Any], raw: bytes) -> str:
        """The name of the source that signed `raw`.

        Raises:
            Problem: 401, whatever was wrong; 503 when the source has secrets that cannot be used here, and none of the others
                made the signature.
            StoreUnavailable: the rules were not read yet.
        """
        name = environ.get("HTTP_X_MADEIRA_SOURCE", "")
        rules = self._rules()
        known = rules.sources.get(name)
        # An unknown source costs the same work with a secret that nobody has.
        keys = known.secrets if known is not None else self._nobody
        if not self._signed(keys, environ, raw) or known is None:
            if f"source/{name}" in rules.unusable and self._might_be_signed(environ):
                _log.warning("auth.unusable", source=name, reason=rules.unusable[f"source/{name}"])
                raise problems.unavailable("the source cannot be recognised here at the moment; send the request again")
            # For whoever is on call; the sender learns nothing of it.
            _log.info(
                "auth.refused", source=name[:64], known=known is not None, timestamp=environ.get("HTTP_X_MADEIRA_TIMESTAMP")
            )
            raise problems.unauthorized()
        return known.name

    def person(self, environ: Mapping[str, Any], need: Role) -> Caller:
        """Who has the bearer token, if its role may do what `need` may.

        Raises:
            Problem: 401 for any token that does not hold, and for none; 403 when the role does not suffice.
            StoreUnavailable: Postgres is away, so that nobody knows which tokens hold; never for the administrator's of
                the settings.
        """
        caller = self._bearer(environ)
        if caller is None or caller.role is None:
            raise problems.unknown_token()
        if not caller.role.suffices(need):
            _log.info("auth.forbidden", who=caller.name, role=caller.role, needed=need, path=environ.get("PATH_INFO"))
            raise problems.forbidden(caller.role, need)
        return caller

    def caller(self, environ: Mapping[str, Any], raw: bytes, need: Role = Role.VIEWER) -> Caller:
        """Who has the bearer token, as `person`; without one, the source that signed `raw`.

        A source has no role: it may see and cancel its own events, and nothing else. Whoever calls this sees to that.

        Raises:
            Problem: 401, whatever was wrong; 403 when the token's role does not suffice.
            StoreUnavailable: Postgres is away.
        """
        if "HTTP_AUTHORIZATION" in environ:
            return self.person(environ, need)
        source = self.source(environ, raw)
        return Caller(source, None, f"source {source}")

    def label(self, environ: Mapping[str, Any]) -> str:
        """The value of a metric's label `source`: only names that are known, so that strangers cannot make new ones."""
        name: str = environ.get("HTTP_X_MADEIRA_SOURCE", "")
        try:
            rules = self._rules()
        except StoreUnavailable:
            return metrics.UNKNOWN
        return name if name in rules.sources or f"source/{name}" in rules.unusable else metrics.UNKNOWN

    def _bearer(self, environ: Mapping[str, Any]) -> Caller | None:
        scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        text = given.strip()
        if scheme.lower() != "bearer" or not text:
            return None
        # Both sides are digests: their length and content tell nothing about the token.
        if self._admin_digest and hmac.compare_digest(_digest(text.encode("latin-1", "replace")), self._admin_digest):
            return Caller(None, Role.ADMIN, "admin")
        token = self._tokens.find(text)
        if token is None:
            _log.info("auth.refused_token", path=environ.get("PATH_INFO"))
            return None
        return Caller(None, token.role, f"token {token.name}")

    def _might_be_signed(self, environ: Mapping[str, Any]) -> bool:
        """Whether there is a signature, and it is recent: some secret may have made it."""
        timestamp = environ.get("HTTP_X_MADEIRA_TIMESTAMP")
        signature = environ.get("HTTP_X_MADEIRA_SIGNATURE")
        return bool(timestamp and signature and signing.is_fresh(timestamp, self._now()))

    def _signed(self, keys: tuple[str, ...], environ: Mapping[str, Any], raw: bytes) -> bool:
        timestamp = environ.get("HTTP_X_MADEIRA_TIMESTAMP")
        return signing.verify(keys, timestamp, environ.get("HTTP_X_MADEIRA_SIGNATURE"), raw, now=self._now())


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
