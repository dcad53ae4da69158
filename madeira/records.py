"""The values that travel between the doors, the actors and the store. Pure data: no input or output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from madeira.states import DeliveryStatus, EventStatus, FailureClass, Outcome


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event as it came through the door, checked, not stored yet."""

    source: str
    event_id: str
    event_type: str
    #: The text of the payload's JSON value exactly as received.
    payload: str
    #: SHA-256 over the raw request body (of the line, in a batch).
    body_sha256: bytes
    trace_id: str
    routing_key: str | None = None
    target_uri: str | None = None
    #: The text of the ``parameters`` object exactly as received.
    parameters: str | None = None
    traceparent: str | None = None
    deliver_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The store's answer to one `NewEvent`: it is committed now (or was already, see `duplicate`)."""

    seq: int
    event_id: str
    source: str
    trace_id: str
    status: EventStatus
    created_at: datetime
    #: Seconds until the event may be routed; 0 when at once.
    delay_s: float = 0.0
    duplicate: bool = False
    #: True when the known event under this id has other content (HTTP 409).
    conflict: bool = False


@dataclass(frozen=True, slots=True)
class RoutableEvent:
    """What routing needs of a pending event."""

    seq: int
    source: str
    event_id: str
    event_type: str
    routing_key: str | None
    target_uri: str | None
    trace_id: str
    created_at: datetime
    #: The texts of the JSON values as received; what filters and templates read.
    payload: str
    parameters: str | None
    traceparent: str | None = None

    @classmethod
    def of(cls, event: NewEvent, at: datetime) -> "RoutableEvent":
        """What an event that is not stored would be if it were accepted at `at`."""
        return cls(
            seq=0,
            source=event.source,
            event_id=event.event_id,
            event_type=event.event_type,
            routing_key=event.routing_key,
            target_uri=event.target_uri,
            trace_id=event.trace_id,
            created_at=at,
            payload=event.payload,
            parameters=event.parameters,
        )


@dataclass(frozen=True, slots=True)
class PlannedDelivery:
    """One target that routing found for an event."""

    endpoint: str
    lane: str
    #: Names of the routes that led here; empty for the built-in ``callback``.
    routes: tuple[str, ...] = ()
    #: Set when the delivery is born dead (a denied address, a failed template).
    failure_class: FailureClass | None = None
    last_error: str | None = None
    #: The code of that error.
    error_code: str | None = None
    #: What a template made of the event; None when the body follows from the event by itself.
    body: str | None = None
    #: Deliveries of one endpoint and key go one after another, in the order of their events; None: in no order.
    ordering_key: str | None = None


@dataclass(frozen=True, slots=True)
class DeliveryRef:
    """The broker's name for a delivery: what is in a key of the queue ``deliver``."""

    delivery_id: int
    seq: int
    lane: str
    #: Seconds until it is due; 0 when now.
    delay_s: float = 0.0
    #: The line of its lane: ``fresh``, ``retry``, ``replay``; empty where the broker knows it better.
    line: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery that this worker holds now, with all that its call needs."""

    delivery_id: int
    seq: int
    endpoint: str
    lane: str
    #: Numbers the claims; never goes back.
    attempt: int
    #: Failures that counted against ``max_attempts`` so far.
    failures: int
    token: str
    #: Seconds since the first attempt of the present budget; 0.0 on the first one.
    budget_age_s: float
    source: str
    event_id: str
    event_type: str
    target_uri: str | None
    payload: str
    parameters: str | None
    trace_id: str
    traceparent: str | None
    created_at: datetime
    #: A body that a template made; None when it follows from the event.
    body: str | None = None
    routing_key: str | None = None
    #: What it was queued for: ``fresh``, ``retry`` or ``replay``.
    line: str = "fresh"
    #: The job that had it sent again, if one did, through the retries that follow.
    job_id: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a claim was not granted, and what to do with the key.

    `reason` is one of ``finished``, ``not_due``, ``leased``, ``cancelled``, ``died`` (lost too often, just now, and to be queued
    as a dead letter), ``missing`` (the row is not visible), ``contended`` (another claim holds the row at this moment),
    ``behind`` (another delivery of its ordering key comes first), ``unrouted`` (an earlier event that may lead to the same
    endpoint is not routed yet).
    """

    reason: str
    #: Seconds to wait before trying again, where that makes sense.
    delay_s: float = 0.0
    #: The delivery of the same ordering key that must be queued now, since it is the first.
    first: DeliveryRef | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one HTTP call (or the failure to make it) came to."""

    outcome: Outcome
    started_at: datetime
    duration_s: float
    url: str
    status_code: int | None = None
    #: One of `states.ErrorCode` or ``http_<status>``; None on success.
    error_code: str | None = None
    #: One line for a person.
    reason: str | None = None
    #: First 4 KiB of the answer's body.
    excerpt: bytes = b""
    #: Bytes of the answer's body that were read.
    length: int = 0
    sha256: bytes | None = None
    #: Seconds that the receiver asked us to wait (``Retry-After``).
    retry_after_s: float | None = None
    #: Of a call that failed: the JSON text that `madeira.delivery.exchange` makes of request and answer.
    exchange: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from an attempt: made by `madeira.retry`, carried out by settle."""

    #: ``SUCCEEDED``, ``DEAD`` or ``PENDING`` (retry).
    status: DeliveryStatus
    #: Seconds until the next attempt; meaningful for ``PENDING``.
    delay_s: float = 0.0
    #: Whether the attempt counts against ``max_attempts``.
    counts: bool = False
    failure_class: FailureClass | None = None
    #: One line for a person: why it ended or why it waits.
    last_error: str | None = None
    #: For ``PENDING``: it keeps its place and counts as no retry, since something else than time must change first.
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """What settle did."""

    #: The delivery's state after the settle; None when the settle came too late and changed nothing.
    status: DeliveryStatus | None
    #: Seconds until due, for ``PENDING``.
    delay_s: float = 0.0
    #: The event's state after the settle.
    event_status: EventStatus | None = None
    #: accepted -> now in seconds, for ``delivery_latency_seconds``.
    latency_s: float = 0.0
    #: Reading of the monotonic clock from which `delay_s` counts.
    read_at: float = field(default=0.0, compare=False)
    #: Another delivery of the same ordering key, which is the first now and must be queued.
    first: DeliveryRef | None = None


#: Attempts after which a delivery is dead, unless its endpoint says otherwise.
DEFAULT_MAX_ATTEMPTS: Final = 12


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed delivery is tried again; times in seconds."""

    initial: float = 60.0
    factor: float = 2.0
    max: float = 1800.0
    #: Random addition, as a share of the (capped) delay.
    jitter: float = 0.2
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    #: Total time since the first attempt of the present budget after which a failure is final.
    max_age: float = 86400.0
    #: An explicit list of delays, instead of initial/factor/max; the last one repeats.
    delays: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """An upstream system that may post events."""

    name: str
    #: Signing secrets; any one of them verifies (rotation).
    secrets: tuple[str, ...] = field(repr=False)
    #: Events per second that are accepted, over all API processes; None: not limited.
    rate: float | None = None
    #: Events that may come at once.
    burst: int = 1


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """What is shown to a receiver that asks who is calling; texts in PEM."""

    chain: str = field(repr=False)
    key: str = field(repr=False)


#: Values of an endpoint's ``ordering`` that are no expressions: in no order; all one after another.
NO_ORDER: Final = "none"
WHOLE_ENDPOINT: Final = "endpoint"


@dataclass(frozen=True, slots=True)
class Breaker:
    """Whether, and for how long, a receiver that fails is left alone; times in seconds."""

    enabled: bool = True
    #: The first time.
    hold: float = 30.0
    #: The longest that it becomes: it doubles each time that the receiver fails again.
    max: float = 600.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A downstream target."""

    name: str
    #: A URL template (RFC 6570), or ``{+target_uri}`` for the callback address that came with the event.
    url: str
    method: str = "POST"
    #: Values are templates (Jinja2) where they hold ``{{``.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Deliveries per second; None: not limited.
    rate: float | None = None
    burst: int = 1
    concurrency: int = 10
    #: Seconds for a whole attempt.
    timeout: float = 10.0
    secrets: tuple[str, ...] = field(default=(), repr=False)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    #: Whether an empty 2xx is a success (it is, unless a body is required).
    require_body: bool = False
    #: A template (Jinja2) whose result is the JSON of the body; None: the standard body.
    body: str | None = field(default=None, repr=False)
    #: A CEL expression over ``status``, ``headers`` and ``body`` that says whether the answer is a success; None: the
    #: standard rule.
    success: str | None = None
    #: ``none``, ``endpoint``, or a CEL expression over the event that yields a key: deliveries of one key go one after another.
    ordering: str = NO_ORDER
    client_certificate: ClientCertificate | None = None
    breaker: Breaker = field(default_factory=Breaker)
    #: Whether somebody holds it; no part of its configuration.
    hold: Literal["", "paused", "disabled"] = ""
    #: Names the moments at which it was made, and at which it was last held or let go; no part of its configuration either.
    since: str = field(default="", compare=False)

    @property
    def is_callback(self) -> bool:
        """Whether the URL is the callback address of the event."""
        return self.url == CALLBACK_URL

    @property
    def has_fixed_url(self) -> bool:
        """Whether every event goes to the same URL; otherwise an answer may speak of the address of one event only."""
        return "{" not in self.url


#: The URL of an endpoint that calls the address that came with the event (RFC 6570 reserved expansion).
CALLBACK_URL: Final = "{+target_uri}"


#: Name of the built-in source, in whose events Madeira tells of itself. Nobody can post as it.
OWN_SOURCE: Final = "madeira"


@dataclass(frozen=True, slots=True)
class Route:
    """A rule: which events go to which endpoint."""

    name: str
    endpoint: str
    source: str | None = None
    #: A glob over the dotted event type.
    event_type: str = "*"
    #: Exact, when given.
    routing_key: str | None = None
    #: A CEL expression over the event; None: every event that the other fields let pass.
    filter: str | None = None
