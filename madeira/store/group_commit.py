"""One committing thread for many callers: what waited while the last commit ran goes into the next one.

Fifty rows in one statement cost little more than one, and one connection does the work of a pool. A thread of its own
commits, never a caller: a caller that is interrupted or gives up must not take its followers down with it.
"""

import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import psycopg

from madeira.errors import StoreUnavailable
from madeira.log import get
from madeira.store.database import BoundedConnection, Database

In = TypeVar("In")
Out = TypeVar("Out")

log = get(__name__)

#: Seconds between two attempts to connect, first and longest.
RECONNECT_S: Final = (0.05, 1.0)


class _Lost(StoreUnavailable):
    """Raised when there is no connection, or it broke while a group ran."""


class _Waiter(Generic[In, Out]):
    """One caller's item, and where its answer is put."""

    __slots__ = ("_done", "abandoned", "answer", "error", "item")

    def __init__(self, item: In) -> None:
        self.item = item
        self.answer: Out
        self.error: Exception | None = None
        #: The caller has gone; nobody will read the answer.
        self.abandoned = False
        # A bare lock, taken at birth: an Event costs several times as much, and this is the path of every event.
        self._done = threading.Lock()
        self._done.acquire()

    def wait(self, timeout_s: float | None) -> bool:
        return self._done.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def succeed(self, answer: Out) -> None:
        self.answer = answer
        self._done.release()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._done.release()


class GroupCommit(Generic[In, Out]):
    """Gathers the items of many callers and has `run` commit them in groups.

    `run` gets a connection in autocommit mode and the group, and returns one answer per item, in order; each statement of
    it that changes rows must be atomic by itself, and safe to run again with `rerun_unknown`. `after` is called with the
    items and their answers when they are committed, before their callers wake; what it raises is logged.

    When the connection is lost, nobody knows whether the commit took effect. With `rerun_unknown` the same items are run
    again once Postgres is back, until they succeed or their callers' time is up; without, their callers get
    `StoreUnavailable`. When the data of one item is at fault, the items are run one by one, so that only its caller gets
    the error.

    At most `max_group` items go into one group, and at most `max_waiting` may wait. After a group that several callers
    shared the next one is given `gather_s` seconds to fill, since the callers just woken are about to come again: fewer
    commits then carry the same load. A lone caller never waits for company.
    """

    def __init__(
        self,
        *,
        name: str,
        database: Database,
        run: Callable[[psycopg.Connection[Any], list[In]], list[Out]],
        after: Callable[[list[In], list[Out]], None] | None = None,
        max_group: int = 200,
        max_waiting: int = 10_000,
        gather_s: float = 0.0,
        rerun_unknown: bool,
    ) -> None:
        self._name = name
        self._database = database
        self._run = run
        self._after = after
        self._max_group = max_group
        self._max_waiting = max_waiting
        self._gather_s = gather_s
        self._shared = False
        self._rerun_unknown = rerun_unknown
        self._waiting: deque[_Waiter[In, Out]] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._stopping = False
        self._stop_asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._conn: BoundedConnection | None = None

    def start(self) -> None:
        """Start the committing thread; `submit` does so by itself. Call it in the process that uses it, after a fork."""
        with self._changed:
            self._start_thread()

    def stop(self, timeout_s: float) -> None:
        """Commit what waits, then end; whatever is left after `timeout_s` seconds gets `StoreUnavailable`."""
        with self._changed:
            self._stopping = True
            self._stop_asked.set()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
        _fail(left, StoreUnavailable(f"{self._name} was stopped before it could commit this"))

    def submit(self, item: In, timeout_s: float | None) -> Out:
        """Have `item` committed with others; blocks until it is, and returns its answer.

        `timeout_s` is in seconds; None waits as long as it takes.

        Raises:
            StoreUnavailable: Postgres is away or the time is up; whether the item was committed is unknown.
            Exception: whatever `run` raises for this item alone.
        """
        waiter: _Waiter[In, Out] = _Waiter(item)
        with self._changed:
            if self._stopping:
                raise StoreUnavailable(f"{self._name} is stopped")
            if len(self._waiting) >= self._max_waiting:
                raise StoreUnavailable(f"{self._max_waiting} items wait for {self._name} already")
            self._start_thread()
            self._waiting.append(waiter)
            if len(self._waiting) == 1:
                self._changed.notify()
        answered = False
        try:
            answered = waiter.wait(timeout_s)
        finally:
            waiter.abandoned = not answered
        if not answered:
            raise StoreUnavailable(f"{self._name} did not commit within {timeout_s:g} s")
        if isinstance(waiter.error, StoreUnavailable):
            # Several callers may share one error; each raises its own.
            raise StoreUnavailable(str(waiter.error)) from waiter.error
        if waiter.error is not None:
            raise waiter.error
        return waiter.answer

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while group := self._next_group():
            self._commit(group)
        self._disconnect()

    def _next_group(self) -> "list[_Waiter[In, Out]]":
        """What waits now, at most `max_group`, in order of arrival; empty when there is nothing more to come."""
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait()
        if self._shared and self._gather_s:
            self._stop_asked.wait(self._gather_s)
        with self._changed:
            group = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_group))]
        self._shared = len(group) > 1
        return group

    def _commit(self, group: "list[_Waiter[In, Out]]") -> None:
        """Run a group until each of its items has its answer or its error."""
        pause_s = RECONNECT_S[0]
        while group := [waiter for waiter in group if not waiter.abandoned]:
            try:
                answers = self._run_once(group)
            except _Lost as e:
                if not self._rerun_unknown or self._stopping:
                    _fail(group, e)
                    return
                self._stop_asked.wait(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_S[1])
            except Exception as e:  # noqa: BLE001 - it belongs to a caller, and must not end this thread
                if len(group) == 1:
                    _fail(group, e)
                else:
                    self._commit_singly(group)
                return
            else:
                self._succeed(group, answers)
                return

    def _commit_singly(self, group: "list[_Waiter[In, Out]]") -> None:
        """Run items one by one, so that only the one at fault gets the error."""
        for i, waiter in enumerate(group):
            self._commit([waiter])
            if self._conn is None and not self._rerun_unknown:
                _fail(group[i + 1 :], _Lost("the connection to Postgres was lost"))
                return

    def _run_once(self, group: "list[_Waiter[In, Out]]") -> list[Out]:
        """Run a group on the connection.

        Raises:
            _Lost: there is no connection (any more).
            Exception: what `run` raised while the connection stayed whole.
        """
        conn = self._connected()
        try:
            conn.plan_anew()
            return self._run(conn, [waiter.item for waiter in group])
        except psycopg.errors.ReadOnlySqlTransaction as e:
            # The server became a standby: another one takes writes now, and a new connection finds it.
            self._disconnect()
            raise _Lost(f"Postgres takes no writes: {e}") from e
        except psycopg.errors.UndefinedTable as e:
            raise StoreUnavailable(str(e)) from e
        except (psycopg.OperationalError, psycopg.InterfaceError) as e:
            if conn.closed:
                self._disconnect()
                raise _Lost(f"the connection to Postgres was lost: {e}") from e
            raise StoreUnavailable(f"Postgres could not do it: {e}") from e

    def _connected(self) -> BoundedConnection:
        if self._conn is not None and _is_dead(self._conn):
            self._disconnect()
        if self._conn is None:
            try:
                self._conn = self._database.connect(one_plan=True)
            except StoreUnavailable as e:
                raise _Lost(str(e)) from e
        return self._conn

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _succeed(self, group: "list[_Waiter[In, Out]]", answers: list[Out]) -> None:
        if self._after is not None:
            try:
                self._after([waiter.item for waiter in group], answers)
            except Exception:
                log.exception("commit.not_followed", group=self._name)
        for waiter, answer in zip(group, answers, strict=True):
            waiter.succeed(answer)


def _fail(group: "list[_Waiter[In, Out]]", error: Exception) -> None:
    for waiter in group:
        waiter.fail(error)


def _is_dead(conn: BoundedConnection) -> bool:
    """Whether an idle connection has something to read: as a rule the server's farewell. Costs no round trip."""
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN)
    return conn.closed or bool(poll.poll(0))
