"""Lists on a real streaming replica: read there while it is hardly behind, on the primary when it lags, hangs or is gone."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from madeira.cli import running_system
from madeira.settings import Settings
from madeira.store.database import Database
from madeira.store.replica import MAX_AGE_S, Lists
from tests.api.serving import Api, event
from tests.api.test_health import number
from tests.servers import OwnPostgres, Standby
from tests.system.harness import wait_until

pytestmark = pytest.mark.long


class Clock:
    """The real one, which can be put forward."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@contextlib.contextmanager
def lists(primary: str, replica: str, clock: Clock) -> Iterator[Lists]:
    """Lists that look at the replica only when they are told to."""
    with contextlib.ExitStack() as stack:
        databases = []
        for url, writes in ((primary, True), (replica, False)):
            database = Database(url=url, application="tests", pool_max=2, writes=writes)
            database.open()
            stack.callback(database.close)
            databases.append(database)
        yield Lists(primary=databases[0], replica=databases[1], clock=clock)


def on_replica(conn: psycopg.Connection[Any]) -> bool:
    """Whether what is read comes from a replica."""
    return bool(conn.execute("SELECT pg_is_in_recovery()").fetchone()[0])  # type: ignore[index]


def until_used(found: Lists) -> None:
    """Look until the replica is used."""
    wait_until(lambda: found.look() is None, what="the replica to be used")


def replay(standby: Standby, what: str) -> None:
    """Have the replica ``pause`` or ``resume`` to carry out what it is sent."""
    with psycopg.connect(standby.url) as c:
        c.execute(f"SELECT pg_wal_replay_{what}()".encode())
        if what == "pause":
            state = "SELECT pg_get_wal_replay_pause_state()"
            wait_until(lambda: c.execute(state).fetchone() == ("paused",), what="the replica to pause")


def write(url: str) -> None:
    """Commit something."""
    with psycopg.connect(url) as c:
        c.execute("INSERT INTO audit (who, action, what) VALUES ('tests', 'test', 'test')")


def test_lists_are_read_on_a_replica_until_it_is_too_far_behind_and_again_when_it_has_caught_up(
    own_postgres: OwnPostgres, standby: Standby
) -> None:
    """A replica that carries out nothing is used for five seconds more; who wants the newest always gets it."""
    clock = Clock()
    with lists(own_postgres.url, standby.url, clock) as found:
        assert not found.read(on_replica), "nobody has looked yet"
        until_used(found)
        assert found.read(on_replica)
        assert not found.read(on_replica, newest=True)
        replay(standby, "pause")
        write(own_postgres.url)
        found.look()
        assert found.read(on_replica)
        before = found.lag_s
        clock.ahead_s += MAX_AGE_S + 1
        found.look()
        assert not found.read(on_replica)
        assert before is not None
        assert found.lag_s == pytest.approx(before + MAX_AGE_S + 1, abs=2)
        replay(standby, "resume")
        until_used(found)
        assert found.read(on_replica)
        assert found.lag_s is not None
        assert found.lag_s < MAX_AGE_S


@pytest.mark.parametrize("how", ["stall", "kill"])
def test_when_a_replica_hangs_or_is_gone_lists_are_read_on_the_primary(
    own_postgres: OwnPostgres, standby: Standby, how: str
) -> None:
    """The first reader waits a moment, those after him do not; it is used again when it is back."""
    with lists(own_postgres.url, standby.url, Clock()) as found:
        until_used(found)
        assert found.read(on_replica)
        getattr(standby, how)()
        started = time.monotonic()
        assert not found.read(on_replica)
        assert time.monotonic() - started < 5
        assert not found.uses_replica
        assert not found.read(on_replica)
        if how == "stall":
            standby.resume()
        else:
            standby.start()
        until_used(found)
        assert found.read(on_replica)


def test_a_read_that_fails_on_the_replica_is_done_on_the_primary(own_postgres: OwnPostgres, standby: Standby) -> None:
    """As when a replica ends what stands in the way of what it has to carry out."""

    def fails_there(conn: psycopg.Connection[Any]) -> bool:
        if on_replica(conn):
            raise psycopg.errors.SerializationFailure("canceling statement due to conflict with recovery")
        return True

    with lists(own_postgres.url, standby.url, Clock()) as found:
        until_used(found)
        assert found.read(fails_there)


def test_a_server_that_is_no_replica_is_not_used(own_postgres: OwnPostgres) -> None:
    """Such as the primary itself: nobody could tell how far it is behind."""
    with lists(own_postgres.url, own_postgres.url, Clock()) as found:
        found.look()
        assert not found.uses_replica


def test_a_replica_of_somebody_else_is_not_used(own_postgres: OwnPostgres, standby: Standby, database_url: str) -> None:
    """Another database of the right server, or another server: what it lists would be of another Madeira."""
    other = own_postgres.url.rsplit("/", 1)[0] + "/postgres"
    with lists(own_postgres.url, standby.url, Clock()) as found:
        until_used(found)
    for primary in (other, database_url):
        with lists(primary, standby.url, Clock()) as found:
            assert "somebody else" in (found.look() or "")
            assert not found.uses_replica


def test_doctor_tells_whether_the_replica_is_used(own_postgres: OwnPostgres, standby: Standby, tmp_path: Path) -> None:
    """One that has just been named may need a moment; one that is no replica is told with its setting, and no password."""
    for url, level in (
        (standby.url, "ok"),
        (own_postgres.url, "warning"),
        ("postgresql://u:a-password@127.0.0.1:1/d", "warning"),
    ):
        (finding,) = running_system.replica(Settings(database_url=own_postgres.url, replica_url=url, data_dir=tmp_path))
        assert finding.level == level, finding
        assert (level == "ok") != ("MADEIRA_REPLICA_URL" in finding.text)
        assert "a-password" not in finding.text


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Makes APIs that are stopped after the test."""
    with contextlib.ExitStack() as stack:

        def make(*urls: str, **env: str) -> Api:
            api = Api(folder=tmp_path, database_url=urls[0], redis_url=urls[1], **env)
            stack.callback(api.stop)
            return api.start()

        yield make


def test_the_api_lists_what_its_replica_knows_and_shows_one_event_as_it_is(
    serve: Callable[..., Api], own_postgres: OwnPostgres, standby: Standby, redis_url: str
) -> None:
    """A list from a replica that stands still lacks what came since, for five seconds; what is about the one event has it."""
    api = serve(own_postgres.url, redis_url, MADEIRA_REPLICA_URL=standby.url, MADEIRA_PROCESSES="1")
    wait_until(lambda: b"replica.used" in api.log.read_bytes(), what="the replica to be used")
    assert number(api, "madeira_replica_used") == 1
    assert 0 < (number(api, "madeira_replica_lag_seconds") or 0) < MAX_AGE_S
    replay(standby, "pause")
    assert api.post(event("new")).status == 202
    assert listed(api) == [], "it was read on the replica"
    assert api.get("/v1/events/new?source=shop", admin=True).status == 200
    wait_until(lambda: listed(api) == ["new"], what="the list to be read on the primary", timeout=MAX_AGE_S + 5)
    wait_until(lambda: b"replica.not_used" in api.log.read_bytes(), what="a line that says so")
    assert number(api, "madeira_replica_used") == 0
    assert (number(api, "madeira_replica_lag_seconds") or 0) > MAX_AGE_S


def listed(api: Api) -> list[str]:
    """The ids in the list of events."""
    return [found["event_id"] for found in api.get("/v1/events", admin=True).json["events"]]
