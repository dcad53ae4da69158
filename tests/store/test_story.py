"""Events as they are shown: one with all that became of it, and what happened lately."""

from madeira.store import story, timeline
from tests.store.making import RETRY, Connection, accept, claimed, routed, settled


def test_find_shows_the_whole_story(conn: Connection) -> None:
    """Deliveries by birth, attempts in the order of time, with the first bytes of the answer."""
    first, second = routed(conn, ["a", "b"], event_id="one")
    held = claimed(conn, first)
    settled(conn, held, RETRY)
    claimed(conn, second)
    found = story.find(conn, "shop", "one")
    assert found is not None
    a, b = found["deliveries"]
    assert (a["endpoint"], a["status"], a["attempt"], a["failures"], a["retries"]) == ("a", "pending", 1, 1, 1)
    assert (b["endpoint"], b["status"], b["attempts"]) == ("b", "delivering", [])
    [attempt] = a["attempts"]
    assert (attempt["outcome"], attempt["status_code"], attempt["excerpt"]) == ("retryable", 503, b"ok")
    assert found["retry_count"] == 1
    assert story.find(conn, "other", "one") is None


def test_a_trace_is_found_by_trace_id_and_by_event_id(conn: Connection) -> None:
    """All events of a trace, and all of one id whatever their source, the earliest first."""
    one = accept(conn, event_id="one", trace_id="t1")
    two = accept(conn, event_id="two", trace_id="t1")
    elsewhere = accept(conn, event_id="one", source="other", trace_id="t2")
    assert [e["seq"] for e in story.find_trace(conn, "t1")] == [one, two]
    assert [e["seq"] for e in story.find_trace(conn, "one")] == [one, elsewhere]
    assert story.find_trace(conn, "three") == []


def test_the_timeline_shows_the_newest_events_and_their_attempts(conn: Connection) -> None:
    """From a moment on, the earliest first, at most so many; with each attempt and what follows it."""
    routed(conn, event_id="before")
    since = timeline.now(conn)
    [ref] = routed(conn, event_id="one")
    settled(conn, claimed(conn, ref), RETRY)
    accept(conn, event_id="two")
    shown, [attempt] = timeline.recent(conn, since)
    assert [event["event_id"] for event in shown] == ["one", "two"]
    assert (attempt["seq"], attempt["endpoint"], attempt["outcome"], attempt["is_latest"]) == (ref.seq, "a", "retryable", True)
    assert 59 < attempt["next_in_s"] <= 60
    assert [event["event_id"] for event in timeline.recent(conn, since, limit=1)[0]] == ["two"]
