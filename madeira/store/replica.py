"""Where lists are read: from a replica of Postgres, as long as it is there and hardly behind; else from the primary.

What decides anything never comes here: a list may be some seconds old, a decision may not. How far a replica is behind is found
without comparing clocks, and without trusting what it says of itself, since one that is cut off believes itself up to date: a
thread asks the primary, once a second, how far its log has come, and the replica how much of it has been carried out. What the
primary had written at the one moment is what the replica shows at the other. Readers ask nobody: they look at what the thread
found last.

A replica of another cluster, or another database of the right one, would show lists of somebody else: both are told apart by
the cluster's identifier and the database's, which a streaming replica has from its primary.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import psycopg

from madeira import log
from madeira.errors import StoreUnavailable
from madeira.store.database import Database

T = TypeVar("T")

#: Seconds by which what a replica shows may be old.
MAX_AGE_S: Final = 5.0

#: Seconds between two looks.
_LOOK_S: Final = 1.0

#: How far the log of the primary is on its disk, so of all that is committed, as bytes from its beginning.
_WRITTEN: Final = "SELECT (pg_current_wal_flush_lsn() - '0/0')::numeric::int8"

#: How much of it has been carried out; NULL on a server that carries out nothing of another one's: it is no replica, or no more.
_REPLAYED: Final = "SELECT CASE WHEN pg_is_in_recovery() THEN (pg_last_wal_replay_lsn() - '0/0')::numeric::int8 END"

#: Which database of which cluster this is.
_IDENTITY: Final = (
    "SELECT (SELECT system_identifier FROM pg_control_system()), (SELECT oid FROM pg_database WHERE datname = current_database())"
)

_log = log.get(__name__)


class _Written(NamedTuple):
    at: float
    place: int


class Lists:
    """Reads lists. Without a `replica` everything is read from the `primary`.

    Parameters:
        primary: where everything is.
        replica: a streaming replica of it; its sessions must be allowed to go to a server that takes no writes.
        max_age_s: how old what a replica shows may be.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        primary: Database,
        replica: Database | None = None,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._primary = primary
        self._replica = replica
        self._max_age_s = max_age_s
        self._clock = clock
        self._written: deque[_Written] = deque(maxlen=max(2, int(max_age_s / _LOOK_S) + 2))
        #: What the primary had written by then is on the replica, by `clock`; none of it counts once it refused a read.
        self._fresh_at = float("-inf")
        #: The same for whoever watches it, whom a refusal tells nothing about its age.
        self._shown_at = clock()
        self._told: bool | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look after the replica; call it in the process that reads, after a fork."""
        if self._replica is None:
            return
        self._replica.open()
        self._thread = threading.Thread(target=self._run, name="madeira-replica", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and close the connections to the replica."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if self._replica is not None:
            self._replica.close()

    def read(self, work: Callable[[psycopg.Connection[Any]], T], *, newest: bool = False) -> T:
        """What `work` reads in one transaction: on the replica when that will do, else, or when it fails there, on the primary.

        `newest` asks for the primary: for whoever wants to see what he has just done.

        Raises:
            StoreUnavailable: the primary cannot be read either.
        """
        if self._replica is not None and not newest and self.uses_replica:
            try:
                with self._replica.connection() as connection:
                    return work(connection)
            except (StoreUnavailable, psycopg.Error) as e:
                # It may be gone, or have ended a long read that stood in the way of what it has to carry out.
                self._fresh_at = float("-inf")
                _log.info("replica.refused", reason=str(e))
        with self._primary.connection() as connection:
            return work(connection)

    @property
    def uses_replica(self) -> bool:
        """Whether the replica is there, and not too far behind."""
        return self._clock() - self._fresh_at <= self._max_age_s

    @property
    def lag_s(self) -> float | None:
        """How old what the replica is known to show is, in seconds; None without one.

        It rises from one look to the next, by a second or so, and for as long as the replica is away, or is none.
        """
        return None if self._replica is None else self._clock() - self._shown_at

    def look(self) -> str | None:
        """See how far the replica is behind; the answer is why it is not used, None when it is."""
        assert self._replica is not None
        try:
            at, (place, ours) = self._clock(), _asked(self._primary, _WRITTEN)
            self._written.append(_Written(at, place))
            replayed, theirs = _asked(self._replica, _REPLAYED)
        except (StoreUnavailable, psycopg.Error) as e:
            return str(e)
        if ours != theirs:
            self._fresh_at = float("-inf")
            return "it is a replica of another server, or another database: lists would be those of somebody else"
        shown = [written.at for written in self._written if written.place <= replayed]
        if shown:
            self._fresh_at = self._shown_at = shown[-1]
        return None if self.uses_replica else f"it is more than {self._max_age_s:g} s behind"

    def _tell(self, trouble: str | None) -> None:
        """Log when the replica begins or ceases to be used."""
        uses = self.uses_replica
        if uses == self._told:
            return
        self._told = uses
        if uses:
            _log.info("replica.used")
        else:
            _log.warning("replica.not_used", reason=trouble, detail="lists are read from the primary until it is back")

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._tell(self.look())
            self._stopped.wait(_LOOK_S)


def _asked(database: Database, question: str) -> tuple[int, tuple[Any, ...]]:
    """The number that a server answers, and which database of which cluster it is.

    Raises:
        StoreUnavailable: it does not answer, or is none that could.
    """
    with database.connection() as connection:
        row = connection.execute(question).fetchone()
        identity = connection.execute(_IDENTITY).fetchone()
    if row is None or row[0] is None:
        raise StoreUnavailable("the server is no replica: it does not carry out what another one writes")
    return int(row[0]), tuple(identity or ())
