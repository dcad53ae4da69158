"""Leases: one holder at a time, by the database's clock."""

from contextlib import ExitStack
from functools import partial

from madeira.store import leases
from madeira.store.database import Database
from tests.store.making import Connection
from tests.store.waiting import at_once, good


def test_a_lease_has_one_holder(conn: Connection) -> None:
    """Taken: refused to others, renewed for its holder. Given back: free. Another name is another lease."""
    assert leases.take(conn, "reconcile", "a", 60)
    assert not leases.take(conn, "reconcile", "b", 60)
    assert leases.take(conn, "reconcile", "a", 60)
    assert leases.take(conn, "rebuild", "b", 60)
    leases.release(conn, "reconcile", "b")
    assert not leases.take(conn, "reconcile", "b", 60)
    leases.release(conn, "reconcile", "a")
    assert leases.take(conn, "reconcile", "b", 60)


def test_a_lease_that_ran_out_is_free(conn: Connection) -> None:
    """A holder that is gone or frozen loses it, and cannot give back what is another's by now."""
    assert leases.take(conn, "reconcile", "a", 0)
    assert leases.take(conn, "reconcile", "b", 60)
    leases.release(conn, "reconcile", "a")
    assert not leases.take(conn, "reconcile", "a", 60)


def test_of_many_that_want_it_one_gets_it(database: Database) -> None:
    """Ten at once, for a free lease and for one that has run out."""
    with ExitStack() as stack:
        conns = [stack.enter_context(database.connect()) for _ in range(10)]
        for name in ("free", "run out"):
            leases.take(conns[0], "run out", "gone", 0)
            jobs = [partial(leases.take, conn, name, f"holder {i}", 60) for i, conn in enumerate(conns)]
            assert sum(good(at_once(*jobs))) == 1
