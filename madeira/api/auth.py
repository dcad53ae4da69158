"""Who is asking: a source by its signature, an administrator by a bearer token.

Sources are told nothing about why they were refused: an unknown name, a wrong signature and a stale timestamp get the
same answer, after the same work, so that names cannot be found out by trying.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from madeira import log
from madeira.api import problems
from madeira.delivery import signing
from madeira.records import Source

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who was recognised: the administrator, or the source of that name."""

    source: str | None

    @property
    def is_admin(self) -> bool:
        """Whether it is the administrator, who may see and cancel every source's events."""
        return self.source is None

    @property
    def name(self) -> str:
        """How the audit calls it."""
        return "admin" if self.source is None else f"source {self.source}"


class Authenticator:
    """Recognises callers.

    `sources` gives the sources as they are now; `admin_token` is empty when there is no administrator; `now` gives Unix
    seconds.
    """

    def __init__(
        self, *, sources: Callable[[], Mapping[str, Source]], admin_token: str, now: Callable[[], float] = time.time
    ) -> None:
        self._sources = sources
        self._admin_digest = _digest(admin_token.encode()) if admin_token else None
        self._now = now
        self._nobody = (secrets.token_hex(32),)

    def source(self, environ: Mapping[str, Any], raw: bytes) -> str:
        """The name of the source that signed `raw`.

        Raises:
            Problem: 401, whatever was wrong.
        """
        name = environ.get("HTTP_X_MADEIRA_SOURCE", "")
        known = self._sources().get(name)
        # An unknown source costs the same work with a secret that nobody has.
        keys = known.secrets if known is not None else self._nobody
        if not self._signed(keys, environ, raw) or known is None:
            # For whoever is on call; the sender learns nothing of it.
            _log.info(
                "auth.refused", source=name[:64], known=known is not None, timestamp=environ.get("HTTP_X_MADEIRA_TIMESTAMP")
            )
            raise problems.unauthorized()
        return known.name

    def admin(self, environ: Mapping[str, Any]) -> None:
        """Let the administrator pass.

        Raises:
            Problem: 401, with any other token or none.
        """
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        # Both sides are digests: their length and content tell nothing about the token.
        given = _digest(token.strip().encode("latin-1", "replace"))
        expected = self._admin_digest or _digest(self._nobody[0].encode())
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, expected) or self._admin_digest is None:
            raise problems.unauthorized()

    def caller(self, environ: Mapping[str, Any], raw: bytes) -> Caller:
        """The administrator, if a token is given, else the source that signed `raw`.

        Raises:
            Problem: 401, whatever was wrong.
        """
        if "HTTP_AUTHORIZATION" in environ:
            self.admin(environ)
            return Caller(None)
        return Caller(self.source(environ, raw))

    def label(self, environ: Mapping[str, Any]) -> str:
        """The value of a metric's label `source`: only names that are known, so that strangers cannot make new ones."""
        name: str = environ.get("HTTP_X_MADEIRA_SOURCE", "")
        return name if name in self._sources() else "unknown"

    def _signed(self, keys: tuple[str, ...], environ: Mapping[str, Any], raw: bytes) -> bool:
        timestamp = environ.get("HTTP_X_MADEIRA_TIMESTAMP")
        return signing.verify(keys, timestamp, environ.get("HTTP_X_MADEIRA_SIGNATURE"), raw, now=self._now())


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
