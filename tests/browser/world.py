"""A Madeira in the middle of a night: something of everything that the console can show, with times as they would be."""

import json
import uuid
from dataclasses import replace
from typing import Any, Final

import psycopg

from madeira.broker.queues import DELIVER, ROUTE, Ensure, Finish, Queues, delivery_key
from madeira.lanes import LaneSettings
from madeira.records import DeliveryRef, PlannedDelivery
from madeira.states import FailureClass, Outcome
from madeira.store import cancelling, job_steps, jobs, notices, routing
from madeira.store.deliveries import SettleRequest, settle
from madeira.store.jobs import NewJob
from madeira.store.notices import Kind
from madeira.store.rollups import BOUNDS
from madeira.store.selection import Selection
from tests.api.people import ADMIN, in_json
from tests.api.serving import Api
from tests.broker.conftest import Player
from tests.store import making

Connection = psycopg.Connection[Any]

CONFIG: Final = """
[[source]]
name = "shop"
secrets = ["a-secret-of-the-shop"]

[[source]]
name = "billing"
secrets = ["the-new-secret-of-billing", "the-old-one"]
rate = 200

[[source]]
name = "warehouse-europe-central-2"
secrets = ["a-secret-of-the-warehouse"]

[[endpoint]]
name = "partner-ledger"
url = "https://ledger.partner.example/v2/hooks/{event_type}"
rate = 30
concurrency = 8
secrets = ["whsec_dGhlIHNlY3JldCBvZiB0aGUgdGVzdHM="]
headers = { "X-Tenant" = "acme", "X-Correlation" = "{{ event_id }}" }
success = "status in [200, 201] && body.accepted == true"
retry = { initial = 5, max = 3600, max_attempts = 12 }

[[endpoint]]
name = "crm"
url = "https://crm.example/webhooks"
ordering = "payload.customer"

[[endpoint]]
name = "search-index"
url = "http://search.internal.example:8080/_ingest/orders"
rate = 500

[[endpoint]]
name = "warehouse-sync"
url = "https://warehouse.example/hook"

[[endpoint]]
name = "old-erp"
url = "https://erp.example/soap-bridge"

[[route]]
name = "orders-to-ledger"
endpoint = "partner-ledger"
source = "shop"
event_type = "order.*"
filter = "payload.amount > 100 && payload.currency in ['EUR', 'USD'] && !(has(payload.test) && payload.test)"

[[route]]
name = "everything-to-search"
endpoint = "search-index"

[[route]]
name = "customers-to-crm"
endpoint = "crm"
event_type = "customer.*"
routing_key = "eu.**"
"""

#: What a receiver got and answered, as it is kept of a call that failed.
EXCHANGE: Final = json.dumps({
    "request": {
        "method": "POST",
        "headers": [
            ["Content-Type", "application/json"], ["User-Agent", "Madeira"], ["webhook-id", "msg_2f6c1d9a4b7e"],
            ["webhook-timestamp", "1767225600"], ["webhook-signature", "***"], ["X-Tenant", "***"],
            ["traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],
        ],
        "body_length": 1234, "body_sha256": "ab" * 32,
    },
    "answer": {"headers": [["Server", "nginx"], ["Content-Type", "text/html"], ["Retry-After", "120"]], "complete": True},
})  # fmt: skip

_PAYLOAD: Final = {"order": {"number": 4711, "lines": [{"sku": f"A-{n:05}", "count": n} for n in range(60)]}, "currency": "EUR"}


class World:
    """What there is, with the names that tests need."""

    def __init__(self, api: Api, conn: Connection) -> None:
        self._conn = conn
        self._queues = Queues(redis_url=api.env["MADEIRA_REDIS_URL"], namespace=api.env["MADEIRA_NAMESPACE"])
        api.configure(CONFIG)
        self._lived()
        self.delivered = self._delivered("order.paid", payload=json.dumps(_PAYLOAD))
        self.unrouted = self._unrouted()
        self.cancelled = self._cancelled()
        self.jobs = self._jobs()
        self.letters = self._letters()
        self.pending = self._pending()
        self.retried = self._retried()
        self.parked = self._parked()
        for name, action in (("warehouse-sync", "pause"), ("old-erp", "disable")):
            body = json.dumps({"reason": "their migration until 06:00, says Ann of theirs (T-1234)"}).encode()
            assert api.request("POST", f"/v1/endpoints/{name}/{action}", body, in_json(ADMIN)).status == 200
        self._told()
        self._queues.beat("worker-1", silence_s=3600, spread_s=1, queues=[ROUTE], held=[])

    def goes_on(self) -> None:
        """What workers say again and again, of whom there are none: the settings of a lane, which Redis soon forgets."""
        self._queues.set_lanes([LaneSettings("partner-ledger", 10**9, None, 5, 8, 40.0, broken_s=600, broken_max_s=3600)])

    def close(self) -> None:
        """Let go of Redis."""
        self._queues.close()

    # -- what went well ------------------------------------------------------------------------------------------------

    def _lived(self) -> None:
        """A day and more of traffic for the charts, and a reconcile that has just run."""
        shown = {"delivered": 2350, "attempts_succeeded": 2350, "attempts_retryable": 90, "attempts_permanent": 4}
        shown |= {"retries_0": 2200, "retries_1": 110, "retries_2": 28, "retries_3": 9, "retries_5": 3}
        rows = self._conn.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'rollup_endpoint' AND data_type = 'integer'"
        )
        columns = sorted(row[0] for row in rows)
        shape = (2, 9, 40, 120, 500, 900, 480, 200, 60, 20, 10, 5, 3, 1)
        shown |= {f"latency_{n}": count for n, count in enumerate(shape) if n <= len(BOUNDS)}
        values = ", ".join(f"({shown.get(column, 0)} * f * (1 + 0.3 * sin(n / 9.0)))::integer" for column in columns)
        for span, count, factor in (("minute", 1500, 1), ("hour", 170, 60)):
            begun = f"date_trunc('{span}', now(), 'UTC') - n * interval '1 {span}'"
            some = f"FROM generate_series(0, {count}) n, (VALUES ({factor})) v (f)"
            self._conn.execute(
                f"INSERT INTO rollup_endpoint (span, bucket, endpoint, {', '.join(columns)})"
                f" SELECT '{span}', {begun}, 'search-index', {values} {some}".encode()
            )
            accepted = "(2400 * f * (1 + 0.3 * sin(n / 9.0)))::integer"
            self._conn.execute(
                "INSERT INTO rollup_source (span, bucket, source, accepted)"
                f" SELECT '{span}', {begun}, 'shop', {accepted} {some}".encode()
            )
        self._conn.execute(
            "INSERT INTO reconcile_run (duration_s, holder, counts) VALUES (0.1, 'w', '{\"missing\": 1204, \"stray\": 0}')"
        )

    def _delivered(self, event_type: str, **fields: Any) -> str:
        event_id = fields.setdefault("event_id", str(uuid.uuid4()))
        for ref in making.routed(self._conn, ("search-index", "crm"), event_type=event_type, routing_key="eu.de", **fields):
            making.settled(self._conn, making.claimed(self._conn, ref))
        self._age(event_id, 3900)
        return str(event_id)

    # -- what did not --------------------------------------------------------------------------------------------------

    def _unrouted(self) -> str:
        event_id = str(uuid.uuid4())
        routing.route(self._conn, [(making.accept(self._conn, event_id=event_id, event_type="basket.abandoned"), [])])
        self._age(event_id, 800)
        return event_id

    def _cancelled(self) -> str:
        event_id = "order-2026-000118"
        making.routed(self._conn, ("search-index",), event_id=event_id, source="billing", event_type="invoice.created")
        cancelling.cancel(self._conn, "billing", event_id, "token ann", "the customer called: it was a mistake")
        return event_id

    def died(self, endpoint: str, code: str, said: str, *, tries: int = 1, age_s: int = 0, **fields: Any) -> int:
        """The delivery of an event that was given up after some attempts, with what was sent and what came back."""
        event_id = fields.setdefault("event_id", str(uuid.uuid4()))
        [ref] = making.routed(self._conn, (endpoint,), **fields)
        status = int(code[5:]) if code.startswith("http_") else None
        for n in range(tries):
            held = making.claimed(self._conn, ref)
            is_last = n == tries - 1
            failed = making.attempt(
                Outcome.PERMANENT if is_last else Outcome.RETRYABLE,
                status_code=status, error_code=code, reason=said, url="https://ledger.partner.example/v2/hooks/order.paid",
                excerpt=b"<html><body><h1>503 Service Unavailable</h1>\n<p>upstream: no live upstreams</p></body></html>",
                exchange=EXCHANGE, length=5120,
            )  # fmt: skip
            decision = replace(making.GIVE_UP, last_error=said) if is_last else making.RETRY
            settle(
                self._conn, [SettleRequest(held.delivery_id, held.seq, held.token, held.attempt, failed, decision, worker="w:1")]
            )
            if not is_last:
                making.make_due(self._conn, ref.delivery_id)
        self._age(event_id, age_s)
        return ref.delivery_id

    def _letters(self) -> list[int]:
        said = "503 Service Unavailable: no live upstreams while connecting to upstream"
        found = [
            self.died("partner-ledger", "http_503", said, tries=1 + n % 3, age_s=2900 - n * 40, payload=json.dumps(_PAYLOAD))
            for n in range(32)
        ]
        found += [
            self.died("crm", "read_timeout", "no answer within 10 s", event_type="customer.changed", age_s=700) for _ in range(4)
        ]
        found.append(self.died("search-index", "http_404", "404 Not Found", age_s=300, source="warehouse-europe-central-2"))
        plan = PlannedDelivery(
            "partner-ledger", "partner-ledger", ("orders-to-ledger",), FailureClass.TEMPLATE, "the URL needs event_type, a text"
        )
        found.append(routing.route(self._conn, [(making.accept(self._conn), [plan])])[0].dead[0].delivery_id)
        return found

    # -- what is not over ----------------------------------------------------------------------------------------------

    def _pending(self) -> str:
        event_id = str(uuid.uuid4())
        making.accept(self._conn, event_id=event_id, event_type="order.paid")
        return event_id

    def _retried(self) -> str:
        """An event that has failed twice and waits for its third attempt."""
        event_id = str(uuid.uuid4())
        [ref] = making.routed(self._conn, ("crm",), event_id=event_id, event_type="customer.changed")
        for _ in range(2):
            making.make_due(self._conn, ref.delivery_id)
            making.settled(self._conn, making.claimed(self._conn, ref), replace(making.RETRY, delay_s=600))
        self._queues.ensure([Ensure(DELIVER, delivery_key(ref), 600.0, "retry")])
        return event_id

    def _parked(self) -> str:
        """The last of many that wait behind a breaker that is open."""
        if not self._queues.has_epoch():
            assert self._queues.rebuild_begin("world")
            assert self._queues.rebuild_commit("world")
        self.goes_on()
        player = Player(self._queues, "world")
        self._queues.ensure([Ensure(DELIVER, f"{10**9 + n}:{10**9 + n}:partner-ledger", 0.0, "fresh") for n in range(5)])
        for _ in range(5):
            [grant] = player.turn(room=1).grants
            player.turn(room=0, finishes=[Finish(grant.key, player.hands[grant.key][1], "f", verdict="bad")])
        refs: list[DeliveryRef] = []
        for _ in range(12):
            event_id = str(uuid.uuid4())
            refs += making.routed(self._conn, ("partner-ledger",), event_id=event_id)
        self._queues.ensure([Ensure(DELIVER, delivery_key(ref), 0.0, "fresh") for ref in refs])
        making.routed(self._conn, ("warehouse-sync",))
        return event_id

    def _jobs(self) -> dict[str, int]:
        """A job in each state, about dead letters of their own."""
        made = {}
        for state in ("done", "failed", "cancelled", "paused", "running"):
            for n in range(4):
                self.died(f"gone-{state}", "http_500", "500 Internal Server Error", age_s=9000 - n)
            why = "they are back, says their status page; first half of the night only"
            job = NewJob(action="replay", selection=Selection(endpoint=f"gone-{state}"), reason=why, ordered=state == "paused")
            made[state] = int(jobs.create(self._conn, job, "token ann-of-the-night-shift")[0]["id"])
            begun = job_steps.step(self._conn, made[state]).begun
            for ref in begun[: {"done": 4, "running": 2}.get(state, 1)]:
                making.settled(self._conn, making.claimed(self._conn, ref))
            job_steps.step(self._conn, made[state])
            if state in ("paused", "cancelled"):
                jobs.steer(self._conn, made[state], {"paused": "pause"}.get(state, "cancel"), "token ann", "too quick")
            if state == "failed":
                while not job_steps.stumble(self._conn, made[state], "canceling statement due to statement timeout"):
                    pass
        self._conn.execute("UPDATE job SET created_at = created_at - interval '90 s'")
        return made

    # -- what was told -------------------------------------------------------------------------------------------------

    def _told(self) -> None:
        self._conn.execute("TRUNCATE notice")
        told: list[tuple[Kind, str, dict[str, Any]]] = [
            (Kind.BREAKER_CLOSED, "crm", {}),
            (Kind.RECONCILE_DIFFERENCES, "", {"missing": 3, "stray": 1}),
            (Kind.ENDPOINT_DISABLED, "old-erp", {"by": "token ann", "reason": "gone for good"}),
            (Kind.DEAD_LETTERS_BEGAN, "partner-ledger", {"reason": "http_503"}),
            (Kind.BREAKER_OPENED, "partner-ledger", {"reason": "5 failures in a row"}),
        ]
        for kind, endpoint, detail in told:
            notices.write(self._conn, kind, endpoint, detail)

    def _age(self, event_id: str, age_s: float) -> None:
        """Let it all have happened some time ago."""
        by = {"id": event_id, "s": age_s}
        of = "event_seq IN (SELECT seq FROM event WHERE event_id = %(id)s)"
        ago = "- %(s)s * interval '1 s'"
        self._conn.execute(
            f"UPDATE event SET created_at = created_at {ago}, routed_at = routed_at {ago} WHERE event_id = %(id)s".encode(), by
        )
        self._conn.execute(
            f"UPDATE delivery SET died_at = died_at {ago}, finished_at = finished_at {ago}, created_at = created_at {ago}"
            f" WHERE {of}".encode(), by
        )  # fmt: skip
        self._conn.execute(
            f"UPDATE delivery_log SET started_at = started_at {ago}, recorded_at = recorded_at {ago}"
            f" WHERE delivery_id IN (SELECT id FROM delivery WHERE {of})".encode(), by
        )  # fmt: skip

    def event_of(self, delivery_id: int) -> str:
        """The event of a delivery."""
        sql = "SELECT e.event_id FROM event e JOIN delivery d ON d.event_seq = e.seq WHERE d.id = %s"
        ((event_id,),) = self._conn.execute(sql, (delivery_id,))
        return str(event_id)
