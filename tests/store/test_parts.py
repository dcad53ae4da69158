"""The log of attempts is made of parts, one a day, and a part goes as a whole but for what is still needed of it."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest

from madeira.states import Outcome
from madeira.store import erase, parts, story
from madeira.store.database import Database
from madeira.store.deliveries import settle
from tests.store import making
from tests.store.making import GIVE_UP, RETRY, Connection, claimed, log_of, routed, settled

DAY = timedelta(days=1)

#: Parts are made and dropped here.
pytestmark = pytest.mark.new_database


def today(conn: Connection) -> date:
    ((now,),) = conn.execute("SELECT clock_timestamp()").fetchall()
    found: datetime = now.astimezone(UTC)
    return found.date()


def names(conn: Connection) -> list[str]:
    return [part.name for part in parts.parts(conn)]


def part_of(conn: Connection, delivery_id: int) -> set[str]:
    """The tables in which the attempts of a delivery lie."""
    rows = conn.execute("SELECT tableoid::regclass::text FROM delivery_log WHERE delivery_id = %s", (delivery_id,))
    return {name for (name,) in rows}


def remove_whole(conn: Connection, part: parts.Part) -> int:
    """Remove a part; how many attempts were kept of it."""
    removal = parts.Removal(conn, part)
    while removal.step(conn, limit=2):
        pass
    assert removal.finish(conn)
    return removal.kept


def test_parts_are_there_ahead_and_are_made_once(conn: Connection) -> None:
    """A migrated database has one up to tomorrow; a run adds the coming week, a second run nothing."""
    first = names(conn)
    assert len(first) == 1
    made = parts.make_ahead(conn)
    assert names(conn) == first + made
    assert parts.parts(conn)[-1].last_day == today(conn) + parts.AHEAD * DAY
    assert parts.make_ahead(conn) == []
    [ref] = routed(conn)
    settled(conn, claimed(conn, ref))
    assert part_of(conn, ref.delivery_id) == set(first)
    ahead = datetime.combine(today(conn) + 3 * DAY, datetime.min.time(), UTC)
    conn.execute("UPDATE delivery_log SET recorded_at = %s", (ahead,))
    assert part_of(conn, ref.delivery_id) == {f"delivery_log_{ahead:%Y%m%d}"}


def test_a_day_without_a_part_stops_no_settle_and_goes_too(conn: Connection) -> None:
    """Its rows lie in the rest; later days get their parts all the same, and old rows go by themselves."""
    [ref], [waits] = routed(conn), routed(conn)
    settled(conn, claimed(conn, ref))
    settled(conn, claimed(conn, waits), RETRY)
    far = today(conn) + 40 * DAY
    conn.execute("UPDATE delivery_log SET recorded_at = %s", (datetime.combine(far, datetime.min.time(), UTC),))
    assert part_of(conn, ref.delivery_id) == {"delivery_log_rest"}
    made = parts.make_ahead(conn, today=far)
    assert made[0] == f"delivery_log_{far + DAY:%Y%m%d}"
    assert len(made) == parts.AHEAD
    before = datetime.combine(far + DAY, datetime.min.time(), UTC)
    assert parts.remove_rest(conn, before - 2 * DAY) == 0
    assert parts.remove_rest(conn, before) == 1
    assert (log_of(conn, ref.delivery_id), len(log_of(conn, waits.delivery_id))) == ([], 1)


def test_of_a_part_that_goes_what_is_still_needed_stays(conn: Connection) -> None:
    """Attempts of what is unfinished and of dead letters; those of what has ended well are gone, and the files with them."""
    good = [routed(conn)[0] for _ in range(3)]
    for ref in good:
        settled(conn, claimed(conn, ref))
    [dead], [waits], [called] = routed(conn), routed(conn), routed(conn)
    settled(conn, claimed(conn, dead), GIVE_UP)
    settled(conn, claimed(conn, waits), RETRY)
    settled(conn, claimed(conn, called), RETRY)
    making.make_due(conn, called.delivery_id)
    held = claimed(conn, called)
    before = {ref.delivery_id: log_of(conn, ref.delivery_id) for ref in (dead, waits, called)}

    [part] = parts.parts(conn)
    assert remove_whole(conn, part) == 3
    [kept] = parts.parts(conn)
    assert (kept.name, kept.bounds, kept.is_kept) == (f"{part.name}_kept", part.bounds, True)
    assert conn.execute("SELECT to_regclass(%s)", (part.name,)).fetchone() == (None,)
    assert all(log_of(conn, ref.delivery_id) == [] for ref in good)
    assert {delivery_id: log_of(conn, delivery_id) for delivery_id in before} == before

    # Life goes on in it: a verdict is written, told again when it is asked for, and refused when it is another one's.
    verdict = making.verdict(held)
    assert [settle(conn, [verdict])[0].status for _ in range(2)] == ["succeeded", "succeeded"]
    assert len(log_of(conn, called.delivery_id)) == 2
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute("""
            INSERT INTO delivery_log (delivery_id, attempt, token, started_at, outcome, settled_as, worker)
            SELECT delivery_id, attempt, token, started_at, outcome, settled_as, worker FROM delivery_log
        """)


def test_a_rest_goes_when_nothing_in_it_is_needed_any_more(conn: Connection) -> None:
    """As long as one delivery needs it, it stays."""
    [waits], [good] = routed(conn), routed(conn)
    settled(conn, claimed(conn, waits), RETRY)
    settled(conn, claimed(conn, good))
    assert remove_whole(conn, parts.parts(conn)[0]) == 1
    [kept] = parts.parts(conn)
    assert not parts.drop_if_needless(conn, kept)
    making.make_due(conn, waits.delivery_id)
    settled(conn, claimed(conn, waits))
    assert parts.drop_if_needless(conn, kept)
    assert parts.parts(conn) == []


def test_a_removal_that_was_given_up_is_begun_anew(conn: Connection) -> None:
    """Half a copy changes nothing, and the next one is whole."""
    refs = [routed(conn)[0] for _ in range(5)]
    for ref in refs:
        settled(conn, claimed(conn, ref), RETRY)
    [part] = parts.parts(conn)
    assert parts.Removal(conn, part).step(conn, limit=2)
    assert names(conn) == [part.name]
    assert all(len(log_of(conn, ref.delivery_id)) == 1 for ref in refs)
    assert remove_whole(conn, part) == 5
    assert all(len(log_of(conn, ref.delivery_id)) == 1 for ref in refs)


def test_a_part_of_which_too_much_is_needed_stays_as_it_is(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not copied without end."""
    monkeypatch.setattr(parts, "KEPT_MOST", 2)
    for _ in range(4):
        settled(conn, claimed(conn, routed(conn)[0]), RETRY)
    [part] = parts.parts(conn)
    removal = parts.Removal(conn, part)
    while removal.step(conn, limit=1):
        pass
    assert not removal.finish(conn)
    assert names(conn) == [part.name]
    assert conn.execute("SELECT to_regclass(%s)", (f"{part.name}_kept",)).fetchone() == (None,)


def test_what_is_erased_while_a_part_is_copied_is_erased_in_the_copy(conn: Connection) -> None:
    """No answer comes back by the copy that was made a moment before."""
    event = making.new_event(event_id="private")
    [ref] = routed(conn, event_id="private")
    settled(conn, claimed(conn, ref), GIVE_UP)
    [part] = parts.parts(conn)
    removal = parts.Removal(conn, part)
    while removal.step(conn):
        pass
    assert erase.erase(conn, event.source, "private", "t", "asked for")
    assert removal.finish(conn)
    found = story.find(conn, event.source, "private")
    assert found is not None
    [attempt] = found["deliveries"][0]["attempts"]
    assert (attempt["excerpt"], attempt["url"]) == (None, "http://receiver.test")


def test_settles_are_never_kept_waiting_for_a_removal(database: Database, conn: Connection) -> None:
    """Whoever reads the log holds it; the removal gives up soon, changes nothing, and is done later."""
    [ref] = routed(conn)
    settled(conn, claimed(conn, ref))
    [part] = parts.parts(conn)
    removal = parts.Removal(conn, part)
    while removal.step(conn):
        pass
    with database.connection() as reader:
        reader.execute("SELECT count(*) FROM delivery_log")
        with pytest.raises(parts.Busy):
            removal.finish(conn)
        assert names(conn) == [part.name]
    assert removal.finish(conn)
    assert parts.parts(conn) == []


def test_a_late_verdict_is_noted_once_in_the_part_of_its_day(conn: Connection) -> None:
    """Beside the loss that was noted for the same claim."""
    [ref] = routed(conn)
    late = claimed(conn, ref)
    making.expire(conn, ref.delivery_id)
    claimed(conn, ref)
    for _ in range(2):
        settled(conn, late)
    assert [row[1] for row in log_of(conn, ref.delivery_id)] == [Outcome.LOST, Outcome.LATE]


def test_rows_of_before_are_the_first_part(empty_database_url: str) -> None:
    """What an installation had logged when it was migrated is there, and numbers go on behind it."""
    from madeira.store.migrate import FOLDER, migrate

    with psycopg.connect(empty_database_url, autocommit=True) as c:
        files = sorted(FOLDER.glob("*.sql"))
        before = [file for file in files if file.name < "0008"]
        c.execute("CREATE TABLE schema_migration (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())")
        for file in before:
            c.execute(file.read_bytes())
            c.execute("INSERT INTO schema_migration (name) VALUES (%s)", (file.name,))
        conn: Any = c
        ref = _born(conn)
        log = "INSERT INTO delivery_log (delivery_id, attempt, token, started_at, outcome, settled_as, worker) "
        log += "SELECT %s, n, gen_random_uuid(), now(), 'retryable', 'pending', 'w' FROM generate_series(%s::int, %s::int) n"
        c.execute(log, (ref, 1, 3))
        migrate(empty_database_url)
        [part] = parts.parts(conn)
        assert part_of(conn, ref) == {part.name}
        c.execute(log, (ref, 4, 4))
        assert c.execute("SELECT array_agg(id ORDER BY id) FROM delivery_log").fetchone() == ([1, 2, 3, 4],)


def _born(conn: Connection) -> int:
    """A delivery in tables of an earlier version."""
    conn.execute(
        "INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, route_at) "
        "VALUES ('s', 'e', 't', '1', sha256(''), 't', now())"
    )
    row = conn.execute(
        "INSERT INTO delivery (event_seq, endpoint, lane, trace_id) SELECT seq, 'a', 'a', 't' FROM event RETURNING id"
    ).fetchone()
    assert row is not None
    return int(row[0])
