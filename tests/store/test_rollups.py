"""The roll-ups hold exactly what happened, each thing once, whatever interrupts the counting."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from madeira.records import DeliveryRef
from madeira.states import Outcome
from madeira.store import cancelling, replay, rollups, routing
from madeira.store.database import Database
from madeira.store.rollups import Numbers, Point, Range, Span
from tests.store import making
from tests.store.making import GIVE_UP, RETRY, Connection, accept, claimed, make_due, new_event, routed, settled
from tests.store.waiting import passed_fences

SPANS: tuple[Span, ...] = ("minute", "hour")


def count(conn: Connection, *, page: int = rollups.PAGE) -> int:
    """Count all that is there; how many rows that were."""
    passed_fences(conn)
    counted = 0
    while True:
        step = rollups.step(conn, page=page, lag_s=0)
        counted += step.counted
        if not step.more:
            return counted


def count_beside(conn: Connection) -> rollups.Step:
    """Count what can be counted beside a transaction that is under way."""
    rollups.set_fences(conn)
    return rollups.step(conn, lag_s=0)


def total(conn: Connection, span: Span = "hour", endpoint: str | None = None) -> Point:
    """All that is counted, or that of an endpoint."""
    [point] = rollups.series(conn, Range(span, timedelta(days=36_500), 1), endpoint=endpoint)
    return point


def accepted_of(conn: Connection, span: Span = "hour") -> dict[str, int]:
    """Accepted events by their source."""
    return dict(
        conn.execute("SELECT source, sum(accepted)::int FROM rollup_source WHERE span = %s GROUP BY 1", (span,)).fetchall()
    )


def of(conn: Connection, endpoint: str) -> Numbers:
    return total(conn, endpoint=endpoint).numbers


def some(pairs: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Those of some counts that are not zero."""
    return {name: n for name, n in pairs if n}


def delivered(conn: Connection, ref: DeliveryRef, retries: int = 0) -> None:
    for _ in range(retries):
        settled(conn, claimed(conn, ref), RETRY)
        make_due(conn, ref.delivery_id)
    settled(conn, claimed(conn, ref))


def script(conn: Connection) -> None:
    """Seven events of two sources, with a delivery each to `a`, and one more to `b` of each of the first two."""
    for retries in (0, 1, 2, 4, 7):
        [ref, *others] = routed(conn, ["a", "b"] if retries < 2 else ["a"])
        delivered(conn, ref, retries)
        for other in others:
            settled(conn, claimed(conn, other), GIVE_UP)
    [ref] = routed(conn, source="bank")
    settled(conn, claimed(conn, ref), RETRY)
    make_due(conn, ref.delivery_id)
    settled(conn, claimed(conn, ref), GIVE_UP)
    cancelled = new_event(source="bank")
    accept(conn, source="bank", event_id=cancelled.event_id)
    row = conn.execute("SELECT seq FROM event WHERE event_id = %s", (cancelled.event_id,)).fetchone()
    assert row is not None
    routing.route(conn, [(row[0], [making.PlannedDelivery("a", "a", ("some route",))])])
    cancelling.cancel(conn, "bank", cancelled.event_id, "ann", None)


def is_as_scripted(conn: Connection, times: int = 1) -> bool:
    """Whether exactly what `script` did is counted, in minutes and in hours."""
    for span in SPANS:
        a, b = (total(conn, span, endpoint=name).numbers for name in ("a", "b"))
        everywhere = total(conn, span)
        assert everywhere.numbers.delivered + everywhere.numbers.dead == 8 * times
        assert (a.delivered, a.dead, a.cancelled) == (5 * times, times, times)
        assert some(a.attempts) == {"succeeded": 5 * times, "retryable": 15 * times, "permanent": times}
        assert some(a.retries) == {"0": 2 * times, "1": 2 * times, "2": times, "3-4": times, "5+": times}
        assert sum(a.latency) == 5 * times
        assert (b.delivered, b.dead, b.cancelled, some(b.attempts)) == (0, 2 * times, 0, {"permanent": 2 * times})
        assert accepted_of(conn, span) == {"shop": 5 * times, "bank": 2 * times}
        assert everywhere.accepted == 7 * times
    return True


def test_each_thing_that_happened_is_counted_once(conn: Connection) -> None:
    """Accepted, delivered, dead, cancelled, attempts by outcome, retries by class; counting again adds nothing."""
    script(conn)
    # 7 events, 23 attempts, and one end that no attempt brought.
    assert count(conn) == 7 + 23 + 1
    assert is_as_scripted(conn)
    assert count(conn) == 0
    assert is_as_scripted(conn)
    script(conn)
    count(conn, page=2)
    assert is_as_scripted(conn, times=2)


def test_a_pause_is_caught_up_in_bounded_steps(conn: Connection) -> None:
    """A step counts no more than its page of each kind, and says that there is more."""
    script(conn)
    passed_fences(conn)
    first = rollups.step(conn, page=3, lag_s=0)
    assert first == (3 + 3 + 1, True)
    steps = 1
    while rollups.step(conn, page=3, lag_s=0).more:
        steps += 1
    assert steps == 7
    assert is_as_scripted(conn)


def test_two_that_count_at_once_count_each_thing_once(conn: Connection, database: Database) -> None:
    """Four threads with small pages meet on every step."""
    script(conn)
    passed_fences(conn)
    start = threading.Barrier(4)
    counted: list[int] = []

    def run() -> None:
        with database.connect() as own:
            start.wait()
            counted.append(sum(rollups.step(own, page=2, lag_s=0).counted for _ in range(15)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counted) == 7 + 23 + 1
    assert is_as_scripted(conn)


def test_a_counter_that_is_killed_in_the_middle_has_counted_nothing(conn: Connection, database: Database) -> None:
    """Its numbers and its place go together; who comes next does all of it."""
    script(conn)
    passed_fences(conn)
    with database.connect() as killed:
        killed.execute("BEGIN")
        assert rollups.step(killed, lag_s=0).counted == 31
        # Behind a pooler the connection itself does not know.
        conn.execute("SELECT pg_terminate_backend(%s)", killed.execute("SELECT pg_backend_pid()").fetchone())
        with pytest.raises(psycopg.OperationalError):
            killed.execute("COMMIT")
    assert total(conn).numbers == of(conn, "nowhere")
    assert count(conn) == 31
    assert is_as_scripted(conn)


@pytest.fixture
def late(database: Database) -> Iterator[Connection]:
    """A connection with an open transaction."""
    with database.connect() as late:
        late.execute("BEGIN")
        yield late


@pytest.mark.parametrize("kind", ["event", "attempt", "end"])
def test_what_commits_late_is_counted_all_the_same(conn: Connection, late: Connection, kind: str) -> None:
    """Its id is lower than those that were there before it; the counting waits, and passes nothing by."""
    first, second = (ref for _ in range(2) for ref in routed(conn))
    count(conn)
    if kind == "event":
        accept(late)
    elif kind == "attempt":
        settled(late, claimed(late, first))
    else:
        row = making.event(conn, first.seq)
        cancelling.cancel(late, row["source"], row["event_id"], "ann", None)
    settled(conn, claimed(conn, second))
    accept(conn)
    assert count_beside(conn) == (0, False)
    late.execute("COMMIT")
    assert count(conn) == 3
    numbers = of(conn, "a")
    assert numbers.delivered == (2 if kind == "attempt" else 1)
    assert numbers.cancelled == (1 if kind == "end" else 0)
    assert total(conn).accepted == accepted_of(conn)["shop"] == (4 if kind == "event" else 3)


def test_a_transaction_that_somebody_forgot_holds_nothing_up_for_good(conn: Connection, late: Connection) -> None:
    """After minutes the counting goes on without it."""
    accept(late)
    accept(conn)
    assert count_beside(conn) == (0, False)
    conn.execute("UPDATE rollup_cursor SET fenced_at = fenced_at - interval '301 s'")
    assert rollups.step(conn).counted == 1


def test_a_fence_is_left_alone_for_a_moment(conn: Connection) -> None:
    """Whoever drew an id just before it may have had no number of a transaction yet."""
    accept(conn)
    passed_fences(conn)
    assert rollups.step(conn, lag_s=60) == (0, False)
    assert rollups.step(conn, lag_s=0) == (1, False)


def test_deaths_at_birth_and_cancelled_dead_letters_are_counted(conn: Connection) -> None:
    """The first has no attempt; the second dies once and is cancelled once, and its retries count once."""
    seq = accept(conn)
    dead = making.PlannedDelivery("born", "born", ("r",), failure_class="template", last_error="no such field")
    routing.route(conn, [(seq, [dead])])
    [ref] = routed(conn, ["later"])
    settled(conn, claimed(conn, ref), GIVE_UP)
    with conn.transaction():
        conn.execute(
            "UPDATE delivery SET status = 'cancelled', died_at = NULL, finished_at = clock_timestamp() WHERE id = %s",
            (ref.delivery_id,),
        )
        conn.execute("UPDATE event SET status = 'cancelled', dead = 0, cancelled = 1 WHERE seq = %s", (ref.seq,))
    count(conn)
    born, later = of(conn, "born"), of(conn, "later")
    assert (born.dead, born.cancelled, some(born.retries), some(born.attempts)) == (1, 0, {"0": 1}, {})
    assert (later.dead, later.cancelled, some(later.retries)) == (1, 1, {"0": 1})


def test_a_replay_before_the_counting_changes_nothing_that_happened(conn: Connection) -> None:
    """The death is counted although the row says otherwise by then, and the success beside it."""
    [ref] = routed(conn)
    settled(conn, claimed(conn, ref), GIVE_UP)
    row = making.event(conn, ref.seq)
    replay.replay(conn, row["source"], row["event_id"], "ann", "mended")
    delivered(conn, ref)
    count(conn)
    numbers = of(conn, "a")
    assert (numbers.delivered, numbers.dead, some(numbers.retries)) == (1, 1, {"0": 1, "1": 1})


def test_attempts_that_were_lost_or_late_are_counted_as_such(conn: Connection) -> None:
    """A takeover leaves a loss, and the verdict of the one who was taken over is late."""
    [ref] = routed(conn)
    first = claimed(conn, ref)
    making.expire(conn, ref.delivery_id)
    second = claimed(conn, ref)
    settled(conn, first)
    settled(conn, second)
    count(conn)
    assert some(of(conn, "a").attempts) == {"succeeded": 1, "late": 1, "lost": 1}


def test_every_outcome_has_its_column(conn: Connection) -> None:
    """The names of the outcomes stand in one place, and the table follows them."""
    rows = conn.execute("SELECT column_name FROM information_schema.columns WHERE table_name = 'rollup_endpoint'")
    columns = {name.removeprefix("attempts_") for (name,) in rows if name.startswith("attempts_")}
    assert columns == set(Outcome)


# -- time ---------------------------------------------------------------------------------------------------------------


def put(conn: Connection, at: datetime, latency_s: float, endpoint: str = "a") -> None:
    """Have one event accepted at a time, and delivered after so many seconds."""
    [ref] = routed(conn, [endpoint])
    delivered(conn, ref)
    conn.execute("UPDATE event SET created_at = %s WHERE seq = %s", (at, ref.seq))
    conn.execute(
        "UPDATE delivery_log SET recorded_at = %s WHERE delivery_id = %s", (at + timedelta(seconds=latency_s), ref.delivery_id)
    )


def moment(conn: Connection) -> datetime:
    """The beginning of the hour that has begun, by the database's time."""
    row: Any = conn.execute("SELECT date_trunc('hour', now(), 'UTC')").fetchone()
    return datetime.fromisoformat(row[0].isoformat()).astimezone(UTC)


def test_things_are_counted_in_the_minute_and_hour_in_which_they_happened(conn: Connection) -> None:
    """Not when they were counted; a success counts when it came, its event when that was accepted."""
    hour = moment(conn)
    put(conn, hour - timedelta(seconds=90), 60)
    put(conn, hour - timedelta(seconds=31), 1)
    put(conn, hour - timedelta(seconds=1), 2)
    count(conn)
    minutes = {
        p.at: (p.accepted, p.numbers.delivered) for p in rollups.series(conn, Range("minute", timedelta(minutes=1), 60), now=hour)
    }
    assert len(minutes) == 60
    busy = {at: n for at, n in minutes.items() if n != (0, 0)}
    minute = timedelta(minutes=1)
    assert busy == {hour - 2 * minute: (1, 0), hour - minute: (2, 2), hour: (0, 1)}
    hours = {
        p.at: (p.accepted, p.numbers.delivered) for p in rollups.series(conn, Range("hour", timedelta(hours=1), 168), now=hour)
    }
    assert (len(hours), hours[hour - timedelta(hours=1)], hours[hour]) == (168, (3, 2), (0, 1))
    quarters = rollups.series(conn, Range("minute", timedelta(minutes=15), 96), now=hour)
    assert [(p.accepted, p.numbers.delivered) for p in quarters[-2:]] == [(3, 2), (0, 1)]


def test_a_series_can_be_narrowed_to_an_endpoint(conn: Connection) -> None:
    """To its deliveries, since an event is none of one endpoint's; otherwise it is the sum of all."""
    routed(conn, source="bank")
    for endpoint in ("a", "a", "b"):
        delivered(conn, routed(conn, [endpoint])[0])
    count(conn)

    def last(endpoint: str | None = None) -> tuple[int, int]:
        points = rollups.series(conn, Range("hour", timedelta(days=1), 90), endpoint=endpoint)
        return sum(p.accepted for p in points), sum(p.numbers.delivered for p in points)

    assert last() == (4, 3)
    assert last("a") == (0, 2)


def test_the_latency_can_be_read_as_p50_and_p95(conn: Connection) -> None:
    """Ninety of a hundred within a tenth of a second, ten of half a minute: each in its cell, to the width of the cell."""
    now = moment(conn) - timedelta(minutes=5)
    for i in range(20):
        put(conn, now, 0.07 if i < 18 else 25.0)
    count(conn)
    numbers = of(conn, "a")
    p50, p95 = numbers.latency_s(0.5), numbers.latency_s(0.95)
    assert p50 is not None
    assert p95 is not None
    assert 0.05 <= p50 <= 0.1
    assert 10 <= p95 <= 30
    assert Numbers().latency_s(0.5) is None


def test_what_waited_for_its_own_time_is_not_late_before_it(conn: Connection) -> None:
    """An event for tomorrow that goes at once tomorrow took a moment."""
    [ref] = routed(conn)
    delivered(conn, ref)
    conn.execute("UPDATE event SET deliver_at = clock_timestamp(), created_at = created_at - interval '1 day'")
    count(conn)
    fast = of(conn, "a").latency_s(1.0)
    assert fast is not None
    assert fast < 60


def test_buckets_are_kept_for_a_bounded_time(conn: Connection) -> None:
    """Minutes for two days, hours for ninety; what is older when it is counted is not written at all."""
    now = moment(conn)
    for days in (1, 3, 91):
        put(conn, now - timedelta(days=days), 1)
    count(conn)
    assert spans(conn) == [("hour", 2), ("minute", 1)]
    conn.execute("UPDATE rollup_endpoint SET bucket = bucket - interval '88 days'")
    assert rollups.purge(conn, limit=1) == 2
    assert rollups.purge(conn) == 0
    assert spans(conn) == [("hour", 1)]


def spans(conn: Connection) -> list[tuple[str, int]]:
    return conn.execute("SELECT span, count(*) FROM rollup_endpoint GROUP BY 1 ORDER BY 1").fetchall()
