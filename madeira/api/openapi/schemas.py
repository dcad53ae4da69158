"""How the bodies of requests and answers look, by name."""

from typing import Final

from madeira.api import problems, validation
from madeira.api.admin.tokens import MAX_EXPIRES
from madeira.api.openapi.parts import (
    EVENT_ID,
    NAME,
    NOT_EMPTY,
    PRINTABLE,
    REASON,
    Schema,
    array,
    flag,
    moment,
    nullable,
    number,
    obj,
    ref,
    text,
    whole,
    words,
)
from madeira.lanes.state import STATES
from madeira.reasons import MAX_REASON
from madeira.settings import LOG_LEVELS
from madeira.states import DeliveryStatus, EventStatus, FailureClass, Outcome, Role
from madeira.store.configuration import LOG_LEVEL_MAX_S

_EVENT_STATUS: Final = words(*EventStatus)

_EVENT_TYPE: Final = text(
    "A dotted name, such as `payment.captured`.",
    pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$",
    maxLength=validation.MAX_EVENT_TYPE,
)

_TRACE_ID: Final = text(pattern=r"^[A-Za-z0-9._-]{1,64}$")

_WAITS: Final = obj(
    {
        "seconds": number("Until it is due, until its lane's next chance, or until the call's lease ends."),
        "ahead": whole("How many go before it."),
        "for": words(
            "disabled", "paused", "breaker", "retry_after", "rate", "cap", about="What keeps it from being called, if anything."
        ),
        "until": moment("When that ends at the soonest; absent where a person has to end it."),
        "behind": obj({}, source=text(), event_id=EVENT_ID),
    },
    where=words(
        "held",
        "waiting",
        "delayed",
        "ordering",
        "nowhere",
        "unknown",
        about="`ordering`: behind the delivery of another event, or an earlier event that is not routed yet.",
    ),
)

_NEW_EVENT: Final = obj(
    {
        "event_id": text(
            "Made by Madeira (UUIDv7) when absent; such a post cannot be repeated safely.",
            pattern=r"^(?!\.{1,2}$)[A-Za-z0-9._:-]{1,128}$",
        ),
        "target_uri": text(
            "A callback address: an absolute http(s) URL.", maxLength=validation.MAX_TARGET_URI, format="http-url"
        ),
        "parameters": {"type": "object", "description": "Values for URL templates, filters and bodies."},
        "routing_key": text(minLength=1, maxLength=validation.MAX_ROUTING_KEY, pattern=PRINTABLE),
        "deliver_at": moment("Not routed before; at most 30 days ahead."),
        "trace_id": _TRACE_ID,
        "source": text("Only if equal to the header `X-Madeira-Source`."),
    },
    event_type=_EVENT_TYPE,
    payload={"description": "Any JSON value; its very text is stored and passed on."},
)

_ATTEMPT: Final = obj(
    delivery_id=whole(),
    attempt=whole("Numbers the claims."),
    started_at=moment(),
    duration_s=nullable(number()),
    url=nullable(text()),
    status_code=nullable(whole()),
    outcome=words(*Outcome),
    error_code=nullable(text()),
    reason=nullable(text()),
    settled_as=nullable(words(*DeliveryStatus)),
    excerpt=nullable(text("The first 4 KiB of the answer.")),
    length=nullable(whole("Bytes of the answer.")),
    sha256=nullable(text()),
    worker=nullable(text()),
    exchange=nullable(ref("Exchange")),
    recorded_at=moment(),
)

_HEADERS: Final[Schema] = {
    "type": "array",
    "items": {"type": "array", "items": text(), "minItems": 2, "maxItems": 2},
    "description": "Name and value of each, in their order. Credentials and signatures are `***`.",
}

_DELIVERY: Final = obj(
    {"waits": ref("Waits")},
    event_seq=whole(),
    id=whole(),
    endpoint=text(),
    lane=text(),
    routes=array(text()),
    line=words("fresh", "retry", "replay"),
    job_id=nullable(whole("The job that acted on it last.")),
    ordering_key=nullable(text("Deliveries of one endpoint and key go one after another.")),
    status=words(*DeliveryStatus),
    attempt=whole(),
    failures=whole("What counts against `max_attempts`."),
    lost=whole("Claims in a row without a verdict."),
    retries=whole(),
    claimed_at=nullable(moment()),
    lease_until=nullable(moment()),
    budget_from=nullable(moment()),
    next_attempt_at=moment(),
    cancel_requested_at=nullable(moment()),
    finished_at=nullable(moment()),
    died_at=nullable(moment()),
    notified_at=nullable(moment()),
    failure_class=nullable(words(*FailureClass)),
    last_error=nullable(text()),
    last_error_code=nullable(text("The code of the last failure.")),
    created_at=moment(),
    updated_at=moment(),
    attempts=array(ref("Attempt")),
)

_EVENT_HEAD: Final = {
    "seq": whole("Its place in the order of acceptance."),
    "event_id": EVENT_ID,
    "event_type": text(),
    "source": text(),
    "target_uri": nullable(text()),
    "routing_key": nullable(text()),
    "created_at": moment(),
    "updated_at": moment(),
    "trace_id": text(),
    "retry_count": whole(),
    "status": _EVENT_STATUS,
    "reason": nullable(text("Why it ended, where no delivery explains it.")),
    "deliver_at": nullable(moment()),
    "routed_at": nullable(moment()),
    "erased_at": nullable(moment("When the payload was taken away.")),
    "erased_by": nullable(words("person", "retention")),
    "delivery_count": whole(),
    "unfinished": whole(),
    "dead": whole(),
    "cancelled": whole(),
}

_EVENT: Final = obj(
    {"waits": ref("Waits")},
    **_EVENT_HEAD,
    payload={"description": "The JSON value as it was received."},
    parameters={"type": ["object", "null"]},
    route_failures=whole(),
    traceparent=nullable(text()),
    deliveries=array(ref("Delivery")),
)

_OF_EVENT: Final = {"event_id": EVENT_ID, "source": text(), "status": _EVENT_STATUS}

_ENDPOINT_NAME: Final = text("Only on its way to this endpoint.", minLength=1, maxLength=255, pattern=PRINTABLE)

_MUST_SAY: Final = text("Why; kept in the audit.", minLength=1, maxLength=MAX_REASON, pattern=NOT_EMPTY)

_TOKEN: Final = {
    "name": NAME,
    "handle": text("The public part of the token."),
    "role": words(*Role),
    "created_by": text(),
    "created_at": moment(),
    "expires_at": nullable(moment()),
    "last_used_at": nullable(moment("Exact to a minute.")),
    "revoked_at": nullable(moment()),
    "expired": flag(),
}

_PROBLEM: Final[Schema] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": [problems.TYPE_PREFIX + name for name in problems.TYPES]},
        "title": text(),
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": text("What is wrong and what to do about it, for a person."),
        "errors": array(obj(field=text(), detail=text())),
    },
    "required": ["type", "title", "status", "detail"],
    "description": "RFC 9457. Members of its own that a type has are told in the guide.",
}

SCHEMAS: Final[dict[str, Schema]] = {
    "Problem": _PROBLEM,
    "Waits": _WAITS,
    "NewEvent": _NEW_EVENT,
    "Receipt": obj(
        event_id=EVENT_ID,
        source=text(),
        trace_id=text(),
        status=_EVENT_STATUS,
        duplicate=flag("Whether it was accepted before, with the same content."),
        created_at=moment(),
    ),
    "Event": _EVENT,
    "Delivery": _DELIVERY,
    "Attempt": _ATTEMPT,
    "Exchange": obj(
        request=obj(
            method=text(),
            headers=_HEADERS,
            body_length=whole("Bytes of the body, which is the same on every attempt."),
            body_sha256=text(),
        ),
        answer=nullable(obj(headers=_HEADERS, complete=flag("False when there were more than are kept."))),
    ),
    "BatchReceipt": obj(
        accepted=whole(),
        duplicates=whole(),
        rejected=array(
            obj(
                {"event_id": EVENT_ID},
                line=whole("From 1, empty lines counted."),
                type=words(*problems.TYPES),
                detail=text(),
            )
        ),
    ),
    "Events": obj(
        events=array(ref("EventInShort")),
        next_cursor=nullable(text("Where the next page begins; null on the last one.")),
        complete=flag("False when it has looked at as many events as a page may; the rest is behind the cursor."),
    ),
    "EventInShort": obj(**_EVENT_HEAD, deliveries=array(ref("DeliveryInShort"))),
    "DeliveryInShort": obj(
        id=whole(),
        endpoint=text(),
        status=words(*DeliveryStatus),
        attempt=whole(),
        failure_class=nullable(words(*FailureClass)),
    ),
    "Cancel": obj({"reason": REASON, "endpoint": _ENDPOINT_NAME}),
    "Why": obj(reason=_MUST_SAY),
    "Replay": obj(
        {"endpoint": _ENDPOINT_NAME, "force": flag("Also send again what succeeded; the receiver gets it twice.")},
        reason=_MUST_SAY,
    ),
    "Replayed": obj(
        **_OF_EVENT,
        replayed=whole("Deliveries that are queued again."),
        endpoints=array(text()),
        missing=array(text("Endpoints that were removed: what goes there waits until one of that name is made.")),
    ),
    "Rerouted": obj(**_OF_EVENT, removed=array(text("Endpoints whose deliveries, never attempted, were taken back."))),
    "Erased": obj(**_OF_EVENT, erased_at=moment()),
    "EndpointCancelled": obj(
        endpoint=text(),
        cancelled=whole(),
        requested=whole("Deliveries that are being called at this moment: they end with this attempt."),
        complete=flag(),
    ),
    "Hold": obj(reason=_MUST_SAY),
    "LetGo": obj({"reason": nullable(REASON)}),
    "Held": obj(
        endpoint=text(),
        already=flag("Whether it was in this state before; only the reason, then, can be another."),
        state=words("active", "paused", "disabled"),
        reason=nullable(text("Why it is held.")),
        since=nullable(moment("Since when it is in this state.")),
        by=nullable(text("Who said so last.")),
    ),
    "Lane": obj(
        state=words(*STATES, about="What keeps it from being served, if anything; of several lanes that of the worst."),
        reason=nullable(text("Why.")),
        until_s=nullable(number("Seconds until that may end: until a call may try, or until the one that tries is given up.")),
        allowed=nullable(whole("Calls at a time that a breaker allows while it closes step by step.")),
        under_way=whole("Calls under way."),
        waiting=obj(
            fresh=whole("First attempts."), retry=whole("Attempts after a failure."), replay=whole("What a person sent again.")
        ),
    ),
    "Cancelled": obj(
        **_OF_EVENT,
        cancelled=whole("Deliveries that ended by it."),
        requested=whole("Deliveries that are being called at this moment: they end with this attempt."),
    ),
    "TestCall": obj(
        {
            "event_type": _EVENT_TYPE,
            "payload": {"description": "Any JSON value."},
            **{name: _NEW_EVENT["properties"][name] for name in ("parameters", "target_uri", "routing_key")},
            "reason": nullable(REASON),
        }
    ),
    "TestAnswer": obj(
        endpoint=text(),
        request=nullable(ref("OutboundRequest")),
        answer=nullable(
            obj(status=whole("Of HTTP."), excerpt=text("The first 4 KiB."), length=whole("Bytes of its body that were read."))
        ),
        verdict=ref("Verdict"),
        duration_s=number(),
    ),
    "OutboundRequest": obj(
        method=text(),
        url=text(),
        headers=_HEADERS,
        body=text(),
    ),
    "DryRun": obj(
        {
            **{
                name: value for name, value in _NEW_EVENT["properties"].items() if name not in ("source", "event_type", "payload")
            },
            "response": obj(
                {
                    "headers": {"type": "object", "additionalProperties": text()},
                    "body": text("As it comes over the wire."),
                },
                status={"type": "integer", "minimum": 100, "maximum": 999},
            ),
        },
        source=NAME,
        event_type=_EVENT_TYPE,
        payload=_NEW_EVENT["properties"]["payload"],
    ),
    "DryRunReport": obj(
        status=words("unrouted", "dead", "delivering", about="What the event would be after its routing."),
        routes=array(
            obj(
                name=text(),
                endpoint=text(),
                matches=flag(),
                failed=flag("Whether its filter failed: the delivery would be dead."),
                reason=nullable(text("Why it does not match.")),
            )
        ),
        deliveries=array(
            obj(
                endpoint=text(),
                lane=text(),
                ordering_key=nullable(text()),
                routes=array(text()),
                request=nullable(ref("OutboundRequest")),
                error=nullable(text("Why there is no request.")),
                failure_class=nullable(words(*FailureClass)),
                note=nullable(text()),
                verdict=nullable(
                    obj(
                        outcome=words(*Outcome),
                        error_code=nullable(text()),
                        reason=nullable(text()),
                        status=words(*DeliveryStatus),
                        retry_in_s=nullable(number("Without the random addition.")),
                        counts=flag("Whether it counts against `max_attempts`."),
                        failure_class=nullable(words(*FailureClass)),
                    )
                ),
            )
        ),
    ),
    "Verdict": obj(outcome=words(*Outcome), error_code=nullable(text()), reason=nullable(text())),
    "LogLevel": obj(level=nullable(words(*LOG_LEVELS)), until=nullable(moment())),
    "NewLogLevel": obj(
        {"for_s": nullable(whole("Seconds that it holds; until it is changed when absent.", minimum=1, maximum=LOG_LEVEL_MAX_S))},
        level=nullable(words(*LOG_LEVELS)),
        reason=_MUST_SAY,
    ),
    "Runs": obj(
        runs=array(
            obj(
                finished_at=moment(),
                age_s=number(),
                duration_s=number(),
                holder=text(),
                counts={"type": "object", "additionalProperties": {"type": "integer"}},
                slice_from=whole(),
            )
        )
    ),
    "NewToken": obj(
        {
            "expires_in": nullable(
                number("Seconds that it holds; until it is revoked when absent.", minimum=1, maximum=MAX_EXPIRES.total_seconds())
            ),
            "reason": nullable(REASON),
        },
        name=NAME,
        role=words(*Role),
    ),
    "Token": obj(**_TOKEN),
    "TokenMade": obj(token=text("The token. It is not told again.", pattern="^mdr_"), **_TOKEN),
    "Tokens": obj(tokens=array(ref("Token"))),
    "Audit": obj(
        entries=array(
            obj(
                id=whole(),
                at=moment(),
                who=text(),
                action=text(),
                what=text(),
                why=nullable(text()),
                detail={"type": "object", "description": "What it was before and after, how many, by which filter."},
            )
        ),
        next_cursor=nullable(text("Where the next page begins; null on the last one.")),
    ),
    "Health": obj(status=words("ok")),
    "Readiness": obj(status=words("ok", "degraded", "unavailable"), postgres=text(), redis=text()),
}
