"""The connections of one process to Postgres.

Two kinds: a small pool for whoever reads a page or runs a short transaction, and dedicated connections for the threads
that commit groups (`madeira.store.group_commit`). Both are opened lazily, so after a fork. A server that answers no more
must not hang its callers: server-side timeouts and TCP keepalives catch most of it, but a frozen server goes on
acknowledging packets, so every wait for an answer has a limit on our side too. No session state matters, so a pooler in
transaction mode may stand between: a new connection asks whether what it said of itself has arrived, and does without prepared
statements where it has not. It asks in the same breath whether this version may work on these tables.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import generators, pq
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from madeira.errors import StoreUnavailable
from madeira.store import schema, search_path

T = TypeVar("T")

#: Seconds that the check of a pooled connection may take before the connection counts as dead.
CHECK_S: Final = 1.0

#: Seconds that we wait beyond the server's own statement timeout before we give the connection up.
PATIENCE_S: Final = 2.0

#: Seconds after which the pool lets an idle connection go.
MAX_IDLE_S: Final = 300.0

#: Seconds that the pool goes on connecting in the background; short, since the next caller begins anew.
RECONNECT_S: Final = 1.0

#: Seconds after which a session that is at work has its statements planned anew.
PLANS_S: Final = 10.0

#: What a pooler says when it does not let ``options`` through.
_UNSUPPORTED: Final = "unsupported startup parameter"

#: Seconds that a new connection gets to say what it leads to.
GREETING_S: Final = 2.0

#: Times that a new connection asks again when it met a session in which no table is found although they are there.
_GREETINGS: Final = 3

#: A name that is set for the session only, so that a pooler which drops ``options`` without a word is found out.
_DIRECT: Final = "madeira.direct"

#: Whether the session is ours, and what was applied to the tables.
_GREETING: Final = f"SELECT current_setting('{_DIRECT}', true) = 'on', ARRAY({schema.APPLIED})"

#: The same where there are no tables.
_SHORT_GREETING: Final = f"SELECT current_setting('{_DIRECT}', true) = 'on', NULL"


#: Is given why connecting failed, or None when it did not.
Told = Callable[[str | None], None]


class BoundedConnection(psycopg.Connection[Any]):
    """A connection on which no wait is longer than `limit_s` seconds; past it the connection is closed.

    That a table is not there is told on it as what it means: whoever logs or shows the error says the remedy by that.
    """

    limit_s: float = math.inf

    #: Whether nothing stands between us and the server; not known before the greeting.
    _is_direct: bool = False

    #: When its plans were last made anew, by `time.monotonic`.
    _planned_at: float = -math.inf

    @classmethod
    def connect(  # type: ignore[override]
        cls, conninfo: str = "", *, limit_s: float = math.inf, told: "Told" = lambda _failure: None, **kwargs: Any
    ) -> "BoundedConnection":
        """Connect; behind a pooler that refuses or drops ``options``, without them and without prepared statements.

        `told` is given what came of it: why not, or None.

        Raises:
            psycopg.OperationalError: nobody answers, or not with a server that takes writes, or not with tables on which this
                version can work, or which this role may read.
        """
        try:
            conn = cls._connect(conninfo, kwargs)
            conn._greet()
        except psycopg.OperationalError as e:
            told(" ".join(str(e).split()))
            raise
        except psycopg.errors.InsufficientPrivilege as e:
            denied = f"{e.diag.message_primary} (`madeira doctor` says what to grant)"
            told(denied)
            raise psycopg.OperationalError(denied) from e
        told(None)
        conn.limit_s = limit_s
        conn._planned_at = time.monotonic()
        return conn

    def plan_anew(self) -> None:
        """Have what Postgres keeps of plans made anew when it is next used, unless that was done in the last `PLANS_S` seconds.

        Postgres does so itself once it has analysed a table: a minute or two after it has grown, in which a plan that was made
        for a dozen rows may read a hundred thousand (`docs/decisions.md`). Call it outside of a transaction.
        """
        now = time.monotonic()
        if now - self._planned_at < PLANS_S:
            return
        self._planned_at = now
        autocommit, self.autocommit = self.autocommit, True
        self.execute("DISCARD PLANS", prepare=False)
        self.autocommit = autocommit

    def _greet(self) -> None:
        """Ask what stands at the other end, and go by it."""
        autocommit, self.autocommit = self.autocommit, True
        threshold, self.prepare_threshold = self.prepare_threshold, None
        self.limit_s = GREETING_S
        try:
            row = self._answer()
        except BaseException:
            self.close()
            raise
        assert row is not None
        misfit = None if row[1] is None else schema.misfit(row[1], schema.known())
        if misfit:
            self.close()
            raise psycopg.OperationalError(misfit)
        self.autocommit = autocommit
        self._is_direct = row[0]
        self.prepare_threshold = threshold if row[0] else None

    def _answer(self) -> Any:
        for _ in range(_GREETINGS):
            try:
                return self.execute(_GREETING).fetchone()
            except psycopg.errors.UndefinedTable as e:
                if str(e) == search_path.HIDDEN:
                    raise psycopg.OperationalError(search_path.HIDDEN) from e
                if str(e) != search_path.SPOILT:
                    break
        return self.execute(_SHORT_GREETING).fetchone()

    @classmethod
    def _connect(cls, conninfo: str, kwargs: dict[str, Any]) -> "BoundedConnection":
        try:
            return super().connect(conninfo, **kwargs)
        except psycopg.OperationalError as e:
            if _UNSUPPORTED not in str(e):
                raise
            return super().connect(conninfo, **(kwargs | {"options": "", "prepare_threshold": None}))

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """Wait for an answer, at most `limit_s` seconds.

        Raises:
            psycopg.errors.UndefinedTable: with `schema.NO_TABLES`, or one of `search_path`, as its text, and the server's own
                words as its cause.
        """
        if timeout is None and self.limit_s != math.inf:
            timeout = self.limit_s
        try:
            return super().wait(gen, interval, timeout)
        except psycopg.errors.UndefinedTable as e:
            raise psycopg.errors.UndefinedTable(self._why_not_found(str(e))) from e
        except psycopg.OperationalError as e:
            if type(e).__name__ == "_WaitTimeout":
                self.pgconn.finish()
                raise psycopg.OperationalError(f"Postgres did not answer within {timeout:g} s") from None
            raise

    def _why_not_found(self, complaint: str) -> str:
        """Whether tables are not there, or only not found: by this role, or in a session that a pooler has left; that is mended.

        A transaction is over afterwards, since it could only have been rolled back.
        """
        if self._is_direct or self.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            return schema.NO_TABLES
        in_transaction = self.pgconn.transaction_status != pq.TransactionStatus.IDLE
        try:
            self.pgconn.send_query(search_path.look(complaint, in_transaction=in_transaction).encode())
            *_, seen = super().wait(generators.execute(self.pgconn), timeout=min(self.limit_s, CHECK_S))
        except psycopg.Error:
            # Whatever came of it: what the connection would say next is not known.
            self.pgconn.finish()
            return schema.NO_TABLES
        is_seen, is_hidden = (seen.get_value(0, column) == b"t" for column in (0, 1))
        if is_seen:
            return search_path.SPOILT
        return search_path.HIDDEN if is_hidden else schema.NO_TABLES


class Database:
    """Where the connections of this process come from.

    `application` is shown in ``pg_stat_activity``. `pool_max` is the greatest number of pooled connections;
    `connect_timeout_s` is how long a caller waits for one of them; `statement_timeout_s` bounds every statement.
    `prepare_threshold` is psycopg's: None turns prepared statements off, for a pooler that does not know them. `writes`:
    whether a server will do only if it takes writes.
    """

    def __init__(
        self,
        *,
        url: str,
        application: str,
        pool_max: int,
        connect_timeout_s: float = 1.5,
        statement_timeout_s: float = 10.0,
        prepare_threshold: int | None = 5,
        writes: bool = True,
    ) -> None:
        self._url = url
        self._failure: str | None = None
        self._connect_timeout_s = connect_timeout_s
        self._kwargs: dict[str, Any] = {
            "application_name": application,
            "connect_timeout": 2,
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
            "target_session_attrs": "read-write" if writes else "any",
            "options": _options(url, statement_timeout_s),
            "prepare_threshold": prepare_threshold,
            "limit_s": statement_timeout_s + PATIENCE_S,
            "told": self._note,
        }
        self._pool = ConnectionPool(
            url,
            connection_class=BoundedConnection,
            kwargs=self._kwargs,
            min_size=0,
            max_size=pool_max,
            open=False,
            check=_check,
            timeout=connect_timeout_s,
            max_idle=MAX_IDLE_S,
            reconnect_timeout=RECONNECT_S,
            name=application,
        )

    def open(self) -> None:
        """Open the pool; call it in the process that uses it, after a fork. Connects to nothing yet."""
        self._pool.open(wait=False)

    def close(self) -> None:
        """Close the pool and its connections."""
        self._pool.close()

    @contextmanager
    def connection(self) -> Iterator[BoundedConnection]:
        """A pooled connection for one transaction, committed at the end of the block.

        Raises:
            StoreUnavailable: Postgres is away, the pool is exhausted, or the connection was lost inside the block.
        """
        with self._mapped(), self._pool.connection(timeout=self._connect_timeout_s) as conn:
            yield conn

    def connect(self, *, one_plan: bool = False) -> BoundedConnection:
        """A dedicated connection in autocommit mode; the caller closes it.

        `one_plan`: each statement is planned once for all lengths of its arrays. Left to itself Postgres may find that groups
        of five are cheaper to look up than the ten that it takes for granted, and plan anew for each: longer than it works.

        Raises:
            StoreUnavailable: Postgres is away.
        """
        kwargs = self._kwargs
        if one_plan:
            kwargs = kwargs | {"options": f"-c plan_cache_mode=force_generic_plan {kwargs['options']}"}
        with self._mapped():
            return BoundedConnection.connect(self._url, autocommit=True, **kwargs)

    @contextmanager
    def dedicated(self) -> Iterator[BoundedConnection]:
        """The same for a block that does a lot on it, and no longer.

        Raises:
            StoreUnavailable: Postgres is away, or the connection was lost inside the block.
        """
        with self._mapped(), self.connect() as conn:
            yield conn

    def trouble(self, timeout_s: float = 1.0) -> str | None:
        """Why Postgres cannot be used; None when it answers, takes writes and has our tables, none missing.

        Takes about `timeout_s` at most.
        """
        try:
            with self._mapped(), self._pool.connection(timeout=timeout_s) as conn:
                limit_s, conn.limit_s = conn.limit_s, timeout_s
                try:
                    applied = {name for (name,) in conn.execute(schema.APPLIED)}
                finally:
                    conn.limit_s = limit_s
                return schema.misfit(applied, schema.known())
        except StoreUnavailable as e:
            return str(e)

    def stats(self) -> dict[str, int]:
        """The pool's numbers, for gauges: ``pool_size``, ``pool_available``, ``requests_waiting`` and others."""
        return self._pool.get_stats()

    def _note(self, failure: str | None) -> None:
        """Remember why the last attempt to connect failed: the pool tells it to its log only, and us that time is up."""
        self._failure = failure

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except (PoolTimeout, TooManyRequests) as e:
            if self._failure and schema.is_misfit(self._failure):
                raise StoreUnavailable(self._failure) from e
            if self._failure:
                raise StoreUnavailable(f"Postgres is not available: {self._failure}") from e
            raise StoreUnavailable(f"no connection to Postgres in time: {e}") from e
        except PoolClosed as e:
            raise StoreUnavailable(f"the pool of connections is not open: {e}") from e
        except psycopg.errors.UndefinedTable as e:
            raise StoreUnavailable(str(e)) from e
        # The last one: we were too slow between two statements, and the server has ended the session.
        except (
            psycopg.OperationalError,
            psycopg.errors.ReadOnlySqlTransaction,
            psycopg.errors.IdleInTransactionSessionTimeout,
        ) as e:
            if schema.is_misfit(str(e)):
                raise StoreUnavailable(str(e)) from e
            raise StoreUnavailable(f"Postgres is not available: {e}") from e


@contextmanager
def unhurried(conn: "psycopg.Connection[Any]") -> Iterator[None]:
    """A transaction whose commit waits for no disk, for work that is done again where a crash of the server undid it.

    It is as whole as any other, and what it is followed by is never kept without it: the log of the server has an order. But it
    takes no turn in the queue of those who do wait for the disk, such as whoever accepts events.
    """
    with conn.transaction():
        conn.execute("SET LOCAL synchronous_commit = off")
        yield


def _options(url: str, statement_timeout_s: float) -> str:
    """Session settings at start; what the URL itself asks for comes last and wins.

    No JIT: it takes longer to compile the statements of the hot path than to run them. No sequential scans where an index
    will do: all statements are made for indexes, and a plan that was made while the tables were empty, as it is on the
    first day, would read them from end to end until Postgres has counted their rows (tried: with 31,000 rows 9 ms a claim
    instead of 0.4).
    """
    ours = {_DIRECT: "on", **session_settings(statement_timeout_s)}
    said = " ".join(f"-c {name}={value}" for name, value in ours.items())
    return f"{said} {conninfo_to_dict(url).get('options') or ''}".strip()


def session_settings(statement_timeout_s: float) -> dict[str, str]:
    """What a session is told at its start; behind a pooler the role has to be told it, once and for all."""
    ms = str(int(statement_timeout_s * 1000))
    return {"statement_timeout": ms, "idle_in_transaction_session_timeout": ms, "jit": "off", "enable_seqscan": "off"}


def is_direct(conn: "psycopg.Connection[Any]") -> bool:
    """Whether nothing between us and the server has dropped what we said of the session."""
    return conn.execute("SELECT current_setting(%s, true) = 'on'", [_DIRECT]).fetchone() == (True,)


def _check(conn: BoundedConnection) -> None:
    """Whether a pooled connection still lives: one empty query, with a short limit. Its plans are made anew from time to time."""
    limit_s, conn.limit_s = conn.limit_s, CHECK_S
    try:
        ConnectionPool.check_connection(conn)
        conn.plan_anew()
    finally:
        conn.limit_s = limit_s
