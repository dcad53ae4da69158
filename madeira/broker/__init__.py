"""The broker: Dramatiq's Redis broker with queues of our own underneath, and the middleware in its order."""

import os
import socket
from collections.abc import Sequence
from functools import partial
from uuid import uuid4

from dramatiq.broker import MessageProxy
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import AgeLimit, Callbacks, CurrentMessage, Middleware, Pipelines, ShutdownNotifications, TimeLimit
from periodiq import PeriodiqMiddleware

from madeira import log, metrics
from madeira.broker import exposition
from madeira.broker.broker import MadeiraBroker, keys_of
from madeira.broker.connections import connect
from madeira.broker.hands import START_WITHIN_S, Hand
from madeira.broker.pulse import Due, Pulse
from madeira.broker.queues import DELIVER, KEYED, Queues
from madeira.broker.rebuild import Stopper, rebuild
from madeira.broker.ticking import TickingBroker
from madeira.broker.tools import POOL, REDIS_CONNECTIONS, Tools, group_commits
from madeira.delivery.client import Caller
from madeira.egress import Egress
from madeira.errors import BrokerUnavailable
from madeira.lanes import LaneSettings, settings_of
from madeira.lanes.pace import endpoint_of
from madeira.routing.config import Rules
from madeira.routing.follow import RulesFollower
from madeira.sealing import Sealer
from madeira.settings import Settings, require
from madeira.store.database import Database
from middleware.idempotency import Idempotency
from middleware.in_flight import InFlight
from middleware.lifespan import Lifespan
from middleware.measure import Measure
from middleware.rate_limit import RateLimit
from middleware.retries import TunedRetries
from middleware.tracing import Tracing

#: Seconds that one call to Redis may take.
TIMEOUT_S = 3.0


def build(settings: Settings, *, of_scheduler: bool = False) -> MadeiraBroker:
    """The broker of this process, with its tools and its middleware; opens no connection and starts no thread.

    That `of_scheduler` only ticks.

    Raises:
        SettingsError: a setting that workers need is missing.
    """
    require(settings, "database_url", "redis_url")

    def changed(rules: Rules) -> None:
        metrics.expect_endpoints(rules.endpoints)
        broker.nudge(DELIVER)

    database = Database(url=settings.database_url, application="madeira-worker", pool_max=POOL)
    rules = RulesFollower(database=database, sealer=Sealer(settings.secret_key), on_change=changed)
    queues = Queues(
        redis_url=settings.redis_url, namespace=settings.namespace, timeout_s=TIMEOUT_S, connections=REDIS_CONNECTIONS - 1
    )
    broker = (TickingBroker if of_scheduler else MadeiraBroker)(
        queues=queues,
        process=f"{socket.gethostname()}.{os.getpid()}.{uuid4().hex[:8]}",
        silence_s=settings.silence_s,
        lease_margin_s=settings.lease_margin_s,
        lanes=lambda lanes: _lanes(rules.current, lanes, settings.lease_margin_s),
        lanes_version=lambda: rules.version,
        unusable=lambda lane: _unusable(rules.current, lane),
        # Without rules there is nothing to route or deliver by.
        trouble=lambda: rules.missing or database.trouble(),
        middleware=[],
    )
    tools = _tools(settings, broker, database, rules)
    broker.tools = tools
    for middleware in _middleware(broker, tools):
        broker.add_middleware(middleware)
    return broker


def _lanes(rules: Rules | None, lanes: Sequence[str], lease_margin_s: float) -> list[LaneSettings]:
    """The settings of `lanes`; those whose endpoint is not there, or cannot be called, are left out and hand out nothing."""
    if rules is None:
        return []
    names = {endpoint_of(lane) for lane in lanes}
    endpoints = {name: endpoint for name in names if (endpoint := rules.endpoint(name)) is not None}
    return settings_of(lanes, endpoints=endpoints, version=rules.version, lease_margin_s=lease_margin_s)


def _unusable(rules: Rules | None, lane: str) -> str | None:
    """Why the endpoint of `lane`, which is there, cannot be called from this process."""
    return rules.unusable.get(f"endpoint/{endpoint_of(lane)}") if rules else None


def _tools(settings: Settings, broker: MadeiraBroker, database: Database, rules: RulesFollower) -> Tools:
    claims, settles = group_commits(database)
    egress = Egress(allow=settings.egress_allow, deny=settings.egress_deny)
    stopped = Stopper()
    due = Due(settings.reconcile_s if settings.reconcile_s < 60 else settings.reconcile_s * 1.5)

    def ask_for_reconcile() -> None:
        if due() and "reconcile" in broker.actors:
            try:
                broker.get_actor("reconcile").send()
            except ConnectionClosed as e:
                raise BrokerUnavailable(str(e)) from None

    def after_beat() -> None:
        metrics.tell_pools(database.stats(), broker.wire.connections())
        ask_for_reconcile()

    def start_rebuild() -> None:
        rebuild(queues=broker.wire, database=database, holder=broker.process, beat_s=settings.beat_s, stopped=stopped)

    pulse = Pulse(
        broker=broker,
        waiting=connect(settings.redis_url, timeout_s=TIMEOUT_S + 2, connections=1, connect_timeout_s=TIMEOUT_S),
        beat_s=settings.beat_s,
        after_beat=after_beat,
        rebuild=start_rebuild,
    )
    broker.on_lost_epoch = pulse.start_rebuild
    return Tools(
        settings=settings,
        broker=broker,
        database=database,
        rules=rules,
        pulse=pulse,
        caller=Caller(max_connections=4 * settings.threads, egress=egress),
        egress=egress,
        claims=claims,
        settles=settles,
        stopped=stopped,
    )


def _middleware(broker: MadeiraBroker, tools: Tools) -> list[Middleware]:
    def hand(message: MessageProxy) -> Hand | None:
        return broker.hands.get(message.options.get("redis_message_id"))

    def is_keyed(queue: str) -> bool:
        return queue in KEYED

    def has_grant(message: MessageProxy) -> bool:
        held = hand(message)
        return held is not None and held.queue == message.queue_name and set(keys_of(message)) <= set(held.keys)

    def give_back(message: MessageProxy) -> None:
        held = hand(message)
        if held is not None:
            held.give_back()

    def is_live(message: MessageProxy) -> bool:
        held = hand(message)
        return held is None or not held.keyed or held.is_live

    def is_stale(message: MessageProxy) -> bool:
        held = hand(message)
        return held is not None and held.queue == DELIVER and broker.alive > 1 and held.waited_s > START_WITHIN_S

    return [
        # Opens first and closes last, since everything else uses what it opens.
        Lifespan(start=tools.open, stop_fetching=broker.stop_fetching, stop=tools.close, beside=[exposition.serve]),
        # Before whatever may log about a message.
        Tracing(bind=log.bind),
        # Before whatever may refuse a message, so that refusals are counted.
        Measure(observe=partial(_observe, broker), ticked=_ticked),
        # Three questions in this order: is it ours, is it still ours, is it still its turn? None of them asks Redis: what
        # it granted is in hand.
        Idempotency(is_keyed=is_keyed, has_grant=has_grant),
        InFlight(is_live=is_live, give_back=give_back),
        RateLimit(is_stale=is_stale, give_back=give_back),
        # Dramatiq's own, for ordinary messages. Deliveries have a deadline of their own and no time limit.
        AgeLimit(),
        TimeLimit(),
        ShutdownNotifications(),
        Callbacks(),
        Pipelines(),
        # What it notes about a message must be noted before the acknowledgement.
        TunedRetries(is_keyed=is_keyed, max_retries=20, min_backoff=5_000, max_backoff=600_000),
        # A tick that waited in a full queue is still wanted; the lease row keeps two from doing the same.
        PeriodiqMiddleware(skip_delay=3600),
        # Last, so that the actor finds its message.
        CurrentMessage(),
    ]


def _observe(broker: MadeiraBroker, name: str, outcome: str, seconds: float) -> None:
    # A message of somebody else's may name whatever it likes.
    actor = name if name in broker.actors else metrics.UNKNOWN
    metrics.ACTOR_MESSAGES.labels(actor, outcome).inc()
    metrics.ACTOR_DURATION.labels(actor).observe(seconds)


def _ticked(actor: str) -> None:
    metrics.SCHEDULER_TICKS.labels(actor).inc()


__all__ = ["MadeiraBroker", "build"]
