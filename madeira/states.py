"""The state machine of events and deliveries: the only place that names states and the moves between them.

The database holds the same tables as CHECK constraints, and every statement that moves a row names the state it starts
from; ``tests/store`` compares the two.
"""

from enum import StrEnum
from typing import Final


class EventStatus(StrEnum):
    """Where an event is, as a whole."""

    #: Accepted, not routed yet. The route actor moves it on; reconcile queues it again should its message be lost.
    PENDING = "pending"
    #: Routed; at least one delivery is unfinished. The settling of its deliveries moves it on.
    DELIVERING = "delivering"
    #: Every delivery succeeded. Final, except for a forced replay.
    SUCCEEDED = "succeeded"
    #: At least one delivery is dead, or no route matched (reason ``unrouted``). Waits for a person.
    DEAD = "dead"
    #: Cancelled, or some deliveries were and none is dead. Final.
    CANCELLED = "cancelled"


class DeliveryStatus(StrEnum):
    """Where a delivery (one event on its way to one endpoint) is."""

    #: Waits for its turn or its due time. A claim moves it on; after a crash reconcile queues it again.
    PENDING = "pending"
    #: A worker holds the claim. Settle moves it on; when the lease has run out another claim takes it over.
    DELIVERING = "delivering"
    #: The receiver took it. Final, except for a forced replay.
    SUCCEEDED = "succeeded"
    #: Ended without success; waits for a person, who replays or cancels it.
    DEAD = "dead"
    #: Ended by a person or by the upstream. Final.
    CANCELLED = "cancelled"


#: The legal moves of a delivery, as (from, to) -> by whom. ``None`` as "from" is the row's birth.
DELIVERY_MOVES: Final[dict[tuple[DeliveryStatus | None, DeliveryStatus], str]] = {
    (None, DeliveryStatus.PENDING): "route",
    (None, DeliveryStatus.DEAD): "route",
    (DeliveryStatus.PENDING, DeliveryStatus.DELIVERING): "claim",
    (DeliveryStatus.PENDING, DeliveryStatus.CANCELLED): "operator, upstream",
    (DeliveryStatus.DELIVERING, DeliveryStatus.SUCCEEDED): "settle",
    (DeliveryStatus.DELIVERING, DeliveryStatus.DEAD): "settle, claim (lost too often)",
    (DeliveryStatus.DELIVERING, DeliveryStatus.PENDING): "settle (retry)",
    (DeliveryStatus.DELIVERING, DeliveryStatus.CANCELLED): "settle, claim (a cancel was asked for)",
    (DeliveryStatus.DELIVERING, DeliveryStatus.DELIVERING): "claim (takeover)",
    (DeliveryStatus.DEAD, DeliveryStatus.PENDING): "operator (replay)",
    (DeliveryStatus.DEAD, DeliveryStatus.CANCELLED): "operator",
    (DeliveryStatus.SUCCEEDED, DeliveryStatus.PENDING): "operator (forced replay)",
}

#: The legal moves of an event; all but the first three and ``dead`` to ``pending`` follow from its deliveries.
EVENT_MOVES: Final[dict[tuple[EventStatus | None, EventStatus], str]] = {
    (None, EventStatus.PENDING): "intake",
    (EventStatus.PENDING, EventStatus.CANCELLED): "operator, upstream",
    (EventStatus.PENDING, EventStatus.DEAD): "route (unrouted, failed too often)",
    (EventStatus.PENDING, EventStatus.DELIVERING): "route",
    (EventStatus.PENDING, EventStatus.SUCCEEDED): "route, operator (routed again, and there was nothing new to deliver)",
    (EventStatus.DELIVERING, EventStatus.SUCCEEDED): "settle",
    (EventStatus.DELIVERING, EventStatus.DEAD): "settle",
    (EventStatus.DELIVERING, EventStatus.CANCELLED): "settle, operator, upstream",
    (EventStatus.DEAD, EventStatus.DELIVERING): "operator (replay)",
    (EventStatus.DEAD, EventStatus.PENDING): "operator (reroute)",
    (EventStatus.DEAD, EventStatus.CANCELLED): "operator",
    (EventStatus.SUCCEEDED, EventStatus.DELIVERING): "operator (forced replay)",
}

#: States from which nothing moves without a person.
FINISHED: Final = frozenset({DeliveryStatus.SUCCEEDED, DeliveryStatus.DEAD, DeliveryStatus.CANCELLED})

#: Claims in a row without a verdict (the worker was gone each time) after which a delivery is dead as ``platform``.
MAX_LOST: Final = 10

#: Failures of routing one event after which the event is dead as ``platform``.
MAX_ROUTE_FAILURES: Final = 10


class Outcome(StrEnum):
    """The verdict on one attempt, as it stands in ``delivery_log.outcome``."""

    SUCCEEDED = "succeeded"
    #: 5xx, 408, 425, 429, timeouts, connection, TLS and DNS failures: tried again.
    RETRYABLE = "retryable"
    #: Other 4xx and what no retry can mend: dead at once.
    PERMANENT = "permanent"
    #: 3xx, odd status, unparseable body: tried again, to the limit.
    UNKNOWN = "unknown"
    #: A 2xx whose body says that it failed: tried again, to the limit.
    BUSINESS = "business"
    #: A verdict that came after another worker had taken over; changes nothing.
    LATE = "late"
    #: A claim that ended without a verdict: its worker died or froze.
    LOST = "lost"


class ErrorCode(StrEnum):
    """Why an attempt failed; ``http_<status>`` comes besides (see `http_error`)."""

    DNS = "dns"
    CONNECT_REFUSED = "connect_refused"
    CONNECT_TIMEOUT = "connect_timeout"
    UNREACHABLE = "unreachable"
    TLS = "tls"
    PROTOCOL = "protocol"
    RESET = "reset"
    READ_TIMEOUT = "read_timeout"
    DEADLINE = "deadline"
    TOO_LARGE = "too_large"
    DENIED_BY_POLICY = "denied_by_policy"
    BAD_URL = "bad_url"
    BUSINESS = "business"
    UNPARSEABLE = "unparseable"
    TEMPLATE = "template"
    PLATFORM = "platform"


def http_error(status: int) -> str:
    """The error code of an HTTP status, for example ``http_503``; always three digits, as on the wire."""
    return f"http_{status:03d}"


class FailureClass(StrEnum):
    """What kind of cause a delivery's failure has, for grouping and alerts."""

    RECEIVER = "receiver"
    THROTTLED = "throttled"
    NETWORK = "network"
    POLICY = "policy"
    TEMPLATE = "template"
    EXPIRED = "expired"
    PLATFORM = "platform"


class Role(StrEnum):
    """What a person or a program may do, by its token; each role may do all that the ones before it may."""

    #: Reads: events, configuration (without its secrets), audit, reconcile; tries rules out (dry run).
    VIEWER = "viewer"
    #: Besides, acts on events and endpoints: cancel, replay, reroute, a test call.
    OPERATOR = "operator"
    #: Besides, changes the configuration, gives and revokes tokens, erases payloads.
    ADMIN = "admin"

    def suffices(self, need: "Role") -> bool:
        """Whether this role may do what `need` may; as texts the roles do not compare in this order."""
        ranks = tuple(Role)
        return ranks.index(self) >= ranks.index(need)


class JobState(StrEnum):
    """Where a job (one action on many) is. Moves: running ↔ paused; both → cancelled; running → done, failed."""

    #: The workers go on with it, page by page; after a crash from its cursor.
    RUNNING = "running"
    #: A person holds it; what it has begun goes on.
    PAUSED = "paused"
    #: Everything that it was about was done, failed or skipped, and has ended. Final.
    DONE = "done"
    #: A person ended it; what it has begun goes on to its end. Final.
    CANCELLED = "cancelled"
    #: Its pages failed again and again; `error` says why. Final.
    FAILED = "failed"
