"""A run of retention: what it does, who may not do it at once, and what it leaves on record."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from prometheus_client import REGISTRY

from madeira.errors import StoreUnavailable
from madeira.store import audit, leases, parts, retention
from madeira.store.database import Database
from madeira.store.deliveries import mark_notified
from madeira.store.retention import Ages
from tests.actors.conftest import Make
from tests.store import making
from tests.store.making import GIVE_UP, RETRY, claimed, routed, settled
from tests.store.test_retention import age

#: Parts are made and dropped here.
pytestmark = pytest.mark.new_database

DAY = timedelta(days=1)
AGES = Ages(payload=DAY, succeeded=10 * DAY, cancelled=10 * DAY, dead=10 * DAY, attempts=DAY, tombstone=DAY, audit=DAY)


@pytest.fixture
def database(make: Make, database_url: str) -> Iterator[Database]:
    """Connections; and a process, since actors belong to one."""
    make()
    database = Database(url=database_url, application="tests", pool_max=3)
    database.open()
    yield database
    database.close()


def counted(kind: str) -> float:
    return REGISTRY.get_sample_value("madeira_retention_removed_total", {"kind": kind}) or 0.0


def counts(database: Database, **options: Any) -> dict[str, int]:
    from actors.retention import run

    return dict(run(database, AGES, rest=0, **options))


def test_a_run_does_all_of_it_and_leaves_one_entry(database: Database) -> None:
    """Parts ahead, payloads, then events in a later run; numbers in the metrics and, of a whole day, in one audit entry."""
    with database.connect() as conn:
        for name, decision in (("good", making.SUCCESS), ("bad", GIVE_UP), ("waits", RETRY)):
            [ref] = routed(conn, event_id=name)
            settled(conn, claimed(conn, ref), decision)
            mark_notified(conn, [ref.delivery_id])
        age(conn, days=5)
        assert counts(database) == {"payloads": 1}
        age(conn, days=20)
        payloads, events = counted("payloads"), counted("events_succeeded")

        assert counts(database) == {}
        assert parts.parts(conn)[-1].last_day == datetime.now(UTC).date() + parts.AHEAD * DAY
        conn.execute("UPDATE burial SET at = at - interval '2 minutes'")
        assert counts(database) == {"events_succeeded": 1, "events_dead": 1, "deliveries": 2}
        assert counts(database) == {}

        assert conn.execute("SELECT event_id FROM event").fetchall() == [("waits",)]
        [entry] = audit.page(conn, limit=10, action="retention")
        assert entry["detail"] == {"payloads": 1, "events_succeeded": 1, "events_dead": 1, "deliveries": 2}
        assert (counted("payloads") - payloads, counted("events_succeeded") - events) == (0, 1)

        conn.execute("UPDATE tombstone SET buried_at = buried_at - interval '2 days'")
        conn.execute("UPDATE audit SET at = at - interval '2 days'")
        ((entries,),) = conn.execute("SELECT count(*) FROM audit").fetchall()
        assert counts(database, who="ada") == {"ids": 2, "audit": entries}
        [entry] = audit.page(conn, limit=10)
        assert (entry["who"], entry["what"]) == ("ada", "by hand")


def test_old_parts_go_and_their_rests_when_they_are_needed_no_more(database: Database) -> None:
    """What is dead or unfinished keeps its attempts, whatever their age."""
    with database.connect() as conn:
        [good], [waits] = routed(conn), routed(conn)
        settled(conn, claimed(conn, good))
        settled(conn, claimed(conn, waits), RETRY)
        age(conn, days=0)
        [part] = parts.parts(conn)
        days_old = datetime.now(UTC).date() - 9 * DAY
        bounds = f"FROM (MINVALUE) TO ('{days_old + DAY}')"
        conn.execute("UPDATE delivery_log SET recorded_at = recorded_at - interval '12 days'")
        conn.execute("ALTER TABLE delivery_log DETACH PARTITION " + part.name)  # type: ignore[arg-type]
        conn.execute(f"ALTER INDEX {part.name}_one_verdict RENAME TO old_one_verdict")  # type: ignore[arg-type]
        conn.execute(f"ALTER TABLE {part.name} RENAME TO delivery_log_{days_old:%Y%m%d}")  # type: ignore[arg-type]
        conn.execute(f"ALTER TABLE delivery_log ATTACH PARTITION delivery_log_{days_old:%Y%m%d} FOR VALUES {bounds}")  # type: ignore[arg-type]

        assert counts(database) == {"attempt_parts": 1}
        assert parts.parts(conn)[0].is_kept
        assert (making.log_of(conn, good.delivery_id), len(making.log_of(conn, waits.delivery_id))) == ([], 1)
        assert counts(database) == {}
        making.make_due(conn, waits.delivery_id)
        settled(conn, claimed(conn, waits))
        age(conn, days=0)
        assert counts(database) == {"attempt_parts": 1}
        assert not any(part.is_kept for part in parts.parts(conn))


@pytest.mark.usefixtures("database")
def test_a_twentieth_of_the_time_is_worked_but_more_goes_than_comes_even_when_steps_take_long() -> None:
    """A rest is a multiple of its step. With steps of a fifth of a second, forty times the usual, sixty events a second go."""
    from actors.retention import TURN_S, rest_s

    assert [rest_s(took_s) for took_s in (0.0, 0.001, 0.005, 0.05, 3.0)] == pytest.approx([0.005, 0.019, 0.095, 0.5, 0.5])
    assert rest_s(1.0, 0) == 0
    duties = 3
    assert retention.PAGE / (duties * (0.2 + rest_s(0.2))) * TURN_S / 60 > 60


def test_a_lease_is_renewed_now_and_then_but_not_with_each_step(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal is a commit that waits for the disk; a run that stood still too long leaves the lease to whoever took it."""
    from actors import retention as actor

    with database.connect() as conn:
        ends: list[Any] = []

        def look() -> bool:
            ends.extend(conn.execute("SELECT until FROM lease").fetchall())
            return False

        monkeypatch.setattr(actor, "RENEW_S", 1000.0)
        counts(database, is_stopping=look)
        assert len(ends) > 5
        assert len(set(ends)) == 1

        def lose() -> bool:
            conn.execute("UPDATE lease SET holder = 'another'")
            ends.append("lost")
            return False

        monkeypatch.setattr(actor, "RENEW_S", 0.0)
        ends.clear()
        counts(database, is_stopping=lose)
        assert ends == ["lost"]
        assert conn.execute("SELECT holder FROM lease").fetchall() == [("another",)]


def test_one_run_at_a_time(database: Database) -> None:
    """A second one is told so; after the first it may."""
    from actors.retention import LEASE, NotRun

    with database.connect() as conn:
        assert leases.take(conn, LEASE, "another", 60)
        with pytest.raises(NotRun, match="under way"):
            counts(database)
        leases.release(conn, LEASE, "another")
        assert counts(database) == {}
        assert conn.execute("SELECT count(*) FROM lease").fetchone() == (0,)


def test_a_run_ends_when_its_process_is_to_end(database: Database) -> None:
    """After the step that it is at; what it did is on record, and the next one goes on."""
    with database.connect() as conn:
        for n in range(2 * retention.PAGE + 1):
            making.accept(conn, event_id=f"e{n}")
        conn.execute("UPDATE event SET status = 'cancelled', reason = 'cancelled', route_at = NULL, routed_at = now()")
        age(conn)
        asked = iter([False] * 5)
        done = counts(database, is_stopping=lambda: next(asked, True))
        assert done == {"payloads": retention.PAGE}
        assert counts(database) == {"payloads": retention.PAGE + 1}


def test_a_run_that_loses_its_session_is_put_off_and_leaves_the_next_one_its_turn(database: Database) -> None:
    """Postgres that restarts is Postgres that is away: no fault of ours, and nobody waits for a lease to run out."""
    with database.connect() as conn:

        def cut() -> bool:
            others = "datname = current_database() AND pid <> pg_backend_pid()"
            conn.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}".encode())
            return False

        with pytest.raises(StoreUnavailable, match="Postgres is not available"):
            counts(database, is_stopping=cut)
        assert counts(database) == {}


def test_a_log_that_is_busy_holds_nothing_else_up(database: Database, database_url: str) -> None:
    """Whoever reads it for long keeps parts from being made; rows go all the same."""
    with database.connect() as conn, psycopg.connect(database_url) as reader:
        [ref] = routed(conn)
        settled(conn, claimed(conn, ref))
        age(conn)
        reader.execute("LOCK TABLE delivery_log IN SHARE UPDATE EXCLUSIVE MODE")
        assert counts(database) == {"payloads": 1}
        assert len(parts.parts(conn)) == 1
        reader.rollback()
        assert counts(database) == {}
        assert len(parts.parts(conn)) == parts.AHEAD
