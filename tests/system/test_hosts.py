"""Several hosts, some of which the network cuts off from a store while events pass; then everything is counted.

Packets are dropped, and nobody is told: a connection hangs until somebody loses patience, as it is in real networks. What stops,
freezes or refuses is tried elsewhere.
"""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from madeira.broker.queues import Queues
from tests.receiver import Answer
from tests.system import crash, hosts
from tests.system.crash import Claim, Fault
from tests.system.harness import threading_wait
from tests.system.hosts import API_PORT, METRICS_PORT, Site
from tests.system.network import Host, impossible, network
from tests.system.senders import ORDERED_RATE, RATE, SENDER_PATIENCE_S, Senders

pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why := impossible()), reason=why or ""),
]

#: Seconds that a cut lasts: longer than the lease of a call (7 s), and than any patience with a store (12 s).
CUT_S = 20.0

#: Seconds within which whoever was cut off works again.
BACK_S = 60.0

#: Seconds after which a connection that answers nothing counts as dead.
IDLE_S = 28.0

#: Seconds that an answer of a door may take without Redis and without Postgres.
WITHOUT_REDIS_S = 1.0
WITHOUT_POSTGRES_S = 2.0


def test_hosts_that_are_cut_off_and_a_redis_that_fails_over_lose_nothing_and_double_nothing_but_what_they_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accepted = ended; a second call is made only for what was in the hands of a host that lost both stores."""
    with hosts.site(tmp_path) as site:
        told: list[str] = []
        faults: list[Fault] = []
        senders = Senders(site.madeira, [host.address for host in site.apis])
        try:
            site.stay(3)
            for phase in PHASES:
                phase(site, senders, faults, told)
                backlog = site.wait(lambda: site.madeira.unfinished() < 2 * (RATE + ORDERED_RATE), 240, "the backlog's end")
                told.append(f"    the backlog was gone {backlog:.1f} s after that")
        except BaseException:
            print(site.madeira.rows(WAITING))
            raise
        finally:
            with capsys.disabled():
                print("", *told, sep="\n")
            senders.end()
        site.wait(lambda: site.madeira.unfinished() == 0, 240, "the end of all events")
        with capsys.disabled():
            print(*count(site, senders, faults), sep="\n")


def test_an_idle_connection_that_the_network_has_forgotten_costs_nobody_his_time(servers_folder: Path) -> None:
    """It is found dead while it is idle; who takes it next gets a new one, instead of an error when his time is up."""
    with network() as net:
        server = hosts.Valkey(host=net.host("redis", 11), folder=servers_folder / "forgotten")
        server.start()
        queues = Queues(redis_url=server.url, namespace="t", timeout_s=0.5)
        try:
            assert queues.ping()
            port = str(queues.client.client_info()["addr"]).rpartition(":")[2]
            for chain, end in (("INPUT", "--sport"), ("OUTPUT", "--dport")):
                server.host.run("iptables", "-A", chain, "-p", "tcp", end, port, "-j", "DROP")
            threading_wait(IDLE_S)
            assert queues.ping()
        finally:
            queues.close()
            server.stop()


# -- what is done to the site --------------------------------------------------------------------------------------------


def worker_without_redis(site: Site, senders: Senders, faults: list[Fault], told: list[str]) -> None:
    """The scheduler is cut off with it, and goes on when it is not any more."""
    cut_worker("a worker host without Redis", site, site.workers[0], [site.redis.host], faults, told)


def worker_without_postgres(site: Site, senders: Senders, faults: list[Fault], told: list[str]) -> None:
    cut_worker("a worker host without Postgres", site, site.workers[1], [site.postgres.host], faults, told)


def worker_without_both(site: Site, senders: Senders, faults: list[Fault], told: list[str]) -> None:
    # Slow, so that there are calls under way.
    site.receiver.answer("/steady", Answer(delay_s=0.5))
    cut_worker("a worker host without both", site, site.workers[2], [site.redis.host, site.postgres.host], faults, told)
    site.receiver.answer("/steady", hosts.receive)


def cut_worker(kind: str, site: Site, host: Host, others: Sequence[Host], faults: list[Fault], told: list[str]) -> None:
    """Cut a worker's host off until long after its leases have run out, then heal."""
    fault = site.cut(kind, host, *others)
    faults.append(fault)
    site.stay(CUT_S)
    site.net.heal()
    fault.until = time.time()
    back = site.wait(lambda: site.called_by(host, fault.until), BACK_S, f"{host.name} to call again")
    told.append(f"{kind}: {len(fault.hands)} in hand, it called again {back:.1f} s after the cut of {CUT_S:.0f} s was healed")


def door_without_redis(site: Site, senders: Senders, faults: list[Fault], told: list[str]) -> None:
    door = site.apis[0]
    site.net.cut(door, site.redis.host, hosts.REDIS)
    at = time.time()
    site.stay(CUT_S / 2)
    status, took = site.ready(door.address)
    until = time.time()
    # Whoever posted last has heard of it by then.
    threading_wait(SENDER_PATIENCE_S)
    site.net.heal()
    assert (status, took < 3) == (200, True)
    report = heard("a door without Redis", senders, door, at, until, told)
    assert set(report) == {"202"}
    assert max(report["202"]) < WITHOUT_REDIS_S


def door_without_postgres(site: Site, senders: Senders, faults: list[Fault], told: list[str]) -> None:
    door = site.apis[1]
    site.net.cut(door, site.postgres.host)
    at = time.time()
    site.stay(CUT_S)
    status, took = site.ready(door.address)
    until = time.time()
    # Whoever posted last has heard of it by then.
    threading_wait(SENDER_PATIENCE_S)
    site.net.heal()
    assert (status, took < 3) == (503, True)
    report = heard("a door without Postgres", senders, door, at, until, told)
    assert set(report) == {"503"}
    assert max(report["503"]) < WITHOUT_POSTGRES_S
    back = site.wait(lambda: any(s.answer == "202" for s in senders.heard(door.address, until, time.time())), BACK_S, "a 202")
    told.append(f"    it accepted again {back:.1f} s after it was healed")


def heard(kind: str, senders: Senders, door: Host, at: float, until: float, told: list[str]) -> dict[str, list[float]]:
    """What a door answered to what was posted in that time, and how long each took."""
    found: dict[str, list[float]] = {}
    for said in senders.heard(door.address, at, until):
        found.setdefault(said.answer, []).append(said.took_s)
    for answer, took in found.items():
        took.sort()
        told.append(
            f"{kind}: {len(took)} answers {answer}, half within {took[len(took) // 2]:.3f} s, all within {took[-1]:.3f} s"
        )
    return found


def failover_to_an_empty_replica(site: Site, senders: Senders, faults: list[Fault], told: list[str]) -> None:
    replica = site.standby(replicates=False)
    fail_over("Redis fails over to an empty replica", site, replica, told)


def failover_to_a_replica_that_lags(site: Site, senders: Senders, faults: list[Fault], told: list[str]) -> None:
    """It has not heard of the last seconds: what ended meanwhile is queued or in hand there, what came is not known."""
    replica = site.standby(replicates=True)
    site.net.cut(replica.host, site.redis.host)
    site.stay(3.0)
    fail_over("Redis fails over to a replica that lags by 3 s", site, replica, told)
    site.net.heal()


def fail_over(kind: str, site: Site, replica: hosts.Valkey, told: list[str]) -> None:
    site.fail_over(replica)
    at = time.time()
    took = site.wait(lambda: all(site.called_by(host, at) for host in site.workers), 90, "all workers to call again")
    told.append(f"{kind}: all workers called again {took:.1f} s after it had taken the address")


#: What has not ended, for whoever looks for the reason.
WAITING = (
    "SELECT endpoint, d.status, count(*), min(d.next_attempt_at), min(d.lease_until), max(d.claimed_at), now() FROM delivery d "
    "WHERE d.status IN ('pending', 'delivering') GROUP BY 1, 2"
)

#: In their order; each worker's host is cut off once.
PHASES: Sequence[Callable[[Site, Senders, list[Fault], list[str]], None]] = (
    worker_without_redis,
    worker_without_postgres,
    door_without_redis,
    door_without_postgres,
    failover_to_an_empty_replica,
    worker_without_both,
    failover_to_a_replica_that_lags,
)


# -- what came of it -------------------------------------------------------------------------------------------------------


def count(site: Site, senders: Senders, faults: list[Fault]) -> Iterator[str]:
    """Count everything, and hold it against what was promised; yields what is to be printed."""
    madeira, receiver = site.madeira, site.receiver
    ended = crash.all_claims(madeira, receiver)
    unexplained = crash.blame(ended, faults)
    events = {row["event_id"]: row["status"] for row in madeira.rows("SELECT event_id, status FROM event")}
    yield from crash.table(faults, ended, len(senders.accepted), Counter(events.values()))
    yield f"answers: {dict(Counter((said.door, said.answer) for said in senders.said))}"
    yield from nothing_lost(senders, events)
    yield from nothing_doubled(site, ended, unexplained, faults)
    yield from in_order(site)
    yield from nothing_differs(site)
    yield from numbers_agree(site, len(events))


def nothing_lost(senders: Senders, events: dict[str, str]) -> Iterator[str]:
    """I1: each event that was answered with a 2xx has ended, each as its receivers decided."""
    expected = {
        event: "dead" if event.startswith("a-") and hosts.is_refused(int(event[2:])) else "succeeded"
        for event in senders.accepted
    }
    assert len(expected) == len(senders.accepted)
    assert events == expected
    yield f"lost: {len(set(expected) - set(events))}"


def nothing_doubled(site: Site, ended: list[Claim], unexplained: list[Claim], faults: list[Fault]) -> Iterator[str]:
    """I2, I3, I4: one call per claim, one end per delivery, and no claim was lost that was called but by who lost both stores."""
    assert [claim for claim in ended if claim.calls > 1] == [], "a claim is called once at most"
    assert [claim for claim in ended if not claim.calls and not claim.lost] == [], "no verdict without a call"
    assert unexplained == [], "called, without a verdict, and in nobody's hands that were cut off"
    assert site.receiver.overlaps == {}, "two calls for one delivery at the same moment"
    called = {fault.kind: fault.called for fault in faults}
    assert {kind for kind, calls in called.items() if calls} <= {"a worker host without both"}
    assert sum(called.values()) <= hosts.THREADS
    last = (
        "SELECT delivery_id, max(attempt) FILTER (WHERE settled_as IN ('succeeded', 'dead')) AS last, max(attempt) AS attempt, "
    )
    last += "count(*) FILTER (WHERE settled_as IN ('succeeded', 'dead')) AS ends FROM delivery_log GROUP BY 1"
    wrong = [row for row in site.madeira.rows(last) if (row["last"], row["ends"]) != (row["attempt"], 1)]
    assert wrong == [], "called after it had ended"
    taken = Counter(call.webhook_id for call in site.receiver.calls if call.status == 200)
    twice = sum(n > 1 for n in taken.values())
    assert twice <= sum(called.values())
    yield f"taken twice by their receiver: {twice}, all of them in hands that lost both stores"
    burnt = "SELECT * FROM delivery d WHERE failures <> (SELECT count(*) FROM delivery_log l WHERE l.delivery_id = d.id {})"
    assert site.madeira.rows(burnt.format("AND outcome NOT IN ('succeeded', 'late', 'lost')")) == []


def in_order(site: Site) -> Iterator[str]:
    """The receiver took the events of the ordered lane in the order in which they were posted."""
    taken = [call.json()["payload"]["n"] for call in site.receiver.calls_to("/ordered") if call.status == 200]
    firsts = list(dict.fromkeys(taken))
    assert firsts == sorted(firsts)
    yield f"in order: {len(firsts)}"


def nothing_differs(site: Site) -> Iterator[str]:
    """What Postgres and Redis say is the same in the end."""
    door = site.apis[0]
    compare = ["madeira", "reconcile", "--json"]

    def differences() -> list[str]:
        done = subprocess.run(door.inside(*compare), env=site.madeira.env, capture_output=True, text=True, check=False)
        return [done.stdout, done.stderr] if done.returncode else [json.loads(done.stdout)["differences"]]

    # A run of the scheduler's may be under way, or have just ended.
    site.wait(lambda: differences() == [{}], 30, "a comparison without differences")
    yield "reconcile: no differences"


def numbers_agree(site: Site, events: int) -> Iterator[str]:
    """What the hosts' pages say of themselves adds up."""
    doors = sum((site.numbers(host, API_PORT) for host in site.apis), Counter())
    workers = sum((site.numbers(host, METRICS_PORT) for host in site.workers), Counter())
    accepted = doors["madeira_ingress_requests_total", "accepted", "test"]
    settled = sum(n for key, n in workers.items() if key[0] == "madeira_deliveries_settled_total")
    deliveries = site.madeira.value("SELECT count(*) FROM delivery")
    duplicates = doors["madeira_ingress_requests_total", "duplicate", "test"]
    assert accepted <= events <= accepted + duplicates, (
        "an accepted event whose sender was not told is a duplicate when he comes again"
    )
    assert settled == deliveries
    yield f"metrics: {accepted:.0f} of {events} events accepted, {settled:.0f} of {deliveries} deliveries settled"
