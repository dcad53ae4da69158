"""The tokens that hold, as this process knows them: read from Postgres at most once a second.

All are read together, since they are few, and by one request at a time, so that strangers with made-up tokens hold at most one
connection. A token that was revoked stops to count within a second (plus the reading); one that is not known is looked for
again, since it may have been made just now. Without Postgres nobody can tell which tokens hold: the answer is 503 then, never a
guess. The last use is noted by a thread of its own, so that no request waits for it.
"""

import hmac
import secrets
import threading
import time
from typing import Final

import psycopg

from madeira import log
from madeira.errors import StoreError, StoreUnavailable
from madeira.store import tokens as store
from madeira.store.database import Database
from madeira.store.tokens import Token

#: Seconds for which a reading counts. Revocations count that much later.
FRESH_S: Final = 1.0

#: Seconds that a request waits for a reading that another one has begun.
_WAIT_S: Final = 2.0

#: Seconds after a failed reading in which no other is tried: a Postgres that is away must not hold every thread.
_FAILED_S: Final = 0.5

#: Seconds between two notes of the use of one token.
_NOTE_EVERY_S: Final = 60.0

_log = log.get(__name__)


class KnownTokens:
    """Recognises the tokens of people and programs."""

    def __init__(self, *, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._live: dict[str, Token] = {}
        self._read_at = float("-inf")
        self._failed_at = float("-inf")
        self._failure = ""
        self._uses = _Uses(database)
        self._nobody = store.digest_of(secrets.token_hex(32))

    def find(self, text: str) -> Token | None:
        """The token of this text; None when there is none that holds, for whatever reason.

        Raises:
            StoreUnavailable: Postgres could not be asked.
        """
        handle = store.handle_of(text)
        if handle is None:
            return None
        known = self._look_up(handle)
        # Compared in constant time, also where there is nothing to compare with.
        same = hmac.compare_digest(store.digest_of(text), known.digest if known else self._nobody)
        if known is None or not same:
            return None
        self._uses.note(handle)
        return known

    def held(self, handle: str) -> Token | None:
        """The token of this handle, for whoever has shown its text before; None when it does not hold any more.

        Raises:
            StoreUnavailable: Postgres could not be asked.
        """
        known = self._look_up(handle)
        if known is not None:
            self._uses.note(handle)
        return known

    def stop(self) -> None:
        """Note what is left to note, and end the thread."""
        self._uses.stop()

    def _look_up(self, handle: str) -> Token | None:
        now = time.monotonic()
        return self._since(now - FRESH_S).get(handle) or self._since(now).get(handle)

    def _since(self, moment: float) -> dict[str, Token]:
        """The tokens as they were at `moment` or later."""
        if self._read_at >= moment:
            return self._live
        if not self._lock.acquire(timeout=_WAIT_S):
            raise StoreUnavailable("Postgres does not answer; another request is waiting for it")
        try:
            if self._read_at < moment:
                self._read(time.monotonic())
            return self._live
        finally:
            self._lock.release()

    def _read(self, now: float) -> None:
        if now - self._failed_at < _FAILED_S:
            raise StoreUnavailable(self._failure)
        try:
            with self._database.connection() as connection:
                live = store.live(connection)
        except StoreUnavailable as e:
            self._failed_at, self._failure = time.monotonic(), str(e)
            raise
        # Counted from before the reading: what was revoked meanwhile may be in it.
        self._live, self._read_at = live, now


class _Uses:
    """Notes when tokens were used, behind the requests' back."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._some = threading.Condition()
        self._noted_at: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def note(self, handle: str) -> None:
        now = time.monotonic()
        if now - self._noted_at.get(handle, float("-inf")) < _NOTE_EVERY_S:
            return
        with self._some:
            self._noted_at[handle] = now
            self._waiting.add(handle)
            if self._thread is None:
                # Made at the first use: a thread does not survive a fork.
                self._thread = threading.Thread(target=self._run, name="madeira-token-use", daemon=True)
                self._thread.start()
            self._some.notify()

    def stop(self) -> None:
        with self._some:
            self._stopping = True
            self._some.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._waiting or self._stopping)
                handles, self._waiting = self._waiting, set()
            if not handles:
                return
            try:
                with self._database.connection() as connection:
                    store.note_use(connection, handles)
            except (StoreError, psycopg.Error) as e:
                # Told by the next use, in a minute.
                _log.warning("token.use_not_noted", reason=str(e))
