"""Every process is killed in turn, and one frozen past its lease, while events pass; then everything is counted."""

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.receiver import Receiver
from tests.servers import OwnPostgres, OwnRedis
from tests.system import crash
from tests.system.crash import Cast, Fault, Traffic
from tests.system.harness import running, toml, wait_until

#: Events of one round, in equal parts to the faults.
EVENTS = 500


@pytest.mark.crash
@pytest.mark.alone
def test_whatever_is_killed_what_was_accepted_ends_and_nothing_is_called_twice_but_what_died(
    tmp_path: Path, own_redis: OwnRedis, own_postgres: OwnPostgres, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accepted = ended, no retry is burnt, and a second call is made only for what was in killed or frozen hands."""
    with (
        Receiver(default=crash.think) as receiver,
        running(
            folder=tmp_path,
            database_url=own_postgres.url,
            redis_url=own_redis.url,
            config=toml(crash.endpoint(receiver)),
            env=crash.SCALED,
        ) as madeira,
    ):
        cast = Cast(madeira, receiver, own_redis, own_postgres)
        cast.start()
        traffic = Traffic(madeira)
        faults: list[Fault] = []
        try:
            for n in range(rounds):
                play(cast, traffic, faults, n)
            accepted = traffic.finish(30)
            # The traffic may be faster than the six calls at a time: what was posted last waits behind a backlog.
            wait_until(lambda: unfinished(cast) == 0, 60 + 15 * rounds, what="the end of all events", every=0.1)
        finally:
            traffic.close()

        ended = crash.all_claims(madeira, receiver)
        unexplained = crash.blame(ended, faults)
        finished = Counter(row["status"] for row in crash.rows(madeira, "SELECT status FROM event"))
        with capsys.disabled():
            print("", *crash.table(faults, ended, len(accepted), finished), sep="\n")

        assert len(set(accepted)) == EVENTS * rounds
        assert finished == {"succeeded": len(accepted)}, "accepted = ended, and the receiver took each in the end"
        assert [claim for claim in ended if claim.calls > 1] == [], "a claim is called once at most"
        assert [claim for claim in ended if not claim.calls and not claim.lost] == [], "no verdict without a call"
        assert unexplained == [], "called, without a verdict, and in nobody's hands that died"
        assert receiver.overlaps == {}, "two calls for one delivery at the same moment"
        burnt = "SELECT * FROM delivery d WHERE failures <> (SELECT count(*) FROM delivery_log l WHERE l.delivery_id = d.id {})"
        assert crash.rows(madeira, burnt.format("AND outcome NOT IN ('succeeded', 'late', 'lost')")) == []


def play(cast: Cast, traffic: Traffic, faults: list[Fault], n: int) -> None:
    """One round: each fault falls into the middle of its share of the events; the order moves on from round to round."""
    start = n % len(crash.FAULTS)
    order = [*crash.FAULTS[start:], *crash.FAULTS[:start]]
    for i, (kind, strike) in enumerate(order):
        traffic.post(EVENTS * (i + 1) // len(order) - EVENTS * i // len(order))
        traffic.wait_under_way()
        cast.receiver.wait_until(lambda: cast.receiver.in_progress >= 3, 30, what="calls under way")
        fault = Fault(kind, time.time())
        faults.append(fault)
        strike(cast, fault)
        fault.until = time.time()
        cast.assert_whole()


def unfinished(cast: Cast) -> int:
    (row,) = crash.rows(cast.madeira, "SELECT count(*) FROM event WHERE status IN ('pending', 'delivering')")
    found: int = row["count"]
    return found
