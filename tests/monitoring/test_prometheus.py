"""A real Prometheus and a real Madeira: the numbers are those of what happened, each alert fires when its fault is there."""

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.collector import PATH, Collector
from tests.monitoring.conftest import Open, Site
from tests.monitoring.prometheus import Prometheus, scaled, scraping, since_start
from tests.monitoring.test_files import ALERTS, PANELS
from tests.receiver import Answer, Receiver
from tests.servers import OwnPostgres, OwnRedis, Standby
from tests.system.harness import SECRET, TOKEN, Madeira, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

#: A second source.
SHOP = f'\n[[source]]\nname = "shop"\nsecrets = ["{SECRET}"]\n'


def post(madeira: Madeira, body: bytes, *, source: str = "test", secret: str = SECRET) -> int:
    """Post a body; the status of the answer, 0 when there is none."""
    stamp = str(int(time.time()))
    mac = hmac.new(secret.encode(), stamp.encode() + b"\n" + body, hashlib.sha256).hexdigest()
    headers = {"X-Madeira-Source": source, "X-Madeira-Timestamp": stamp, "X-Madeira-Signature": mac}
    try:
        return madeira.http.post("/v1/events", content=body, headers={**headers, "Content-Type": "application/json"}).status_code
    except httpx.TransportError:
        return 0


def event(event_id: str, event_type: str) -> bytes:
    return json.dumps({"event_id": event_id, "event_type": event_type, "payload": None}).encode()


def pause(madeira: Madeira, endpoint: str) -> None:
    answer = madeira.http.post(
        f"/v1/endpoints/{endpoint}/pause", json={"reason": "a test"}, headers={"Authorization": f"Bearer {TOKEN}"}
    )
    assert answer.status_code == 200, answer.text


def by(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


@pytest.fixture
def collector() -> Iterator[Collector]:
    """What takes spans."""
    with Collector() as found:
        yield found


# -- the numbers ----------------------------------------------------------------------------------------------------------


def script(site: Site, receiver: Receiver) -> None:
    """Accepted are 100 events of one source and ten of another; 7 bad signatures, 5 bad formats, 3 dead, known retries.

    Of the hundred 88 go to `good`, 7 to `flaky`, which fails twice each, 3 to `broken`, and 2 wait for `held`.
    """
    madeira = site.madeira
    receiver.answer("/broken", Answer(status=500))
    seen: dict[str, int] = {}

    def flaky(call: Any) -> Answer:
        seen[call.webhook_id] = seen.get(call.webhook_id, 0) + 1
        return Answer(status=503 if seen[call.webhook_id] <= 2 else 200)

    receiver.answer("/flaky", flaky)
    pause(madeira, "held")
    for name, count in (("good", 88), ("flaky", 7), ("broken", 3), ("held", 2)):
        for n in range(count):
            assert post(madeira, event(f"{name}-{n}", f"{name}.x")) == 202
    for n in range(10):
        assert post(madeira, event(f"shop-{n}", "good.x"), source="shop") == 202
    for n in range(7):
        assert post(madeira, event(f"bad-{n}", "good.x"), secret="another") == 401
    for body in (b"{", b"[", b'{"a": 1, "a": 2}'):
        assert post(madeira, body) == 400
    for body in (b'{"event_type": 3}', b'{"event_type": ""}'):
        assert post(madeira, body) == 422
    wait_until(lambda: madeira.unfinished() == 2, 60, what="the end of all but two")
    wait_until(lambda: site.numbers("madeira-worker").get(DEAD) == 3, 30, what="the dead to be told")
    # The scheduler has it done once a minute; nobody knows when that is.
    reconcile = madeira.start("reconcile", ["madeira", "reconcile"])
    assert reconcile.popen.wait(30) == 0, reconcile.tail()


DEAD = 'madeira_dead_letters_total{endpoint="broken",failure_class="receiver"}'

#: What each panel shows after the script, but for what is 0; None: how long something took, of which only that it is there.
EXPECTED: dict[str, dict[frozenset[tuple[str, str]], float] | None] = {
    "Stores away": {},
    "Workers": {by(): 2},
    "Dead letters in all": {by(): 3},
    "Longest wait": None,
    "Unfinished deliveries": {by(): 2},
    "Intake rate": {by(source="test", outcome="accepted"): 100, by(source="shop", outcome="accepted"): 10},
    "Intake failures": {by(source="test", kind="signature"): 7, by(source="test", kind="format"): 5},
    "Share of intake that fails": {
        by(source="test", kind="signature"): 7 / 112,
        by(source="test", kind="format"): 5 / 112,
    },
    "Queue backlog": {by(queue="deliver", state="ready"): 2},
    "Consumption rate": {by(outcome="succeeded"): 105, by(outcome="retryable"): 23},
    "Delivery success rate": {by(endpoint="good"): 1, by(endpoint="flaky"): 7 / 21},
    "Retries per delivery": {by(endpoint="flaky"): 2, by(endpoint="broken"): 2},
    "Distribution of retries": {by(endpoint="flaky", retries="2"): 1, by(endpoint="broken", retries="2"): 1},
    "Unfinished by retries": {by(endpoint="held", retries="0"): 2},
    "Dead letters": {by(endpoint="broken"): 3},
    "Growth of dead letters": {by(endpoint="broken", failure_class="receiver"): 3},
    "Lanes": {by(endpoint="held", state="paused"): 1},
    "Lanes that are served": {by(endpoint=name, state="active"): 1 for name in ("good", "flaky", "broken")},
    "Differences found by reconcile": {},
    "Rejected messages": {},
    "Oldest that waits": None,
    "Last reconcile": None,
    "Time to accept": None,
    "Work of the actors": None,
    "Time of a call": None,
    "From acceptance to success": None,
    "Connections of the pools": None,
    "Replica lag": None,
    "Replica in use": {by(): 1},
    "Spans": None,
}


def test_every_panel_and_every_recording_rule_shows_what_happened(
    open_site: Open, receiver: Receiver, collector: Collector, own_postgres: OwnPostgres, standby: Standby, tmp_path: Path
) -> None:
    """To the event, by source and endpoint.

    Rates are asked for as sums since the beginning: over minutes Prometheus extrapolates, and no number would be exact.
    """
    retry = {"initial": 0.1, "max": 0.2, "max_attempts": 3}
    names = ("good", "flaky", "broken", "held")
    endpoints = {name: {"url": receiver.url(f"/{name}"), "retry": retry} for name in names}
    # On a busy machine a key may be on its way for longer than a reconcile that runs each second waits.
    env = {"MADEIRA_RECONCILE_S": "60", "MADEIRA_REPLICA_URL": standby.url, **collector.env()}
    site = open_site(endpoints, config=SHOP, env=env, database_url=own_postgres.url)
    with scraping(folder=tmp_path / "prometheus", targets=site.targets, rewrite=since_start) as prometheus:
        script(site, receiver)
        panels = [(p["title"], t["expr"]) for p in PANELS for t in p["targets"]]
        assert {title for title, _ in panels} == set(EXPECTED)

        def shown(query: str) -> dict[frozenset[tuple[str, str]], float]:
            query = since_start(query.replace("$source", ".+").replace("$endpoint", ".+"))
            return {labels: value for labels, value in prometheus.query(query).items() if value}

        for title, query in panels:
            expected = EXPECTED[title]
            if expected is None:
                wait_until(lambda q=query: shown(q), 20, what=title)
            else:
                with contextlib.suppress(AssertionError):
                    wait_until(lambda q=query, e=expected: shown(q) == pytest.approx(e), 15)
                assert shown(query) == pytest.approx(expected), title
        records = [rule for rule in prometheus.rules() if rule["type"] == "recording"]
        assert {(rule["name"], rule["health"], rule.get("lastError")) for rule in records} == {
            (rule["name"], "ok", None) for rule in records
        }
        assert prometheus.query("sum by (endpoint, outcome) (madeira:delivery_attempts:rate5m) > 0") == {
            by(endpoint="good", outcome="succeeded"): 98,
            by(endpoint="flaky", outcome="succeeded"): 7,
            by(endpoint="flaky", outcome="retryable"): 14,
            by(endpoint="broken", outcome="retryable"): 9,
        }
        assert prometheus.query("madeira:delivery_success:ratio_rate15m")[by(endpoint="broken")] == 0
        good = by(endpoint="good", retries="0")
        assert prometheus.query("madeira:delivery_retries:share_rate30m")[good] == 1


# -- processes that come and go -------------------------------------------------------------------------------------------


def test_a_killed_process_takes_no_count_with_it_and_leaves_no_gauge(open_site: Open, receiver: Receiver) -> None:
    """Whichever kind it is; its successor goes on from there, and twenty looks see the same."""
    site = open_site({"a": {"url": receiver.url("/a")}})
    madeira = site.madeira
    madeira.post_many(50, "a.x")
    madeira.wait_all()
    attempts = 'madeira_delivery_attempts_total{endpoint="a",outcome="succeeded"}'
    accepted = 'madeira_ingress_requests_total{outcome="accepted",source="test"}'
    pools = 'madeira_pool_connections_max{pool="redis"}'
    wait_until(lambda: site.numbers("madeira-worker").get(attempts) == 50, what="the counts")
    of_two = wait_until(lambda: site.numbers("madeira-worker").get(pools), what="the pools of two")
    os.kill(max(madeira_workers(site)), signal.SIGKILL)
    os.kill(site.api.children()[0], signal.SIGKILL)
    site.worker.stop()
    site.worker = madeira.worker(processes=1, name="successor")
    wait_until(lambda: site.is_served("madeira-worker"), 30, what="the successor's page")
    wait_until(lambda: site.numbers("madeira-worker").get(pools) == of_two / 2, what="the gauge of one")
    wait_until(lambda: len(site.api.children()) == 2, what="the API's new process")
    for _ in range(20):
        assert site.numbers("madeira-worker")[attempts] == 50
        assert site.numbers("madeira-api")[accepted] == 50
    madeira.post_many(5, "a.x")
    madeira.wait_all()
    wait_until(lambda: site.numbers("madeira-worker")[attempts] == 55, what="the counts go on")
    assert site.numbers("madeira-api")[accepted] == 55
    folder = madeira.folder / "data" / "metrics" / "worker"
    assert len(list(folder.glob("counter_*.db"))) <= 4
    assert not [name for name in site.numbers("madeira-worker") if name.startswith(("madeira_queue", "madeira_lane"))]
    assert "madeira_scheduler_ticks_total" in site.page("madeira-scheduler")


def madeira_workers(site: Site) -> list[int]:
    """The processes of the master that work; what is beside them was started last and is not killed."""
    return [pid for pid in site.worker.children() if b"madeira.actors" in Path(f"/proc/{pid}/cmdline").read_bytes()][:2]


# -- the alerts -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def again_and_again(act: Callable[[], object], every_s: float) -> Iterator[None]:
    """Do something, as a sender or a fault does, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(httpx.TransportError):
                act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Faults:
    """Faults that are made one after another, each until its alert fires."""

    def __init__(self, *, site: Site, receiver: Receiver, collector: Collector, prometheus: Prometheus) -> None:
        self._site, self._madeira = site, site.madeira
        self._receiver, self._collector, self._prometheus = receiver, collector, prometheus
        self._numbers = itertools.count()
        self.fired: set[str] = set()

    def fires(self, alert: str, **labels: str) -> None:
        def is_firing() -> bool:
            found = self._prometheus.firing().get(alert, [])
            return any(labels.items() <= one["labels"].items() for one in found)

        wait_until(is_firing, 60, what=f"{alert} {labels}", every=0.2)
        self.fired.add(alert)

    def send(self, *event_types: str) -> None:
        for event_type in event_types:
            post(self._madeira, event(f"n-{next(self._numbers)}", event_type))

    def receivers_fail(self) -> None:
        """One always, one until its breaker opens, one at each first try; after a past in which all was well."""
        with again_and_again(lambda: self.send("good.x", "limp.x"), 0.1):
            began = time.monotonic()
            wait_until(lambda: self._prometheus.query('madeira:delivery_retries:mean_rate30m{endpoint="limp"}'), what="a past")
            wait_until(lambda: time.monotonic() > began + 35, 60, what="a past that is long enough", every=0.2)
            assert set(self._prometheus.firing()) <= {"MadeiraSchedulerMissing"}
            self._receiver.answer("/broken", Answer(status=500))
            self._receiver.answer("/dying", Answer(status=500))
            tries: Counter[str] = Counter()

            def limp(call: Any) -> Answer:
                tries[call.webhook_id] += 1
                return Answer(status=503 if tries[call.webhook_id] == 1 else 200)

            self._receiver.answer("/limp", limp)
            with again_and_again(lambda: self.send("broken.x", "dying.x"), 0.3):
                self.fires("MadeiraDeadLettersGrow", endpoint="broken")
                self.fires("MadeiraSuccessLow", endpoint="broken")
                self.fires("MadeiraBreakerOpen", endpoint="dying")
                self.fires("MadeiraNothingEnds", endpoint="dying")
                self.fires("MadeiraRetriesRise", endpoint="limp")

    def a_sender_errs(self) -> None:
        with again_and_again(lambda: post(self._madeira, b"{", source="shop"), 0.2):
            self.fires("MadeiraIntakeFormats", source="shop")
        with again_and_again(lambda: post(self._madeira, event("s", "good.x"), source="shop", secret="another"), 0.2):
            self.fires("MadeiraIntakeSignatures", source="shop")

    def spans_a_replica_and_keys_are_lost(self, standby: Standby) -> None:
        self._collector.answer(PATH, Answer(status=400))
        with again_and_again(lambda: self.send("good.x"), 0.2):
            self.fires("MadeiraSpansLost")
        standby.kill()
        self.fires("MadeiraReplicaUnused")
        later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        self._madeira.post("good.x", deliver_at=later)
        with again_and_again(lambda: self._madeira.redis.delete(f"{self._madeira.namespace}:route:delayed"), 0.5):
            self.fires("MadeiraReconcileFinds", kind="event_not_queued")

    def a_process_finds_no_room(self) -> None:
        """One of the workers' family, that may write no byte into any file."""
        code = (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
            "from madeira import settings; settings.multiproc_dir(settings.load(), 'worker')\n"
            "from madeira import metrics; input()"
        )
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, env=self._madeira.env, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            self.fires("MadeiraNumbersInMemory", job="madeira-worker")
            process.kill()

    def processes_die(self) -> None:
        """First the workers, then the scheduler; a key is spoilt, and Postgres takes no writes any more."""
        assert "MadeiraWorkersMissing" not in self._prometheus.firing()
        self._site.worker.kill()
        wait_until(lambda: post(self._madeira, event("waits", "good.x")) in (200, 202), what="one that waits")
        self.fires("MadeiraWorkersMissing")
        self.fires("MadeiraReconcileStale")
        self.fires("MadeiraWaitsTooLong", queue="route")
        self.fires("MadeiraTargetMissing", job="madeira-worker")
        # A list of lanes that is none.
        lanes = f"{self._madeira.namespace}:deliver:active"
        self._madeira.redis.delete(lanes)
        self._madeira.redis.set(lanes, "nonsense")
        self.fires("MadeiraNumbersMissing", metric="lane_state")
        self._site.scheduler.kill()
        self.fires("MadeiraSchedulerMissing")
        with psycopg.connect(self._madeira.database_url) as somebody, again_and_again(lambda: self.send("good.x"), 0.2):
            somebody.execute("LOCK TABLE event IN EXCLUSIVE MODE")
            self.fires("MadeiraIntakeFails", outcome="unavailable")

    def stores_go(self, redis: OwnRedis, postgres: OwnPostgres) -> None:
        """And the API last. Nobody posts, so nothing but the alerts of the stores wakes anybody."""
        critical = {name for name, rule in ALERTS.items() if rule["labels"]["severity"] == "critical"}
        redis.kill()
        self.fires("MadeiraStoreAway", store="redis")
        postgres.kill()
        self.fires("MadeiraStoreAway", store="postgres")
        alone = {"MadeiraStoreAway"}
        wait_until(lambda: critical & set(self._prometheus.firing()) == alone, what="what was seen before it to be forgotten")
        self._site.api.kill()
        self.fires("MadeiraApiMissing")


def test_each_alert_fires_when_its_fault_is_there(
    open_site: Open,
    receiver: Receiver,
    collector: Collector,
    own_postgres: OwnPostgres,
    own_redis: OwnRedis,
    standby: Standby,
    tmp_path: Path,
) -> None:
    """With minutes made seconds. Before anything is broken none fires but that of the scheduler, which ticks by the minute.

    A page for which Postgres is asked in vain takes a second, for which only the second Prometheus has the patience.
    """
    site = open_site(
        {
            "good": {"url": receiver.url("/good")},
            "limp": {"url": receiver.url("/limp"), "retry": {"initial": 0.1, "max": 0.1, "max_attempts": 9}},
            "broken": {"url": receiver.url("/broken"), "retry": {"initial": 0.1, "max": 0.1, "max_attempts": 2}},
            "dying": {"url": receiver.url("/dying"), "breaker": {"enabled": True, "hold": 60}},
        },
        config=SHOP,
        env={"MADEIRA_REPLICA_URL": standby.url, **collector.env()},
        database_url=own_postgres.url,
        redis_url=own_redis.url,
    )
    parts: dict[str, Any] = {"site": site, "receiver": receiver, "collector": collector}
    with scraping(folder=tmp_path / "prometheus", targets=site.targets, rewrite=scaled) as prometheus:
        faults = Faults(**parts, prometheus=prometheus)
        faults.receivers_fail()
        faults.a_sender_errs()
        faults.spans_a_replica_and_keys_are_lost(standby)
        faults.a_process_finds_no_room()
        faults.processes_die()
        assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
    with scraping(folder=tmp_path / "patient", targets=site.targets, rewrite=scaled, period_ms=2500) as prometheus:
        last = Faults(**parts, prometheus=prometheus)
        last.stores_go(own_redis, own_postgres)
    assert faults.fired | last.fired == set(ALERTS)
