"""Groups of statements as a test has them: made, kept waiting by a gate, and asked by callers."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from madeira.store.database import Database
from madeira.store.group_commit import GroupCommit
from tests.store.making import Connection
from tests.store.waiting import until

Run = Callable[[Connection, list[Any]], list[Any]]

#: The name of the database sessions of the group under test.
APPLICATION = "group"


class Gate:
    """A lock in Postgres, held by a transaction of the test: whoever calls `pass_through` waits at it inside a statement."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._conn.autocommit = False
        self._conn.execute("SELECT pg_advisory_xact_lock(1)")

    def open(self) -> None:
        self._conn.commit()

    @staticmethod
    def pass_through(conn: Connection) -> None:
        conn.execute("SELECT pg_advisory_xact_lock_shared(1)")


class Groups:
    """Makes group commits and stops them in the end."""

    def __init__(self) -> None:
        self.made: list[GroupCommit[Any, Any]] = []

    def __call__(self, database: Database, run: Run, *, rerun_unknown: bool = False, **options: Any) -> GroupCommit[Any, Any]:
        group = GroupCommit[Any, Any](name="test", database=database, run=run, rerun_unknown=rerun_unknown, **options)
        self.made.append(group)
        return group


def submit(group: GroupCommit[Any, Any], item: Any, timeout_s: float | None = 30) -> Callable[[], Any]:
    return partial(group.submit, item, timeout_s)


def until_waiting(group: GroupCommit[Any, Any], n: int) -> None:
    until(lambda: len(group._waiting) == n)


class Caller(threading.Thread):
    """A thread that submits one item and keeps what came of it."""

    def __init__(self, group: GroupCommit[Any, Any], item: Any, timeout_s: float | None = 30) -> None:
        super().__init__()
        self._submit = submit(group, item, timeout_s)
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._submit()
        except Exception as e:  # noqa: BLE001 - the test looks at it
            self.result = e

    def outcome(self) -> Any:
        self.join()
        return self.result
