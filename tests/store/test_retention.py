"""What goes in time goes, and nothing else does."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from madeira.errors import IllegalTransition
from madeira.records import DeliveryRef, PlannedDelivery
from madeira.states import EventStatus
from madeira.store import (
    audit,
    cancelling,
    erase,
    events,
    jobs,
    listing,
    parts,
    replay,
    retention,
    rollups,
    routing,
    story,
    tombstones,
)
from madeira.store.deliveries import mark_notified
from madeira.store.jobs import NewJob
from madeira.store.retention import Ages
from madeira.store.selection import Selection
from tests.store import making
from tests.store.making import GIVE_UP, Connection, accept, claimed, new_event, routed, settled
from tests.store.waiting import passed_fences

NOW = timedelta(0)
DAY = timedelta(days=1)
ALL = Ages(payload=DAY, succeeded=DAY, cancelled=DAY, dead=DAY)


def ended(conn: Connection, event_id: str, decision: Any = making.SUCCESS) -> DeliveryRef:
    """An event with one delivery that has ended so, whoever has to know of it knowing it."""
    [ref] = routed(conn, event_id=event_id)
    settled(conn, claimed(conn, ref), decision)
    mark_notified(conn, [ref.delivery_id])
    return ref


def age(conn: Connection, days: int = 2) -> None:
    """Let all that is there have happened so many days earlier, and have been counted."""
    passed_fences(conn)
    while rollups.step(conn, lag_s=0).more:
        pass
    back = timedelta(days=days)
    conn.execute("UPDATE event SET created_at = created_at - %(b)s, updated_at = updated_at - %(b)s", {"b": back})


def removed(conn: Connection, ages: Ages = ALL) -> dict[str, int]:
    """Bury and remove all that may go, from the first event on; how many events of each status went."""
    conn.execute("UPDATE retention_walk SET after = 0")
    while retention.bury(conn, ages).more:
        pass
    gone: dict[str, int] = {}
    while (batch := retention.remove(conn, ages, wait=NOW)) is not None:
        for status, count in batch.events.items():
            gone[status] = gone.get(status, 0) + count
    return gone


def left(conn: Connection) -> set[str]:
    return {row[0] for row in conn.execute("SELECT event_id FROM event")}


def test_each_status_goes_after_its_own_age_and_the_unfinished_never(conn: Connection) -> None:
    """Deliveries go with their events; what is too young, pending or on its way stays."""
    ended(conn, "good")
    ended(conn, "bad", GIVE_UP)
    routed(conn, event_id="off")
    cancelling.cancel(conn, "shop", "off", "t", "t")
    routed(conn, event_id="waiting")
    [held] = routed(conn, event_id="called")
    claimed(conn, held)
    accept(conn, event_id="unrouted yet")
    age(conn, days=20)
    ended(conn, "young")

    assert removed(conn, Ages(succeeded=10 * DAY, cancelled=10 * DAY, dead=30 * DAY)) == {"succeeded": 1, "cancelled": 1}
    assert left(conn) == {"bad", "waiting", "called", "unrouted yet", "young"}
    assert removed(conn, Ages(dead=10 * DAY)) == {"dead": 1}
    assert removed(conn, Ages()) == {}
    assert conn.execute(
        "SELECT count(*) FROM delivery d LEFT JOIN event e ON e.seq = d.event_seq WHERE e.seq IS NULL"
    ).fetchone() == (0,)
    assert making.counts_agree(conn)


def test_an_id_that_is_gone_is_a_duplicate_until_its_tombstone_goes(conn: Connection) -> None:
    """The same bytes are told their end, other ones a conflict; after the window it is a new event."""
    event = new_event(event_id="once")
    [first] = events.insert(conn, [event])
    [ref] = routing.route(conn, [(first.seq, [PlannedDelivery("a", "a")])])[0].refs
    settled(conn, claimed(conn, ref))
    age(conn)
    assert removed(conn) == {"succeeded": 1}

    [again, other, new] = events.insert(conn, [event, new_event(event_id="once", payload="2"), new_event(event_id="new")])
    assert (again.duplicate, again.conflict, again.status, again.seq) == (True, False, EventStatus.SUCCEEDED, first.seq)
    assert again.created_at < datetime.now(UTC) - DAY
    assert (other.duplicate, other.conflict) == (False, True)
    assert not new.duplicate
    assert not new.conflict
    assert left(conn) == {"new"}

    assert retention.remove_old(conn, "tombstone", DAY).done == 0
    assert retention.remove_old(conn, "tombstone", NOW).done == 1
    [fresh] = events.insert(conn, [event])
    assert (fresh.duplicate, fresh.conflict, fresh.status) == (False, False, EventStatus.PENDING)


@pytest.mark.new_database
def test_no_step_takes_a_turn_at_the_disk(conn: Connection) -> None:
    """What goes commits without waiting, whatever it changes; who accepts events still waits for theirs."""
    conn.execute("CREATE TABLE seen (what text, how text)")
    conn.execute("""
        CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO seen VALUES (TG_TABLE_NAME || ' ' || lower(TG_OP), current_setting('synchronous_commit'));
            RETURN NULL;
        END $$
    """)
    for table in ("event", "delivery", "delivery_log_rest", "tombstone", "burial", "retention_walk", "audit"):
        conn.execute(f"CREATE TRIGGER see AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION see()")
    ended(conn, "one")
    age(conn)
    conn.execute("TRUNCATE seen")
    while retention.strip(conn, Ages(payload=DAY)).more:
        pass
    assert removed(conn) == {"succeeded": 1}
    retention.remove_old(conn, "tombstone", NOW)
    retention.remove_old(conn, "audit", NOW)
    parts.remove_rest(conn, datetime.now(UTC))
    expected = {"event update", "event delete", "delivery delete", "delivery_log_rest delete", "tombstone insert"}
    expected |= {"tombstone delete", "burial insert", "burial delete", "audit delete", "retention_walk update"}
    conn.execute("DELETE FROM seen WHERE what = 'retention_walk update' AND how = 'on'")  # by this test
    assert {what for (what,) in conn.execute("SELECT what FROM seen WHERE how = 'off'")} >= expected
    assert conn.execute("SELECT DISTINCT what FROM seen WHERE how <> 'off'").fetchall() == []
    accept(conn, event_id="two")
    assert conn.execute("SELECT what FROM seen WHERE how = 'on'").fetchall() == [("event insert",)]


def test_an_event_stays_for_a_while_after_its_tombstone(conn: Connection) -> None:
    """An insert that began before the tombstone was committed does not see it, but meets the event."""
    ended(conn, "one")
    age(conn)
    assert retention.bury(conn, ALL).done == 1
    assert retention.remove(conn, ALL) is None
    assert left(conn) == {"one"}
    assert (retention.waits_s(conn) or 0) > retention.WAIT.total_seconds() - 10
    # Both are there now: the event is what counts, and it is buried once.
    assert story.find(conn, "shop", "one") is not None
    assert tombstones.find_trace(conn, "one") == []
    conn.execute("UPDATE retention_walk SET after = 0")
    assert retention.bury(conn, ALL).done == 0


def test_what_is_replayed_between_tombstone_and_removal_stays(conn: Connection) -> None:
    """Its tombstone goes instead, and when it has ended again it is buried again."""
    dead = ended(conn, "revived", GIVE_UP)
    ended(conn, "other", GIVE_UP)
    age(conn)
    assert retention.bury(conn, ALL).done == 2
    replay.replay(conn, "shop", "revived", "t", "t")
    assert retention.remove(conn, ALL, wait=NOW) == ({"dead": 1}, 1)
    assert left(conn) == {"revived"}
    assert conn.execute("SELECT event_id FROM tombstone").fetchall() == [("other",)]
    settled(conn, claimed(conn, dead))
    age(conn)
    assert removed(conn) == {"succeeded": 1}


def test_a_change_of_the_ages_spares_what_is_buried_already(conn: Connection) -> None:
    """Who is asked to keep longer keeps what is there still."""
    ended(conn, "one")
    age(conn)
    assert retention.bury(conn, ALL).done == 1
    assert retention.remove(conn, Ages(), wait=NOW) == ({}, 0)
    assert left(conn) == {"one"}
    assert conn.execute("SELECT count(*) FROM tombstone").fetchone() == (0,)


def test_nothing_goes_that_a_job_may_be_about(conn: Connection) -> None:
    """While one has not ended the dead stay, and what has ended since it was made; the rest goes."""
    ended(conn, "bad", GIVE_UP)
    ended(conn, "before")
    age(conn, days=20)
    jobs.create(conn, NewJob("replay", Selection(), "t"), "t")
    conn.execute("UPDATE job SET created_at = created_at - interval '10 days', state = 'paused'")
    ended(conn, "since")
    age(conn, days=5)
    assert removed(conn) == {"succeeded": 1}
    assert left(conn) == {"bad", "since"}
    conn.execute("UPDATE job SET state = 'cancelled', finished_at = now()")
    assert removed(conn) == {"dead": 1, "succeeded": 1}


def test_a_dead_letter_of_which_nobody_was_told_stays(conn: Connection) -> None:
    """However old it is: somebody has to be told first."""
    [ref] = routed(conn, event_id="bad")
    settled(conn, claimed(conn, ref), GIVE_UP)
    age(conn)
    assert removed(conn) == {}
    mark_notified(conn, [ref.delivery_id])
    assert removed(conn) == {"dead": 1}


def test_charts_lose_nothing_of_what_is_removed(conn: Connection) -> None:
    """What is not counted yet stays; what is counted stays counted."""
    for n in range(5):
        ended(conn, f"good{n}")
    conn.execute("UPDATE event SET created_at = created_at - interval '2 days', updated_at = updated_at - interval '2 days'")
    conn.execute("UPDATE delivery_log SET recorded_at = recorded_at - interval '2 days'")
    assert removed(conn) == {}
    age(conn, days=0)
    week = rollups.Range("hour", timedelta(hours=1), 168)
    before = rollups.series(conn, week, endpoint="a"), rollups.series(conn, week)
    assert sum(point.numbers.delivered for point in before[0]) == 5
    assert removed(conn) == {"succeeded": 5}
    age(conn, days=0)
    assert (rollups.series(conn, week, endpoint="a"), rollups.series(conn, week)) == before


def test_payloads_go_before_their_events_and_dead_letters_keep_theirs(conn: Connection) -> None:
    """The same bytes are a duplicate still; it is told that time took the payload, and it cannot be sent again."""
    event = new_event(event_id="good", parameters='{"a": 1}')
    [accepted] = events.insert(conn, [event])
    [ref] = routing.route(conn, [(accepted.seq, [PlannedDelivery("a", "a", body='{"made": true}')])])[0].refs
    settled(conn, claimed(conn, ref))
    ended(conn, "bad", GIVE_UP)
    routed(conn, event_id="waiting")
    age(conn)
    ages = Ages(payload=DAY, succeeded=30 * DAY, dead=30 * DAY)
    # What goes as a whole by now is not written anew before.
    assert retention.strip(conn, ALL).done == 0
    conn.execute("UPDATE retention_walk SET after = 0")
    assert retention.strip(conn, ages).done == 1
    assert removed(conn, ages) == {}

    found = story.find(conn, "shop", "good")
    assert found is not None
    assert (found["payload"], found["parameters"], found["erased_by"]) == ("null", None, "retention")
    assert making.delivery(conn, ref.delivery_id)["body"] is None
    assert events.insert(conn, [event])[0].duplicate
    with pytest.raises(IllegalTransition, match="payload"):
        replay.replay(conn, "shop", "good", "t", "t", force=True)
    for kept in ("bad", "waiting"):
        other = story.find(conn, "shop", kept)
        assert other is not None
        assert (other["payload"], other["erased_at"]) == ('{"n": 1}', None)
    replay.replay(conn, "shop", "bad", "t", "t")


def test_a_person_may_erase_the_rest_of_what_time_has_begun(conn: Connection) -> None:
    """Retention takes the payload only; who asks has the answers and addresses erased too, once."""
    ended(conn, "good")
    age(conn)
    assert retention.strip(conn, Ages(payload=DAY)).done == 1
    done = erase.erase(conn, "shop", "good", "t", "asked for")
    assert done is not None
    assert done.attempts == 1
    found = story.find(conn, "shop", "good")
    assert found is not None
    assert found["erased_by"] == "person"
    assert found["deliveries"][0]["attempts"][0]["excerpt"] is None
    with pytest.raises(IllegalTransition, match="already"):
        erase.erase(conn, "shop", "good", "t", "again")


def test_a_walk_goes_on_where_it_was_and_begins_anew_when_it_is_old(conn: Connection) -> None:
    """What it had to pass by is found by the next one; pages are bounded."""
    stays = ended(conn, "bad", GIVE_UP)
    for n in range(7):
        ended(conn, f"good{n}")
    age(conn)
    ended(conn, "young")
    only = Ages(succeeded=DAY)
    assert [retention.bury(conn, only, page=3) for _ in range(4)] == [(2, True), (3, True), (2, True), (0, False)]
    replay.replay(conn, "shop", "bad", "t", "t")
    settled(conn, claimed(conn, stays))
    conn.execute("UPDATE event SET updated_at = updated_at - interval '2 days' WHERE event_id = 'bad'")
    assert retention.bury(conn, only) == (0, False)
    conn.execute("UPDATE retention_walk SET began_at = began_at - interval '7 hours'")
    assert retention.bury(conn, only) == (0, False)
    assert retention.bury(conn, only).done == 1


def test_a_day_has_one_entry_of_the_audit_and_a_person_has_its_own(conn: Connection) -> None:
    """Counts of a day add up; old entries go at last."""
    retention.note(conn, {"payloads": 2, "audit": 1})
    retention.note(conn, {"payloads": 3, "ids": 4})
    retention.note(conn, {"payloads": 1}, who="ada")
    entries = audit.page(conn, limit=10, action="retention")
    assert [(e["who"], e["detail"]) for e in entries] == [
        ("ada", {"payloads": 1}),
        ("retention", {"payloads": 5, "audit": 1, "ids": 4}),
    ]
    assert conn.execute("SELECT counts FROM retention_day").fetchall() == [({"payloads": 6, "audit": 1, "ids": 4},)]
    assert retention.remove_old(conn, "audit", DAY).done == 0
    assert retention.remove_old(conn, "audit", NOW, page=1) == (1, True)
    assert len(audit.page(conn, limit=10)) == 1


def test_what_would_go_is_what_goes(conn: Connection) -> None:
    """A dry run counts by the same rule, and changes nothing."""
    ended(conn, "good")
    ended(conn, "bad", GIVE_UP)
    age(conn)
    ended(conn, "young")
    assert retention.would_go(conn, ALL) == {"payload": 1, "succeeded": 1, "dead": 1, "cancelled": 0}
    assert len(left(conn)) == 3
    assert removed(conn) == {"succeeded": 1, "dead": 1}


def test_a_list_no_longer_shows_what_is_gone_and_a_trace_says_that_it_was(conn: Connection) -> None:
    """By its id and by its trace."""
    ended(conn, "good")
    age(conn)
    removed(conn)
    assert listing.page(conn, listing.Wanted(), limit=10).events == []
    for identifier in ("good", "trace-good"):
        [gone] = tombstones.find_trace(conn, identifier)
        assert (gone["event_id"], gone["status"]) == ("good", "succeeded")
        assert gone["removed_at"] > gone["ended_at"] >= gone["created_at"]
