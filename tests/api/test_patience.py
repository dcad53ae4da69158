"""How long a wait in vain is remembered: while it is, one at a time tries; afterwards everybody waits again."""

import time
from collections.abc import Iterator

import psycopg
import pytest

from madeira.api.patience import MEMORY_S, Patience
from madeira.errors import StoreUnavailable
from madeira.records import Accepted, NewEvent
from madeira.store import events
from madeira.store.database import Database
from madeira.store.group_commit import GroupCommit
from tests.store.making import new_event
from tests.store.waiting import at_once, good, until, waits_for_a_lock

#: The name of the sessions that commit.
APPLICATION = "patience"

#: Seconds that a request waits: enough for a busy machine to commit in.
WAIT_S = 2.0


class Clock:
    """The time of this machine, and what the test lets pass beside it."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def commits(database_url: str) -> Iterator[GroupCommit[NewEvent, Accepted]]:
    database = Database(url=database_url, application=APPLICATION, pool_max=1, statement_timeout_s=100)
    database.open()
    group: GroupCommit[NewEvent, Accepted] = GroupCommit(
        name="patience", database=database, run=events.insert, rerun_unknown=False
    )
    yield group
    group.stop(10)
    database.close()


def test_a_wait_in_vain_is_forgotten_after_some_seconds(database_url: str, commits: GroupCommit[NewEvent, Accepted]) -> None:
    """Postgres stands still and is back; nothing was committed since. A burst that comes later meets no memory of it."""
    clock = Clock()
    patience = Patience(commits=commits, last_commit=lambda: float("-inf"), wait_s=WAIT_S, try_s=WAIT_S, clock=clock)
    with psycopg.connect(database_url, autocommit=True) as looking, psycopg.connect(database_url) as blocking:
        blocking.execute("LOCK TABLE event")
        with pytest.raises(StoreUnavailable):
            patience.commit(new_event())
        trying = at_once(*[lambda: patience.commit(new_event())] * 4)
        assert [str(e) for e in trying].count("Postgres does not answer; another request is trying") == 3
        blocking.rollback()
        until(lambda: looking.execute("SELECT count(*) FROM event").fetchone() == (1,))
        clock.ahead_s += MEMORY_S
        # All of the burst is on its way at the same time.
        blocking.execute("LOCK TABLE event IN EXCLUSIVE MODE")
        burst = [lambda: patience.commit(new_event())] * 8

        def let_go() -> None:
            until(lambda: waits_for_a_lock(looking, APPLICATION))
            blocking.rollback()

        good(at_once(let_go, *burst))
