"""What each of our middleware classes is for, and that nothing else does it: without the class its promise is broken."""

import contextlib
import logging
import pkgutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import dramatiq
import psycopg
import pytest
from dramatiq import Message
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Middleware, SkipMessage
from dramatiq.worker import _WorkQueueItem
from prometheus_client import REGISTRY

import middleware
from madeira.broker.broker import MadeiraBroker
from madeira.broker.queues import DELIVER, ROUTE, Ensure, Queues, delivery_key
from middleware.idempotency import Idempotency
from middleware.in_flight import InFlight
from middleware.lifespan import Lifespan
from middleware.measure import Measure
from middleware.rate_limit import RateLimit
from middleware.retries import TunedRetries
from middleware.tracing import Tracing
from tests.actors.inprocess import InProcess, in_process
from tests.receiver import Answer, Gate, Receiver
from tests.servers import OwnRedis
from tests.store import making
from tests.system.harness import Madeira, Process, running, toml, wait_until


@dataclass
class Stage:
    """What a scenario may use."""

    receiver: Receiver
    folder: Path
    database_url: str
    redis_url: str
    caplog: pytest.LogCaptureFixture
    #: A class that is left out.
    without: type[Middleware] | None = None

    def process(self, *, endpoint: dict[str, Any] | None = None, **settings: Any) -> AbstractContextManager[InProcess]:
        """A worker process with the endpoint `a`, which calls ``/a``."""
        return in_process(
            folder=self.folder,
            database_url=self.database_url,
            redis_url=self.redis_url,
            endpoints={"a": {"url": self.receiver.url("/a"), "retry": {"initial": 30, "max": 60}} | (endpoint or {})},
            without=self.without,
            **settings,
        )


@pytest.fixture
def stage(tmp_path: Path, database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture, receiver: Receiver) -> Stage:
    """A stage on the shared servers."""
    caplog.set_level(logging.INFO)
    return Stage(receiver, tmp_path, database_url, redis_url, caplog)


@pytest.fixture
def receiver() -> Any:
    """A receiver that answers 200 unless told otherwise."""
    with Receiver() as receiver:
        yield receiver


def happened(predicate: Callable[[], Any], timeout: float) -> bool:
    """Whether something happens in time."""
    try:
        wait_until(predicate, timeout)
    except AssertionError:
        return False
    return True


def keyed(delivery_id: int, seq: int, **options: Any) -> MessageProxy:
    """A message for a delivery of the lane `a`, as nobody but the broker should make it."""
    args = (delivery_id, seq, "a")
    return MessageProxy(Message(queue_name=DELIVER, actor_name="deliver", args=args, kwargs={}, options=options))


def ran(actor: str, outcome: str) -> float:
    """How often an actor's messages ended so, by the metrics."""
    labels = {"actor": actor, "outcome": outcome}
    return REGISTRY.get_sample_value("madeira_actor_messages_total", labels) or 0.0


# -- the scenarios: one per class ----------------------------------------------------------------------------------------


def opens_what_the_worker_works_with(stage: Stage) -> None:
    with stage.process() as process:
        seq = making.accept(process.conn, source="test", event_type="a.b")
        process.queues.ensure([Ensure(ROUTE, str(seq))])
        process.start()
        delivered = happened(lambda: making.event(process.conn, seq)["status"] == "succeeded", 3 if stage.without else 10)
        assert delivered, "the tools of the worker are open"


def names_the_delivery_on_every_line(stage: Stage) -> None:
    stage.receiver.answer("/a", Answer(status=500))
    with stage.process() as process:
        process.start()
        ref = process.routed()
        process.wait_status(ref, "pending")
        wait_until(lambda: process.outcomes(ref), what="an attempt")
        wait_until(lambda: any(line["event"] == "delivery.attempted" for line in lines(stage)), what="its line")
        trace_id = process.delivery(ref)["trace_id"]
    (line,) = [line for line in lines(stage) if line["event"] == "delivery.attempted"]
    assert line.get("delivery") == ref.delivery_id, "a line names its delivery"
    assert (line["actor"], line["trace_id"]) == ("deliver", trace_id)
    for line in lines(stage):
        assert line["event"] == "delivery.attempted" or "delivery" not in line, "the context ends with the message"


def lines(stage: Stage) -> list[dict[str, Any]]:
    return [record.msg for record in stage.caplog.records if isinstance(record.msg, dict)]


def counts_and_times_every_message(stage: Stage) -> None:
    stage.receiver.queue("/a", Answer(), Answer(status=500))
    before = ran("deliver", "done"), ran("deliver", "retried")
    with stage.process() as process:
        process.start()
        process.wait_status(process.routed(), "succeeded")
        process.routed()
        wait_until(lambda: stage.receiver.answered == 2, what="both calls")
    after = ran("deliver", "done"), ran("deliver", "retried")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1), "outcomes are counted"
    assert (REGISTRY.get_sample_value("madeira_actor_duration_seconds_count", {"actor": "deliver"}) or 0) >= 2


def refuses_a_keyed_message_without_a_grant(stage: Stage) -> None:
    with stage.process() as process:
        process.start()
        ref = process.routed(queued=False)
        skipped, failed = ran("deliver", "skipped"), ran("deliver", "failed")
        message = keyed(ref.delivery_id, ref.seq, redis_message_id="x")
        assert process.worker is not None
        process.worker.work_queue.put(_WorkQueueItem(0, message))
        wait_until(lambda: ran("deliver", "skipped") + ran("deliver", "failed") > skipped + failed, what="the end of the message")
        assert ran("deliver", "failed") == failed, "a message without a grant does not reach its actor"
        assert process.delivery(ref)["attempt"] == 0
        assert stage.receiver.count() == 0


def gives_back_a_grant_that_ran_out_while_its_process_was_stopped(stage: Stage) -> None:
    config = toml({"a": {"url": stage.receiver.url("/a"), "timeout": 0.5}})
    env = {"TEST_WITHOUT": stage.without.__name__ if stage.without else "", "MADEIRA_LEASE_MARGIN_S": "0.5"}
    servers = {"database_url": stage.database_url, "redis_url": stage.redis_url}
    with running(folder=stage.folder, config=config, env=env, **servers) as madeira, queues_of(madeira) as queues:
        worker = one_thread(madeira)
        hold = Message(queue_name="holding", actor_name="hold", args=(), kwargs={}, options={})
        queues.enqueue("holding", "hold.1", hold.encode())
        assert madeira.redis.blpop(["held-up"], timeout=20), "its only thread is busy"
        wait_until(queues.has_epoch, what="the epoch")
        with making_in(madeira) as conn:
            (ref,) = making.routed(conn)
            queues.ensure([Ensure(DELIVER, delivery_key(ref))])
            wait_until(lambda: queues.where(DELIVER, [delivery_key(ref)])[0].kind == "held", what="the hand-out")
            # A beat waits for the turn that brought the grant: after it the grant is in memory.
            beaten = last_beat(madeira)
            wait_until(lambda: last_beat(madeira) > beaten, what="a beat")
            worker.freeze()
            wait_until(lambda: queues.where(DELIVER, [delivery_key(ref)])[0].delay_s == 0, what="the end of the marker")
            assert making.delivery(conn, ref.delivery_id)["attempt"] == 0
            madeira.redis.rpush("let-go", "1")
            worker.thaw()
            wait_until(lambda: making.delivery(conn, ref.delivery_id)["status"] == "succeeded", what="the delivery")
            attempts = [outcome for _, outcome, _ in making.log_of(conn, ref.delivery_id)]
    assert attempts == ["succeeded"], "a grant that has run out is not used"
    assert stage.receiver.count() == 1
    assert "grant.expired" in worker.tail(10**6)


def one_thread(madeira: Madeira) -> Process:
    args = ["dramatiq", "tests.broker.entry", "-p", "1", "-t", "1"]
    worker = madeira.start("worker", args, {"MADEIRA_THREADS": "1"})
    wait_until(lambda: "ready for action" in worker.tail(10**6), 30, what="the worker's start")
    return worker


def last_beat(madeira: Madeira) -> float:
    """When a process was last heard of."""
    found: Any = madeira.redis.zrange(f"{madeira.namespace}:procs", -1, -1, withscores=True)
    return float(found[0][1])


def queues_of(madeira: Madeira) -> AbstractContextManager[Queues]:
    return contextlib.closing(Queues(redis_url=madeira.redis_url, namespace=madeira.namespace))


def making_in(madeira: Madeira) -> AbstractContextManager[making.Connection]:
    return psycopg.connect(madeira.database_url, autocommit=True)


def gives_back_a_delivery_that_was_not_started_in_time(stage: Stage) -> None:
    with stage.process(threads=1, endpoint={"rate": 0.05}) as process, busy(process) as go:
        process.queues.beat("another process", silence_s=60, spread_s=0, queues=[DELIVER], held=[])
        ref = process.routed()
        (hand,) = wait_until(lambda: process.broker.hands.of(DELIVER), what="the grant in memory")
        wait_until(lambda: process.broker.alive == 2, what="a beat that sees both processes")
        wait_until(lambda: hand.waited_s > 1.05, what="more than a second in memory")
        skipped = ran("deliver", "skipped")
        go.set()
        process.wait_status(ref, "succeeded")
        assert ran("deliver", "skipped") - skipped == 1, "a delivery that waited in memory is given back"
        assert process.outcomes(ref) == ["succeeded"], "and starts at once: its rate token came back too (the next is 20 s away)"


@contextlib.contextmanager
def busy(process: InProcess) -> Iterator[Event]:
    """Start the worker, whose only thread is held up by an ordinary message until the event is set."""
    go, started = Event(), Event()

    def hold() -> None:
        started.set()
        go.wait(20)

    dramatiq.actor(hold, actor_name="hold", queue_name="holding", broker=process.broker).send()
    process.start()
    try:
        assert started.wait(5)
        yield go
    finally:
        go.set()


def brings_a_retry_back_exactly_when_settle_said(stage: Stage) -> None:
    stage.receiver.answer("/a", Answer(status=503))
    with stage.process() as process:
        process.start()
        ref = process.routed()
        wait_until(lambda: process.outcomes(ref) == ["retryable"], what="the first attempt")
        process.wait_place(ref, "delayed")
        assert abs(process.due_later_in_redis_s(ref)) < 0.25, "Redis and Postgres agree on the due time"
        ((delay_s,),) = process.conn.execute(
            "SELECT extract(epoch FROM next_attempt_at - recorded_at)::float8 FROM delivery JOIN delivery_log ON delivery_id = "
            "delivery.id WHERE delivery.id = %s",
            (ref.delivery_id,),
        )
        assert 29.9 < delay_s < 36.1, "thirty seconds and up to a fifth more"
        row = process.delivery(ref)
        assert (row["attempt"], row["failures"], row["lost"]) == (1, 1, 0)
        assert process.redis.hlen("m:deliver:stumbles") == 0, "a retry is no stumble"


@dataclass(frozen=True)
class Promise:
    """What a class is there for: the scenario, and the words of the assertion that fails without the class."""

    kind: type[Middleware]
    scenario: Callable[[Stage], None]
    words: str


PROMISES = [
    Promise(Lifespan, opens_what_the_worker_works_with, "the tools of the worker are open"),
    Promise(Tracing, names_the_delivery_on_every_line, "a line names its delivery"),
    Promise(Measure, counts_and_times_every_message, "outcomes are counted"),
    Promise(Idempotency, refuses_a_keyed_message_without_a_grant, "a message without a grant does not reach its actor"),
    Promise(InFlight, gives_back_a_grant_that_ran_out_while_its_process_was_stopped, "a grant that has run out is not used"),
    Promise(RateLimit, gives_back_a_delivery_that_was_not_started_in_time, "a delivery that waited in memory is given back"),
    Promise(TunedRetries, brings_a_retry_back_exactly_when_settle_said, "Redis and Postgres agree on the due time"),
]

each_promise = pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.kind.__name__)


@each_promise
def test_every_class_keeps_its_promise(stage: Stage, promise: Promise) -> None:
    promise.scenario(stage)


@each_promise
def test_without_the_class_the_promise_is_broken(stage: Stage, promise: Promise) -> None:
    stage.without = promise.kind
    with pytest.raises(AssertionError, match=promise.words):
        promise.scenario(stage)


def test_every_class_of_the_package_is_tried_and_in_the_list_of_the_worker(stage: Stage) -> None:
    modules = [import_module(f"middleware.{found.name}") for found in pkgutil.iter_modules(middleware.__path__)]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Middleware) and value.__module__ == module.__name__
    }
    assert {promise.kind for promise in PROMISES} == classes
    with stage.process() as process:
        assert classes <= {type(m) for m in process.broker.middleware}


# -- what fails must not let anything pass -------------------------------------------------------------------------------


def fails(*_: Any) -> Any:
    raise ConnectionError("Redis is away")


@pytest.mark.parametrize(
    "kind",
    [
        Idempotency(is_keyed=lambda _queue: True, has_grant=fails),
        InFlight(is_live=fails, give_back=fails),
        InFlight(is_live=lambda _message: False, give_back=fails),
        RateLimit(is_stale=fails, give_back=fails),
        RateLimit(is_stale=lambda _message: True, give_back=fails),
    ],
    ids=lambda kind: type(kind).__name__,
)
def test_a_hook_whose_question_fails_refuses_the_message(redis_url: str, kind: Middleware) -> None:
    """Dramatiq swallows any other error of a hook, and runs the message."""
    queues = Queues(redis_url=redis_url, namespace="t")
    broker = MadeiraBroker(
        queues=queues, process="p", silence_s=60, lease_margin_s=0, lanes=lambda _: [], lanes_version=lambda: 0, middleware=[kind]
    )
    message = keyed(1, 1)
    with pytest.raises(SkipMessage):
        broker.emit_before("process_message", message)
    queues.close()


def test_a_grant_for_one_delivery_does_not_let_another_pass(stage: Stage) -> None:
    hold = Gate()
    stage.receiver.answer("/a", Answer(hold=hold))
    with stage.process() as process:
        process.start()
        ref, other = process.routed(), process.routed(queued=False)
        stage.receiver.wait_for(1)
        (token,) = [hand.only().token for hand in process.broker.hands.of(DELIVER)]
        message = keyed(other.delivery_id, other.seq, redis_message_id=token)
        with pytest.raises(SkipMessage):
            process.broker.emit_before("process_message", message)
        process.broker.emit_after("skip_message", message)
        hold.set()
        process.wait_status(ref, "succeeded")
        assert process.delivery(other)["attempt"] == 0


def test_a_grant_that_ran_out_is_not_used_while_redis_is_away(own_redis: OwnRedis, stage: Stage) -> None:
    stage.redis_url = own_redis.url
    with stage.process(threads=1, endpoint={"timeout": 0.3}, lease_margin_s=0.5) as process, busy(process) as go:
        ref = process.routed()
        (hand,) = wait_until(lambda: process.broker.hands.of(DELIVER), what="the grant in memory")
        own_redis.kill()
        wait_until(lambda: not hand.is_live, what="the end of the marker")
        skipped = ran("deliver", "skipped")
        go.set()
        wait_until(lambda: ran("deliver", "skipped") > skipped, what="the refusal")
        assert process.delivery(ref)["attempt"] == 0
        assert stage.receiver.count() == 0
        own_redis.start()
        process.wait_status(ref, "succeeded")
        assert process.outcomes(ref) == ["succeeded"]


def test_an_exception_that_is_no_verdict_costs_no_retry_and_comes_back(stage: Stage) -> None:
    """A fault of the platform: here a rule of the table that no claim can keep, for a while."""
    with stage.process() as process:
        process.start()
        before = time.monotonic()
        ref = process.routed(queued=False)
        process.conn.execute("ALTER TABLE delivery ADD CONSTRAINT in_the_way CHECK (status <> 'delivering')")
        process.queue(ref)
        place = process.wait_place(ref, "delayed")
        assert 0 < place.delay_s <= 5
        assert time.monotonic() - before < 5
        row = process.delivery(ref)
        assert (row["failures"], row["lost"], process.redis.hget("m:deliver:stumbles", delivery_key(ref))) == (0, 0, b"1")
        process.conn.execute("ALTER TABLE delivery DROP CONSTRAINT in_the_way")
