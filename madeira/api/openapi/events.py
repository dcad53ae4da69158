"""What can be asked about events, and done with them."""

from typing import Final

from madeira.api.batch import NDJSON
from madeira.api.openapi import parts
from madeira.api.openapi.parts import (
    LOOKED_UP,
    Operation,
    Schema,
    in_path,
    in_query,
    json_body,
    ref,
    shared,
    text,
    words,
)
from madeira.states import EventStatus
from madeira.store.selection import TYPE_PATTERN

_RETRY_AFTER: Final[Schema] = {
    "Retry-After": {"description": "Seconds after which to go on.", "schema": {"type": "integer", "minimum": 1}}
}

EVENTS: Final = (
    Operation(
        method="post",
        path="/v1/events",
        name="postEvent",
        tag="events",
        summary="Post an event.",
        text=(
            "With 202 it is committed, and will end succeeded, dead or cancelled. The same id with the same content is a "
            "duplicate (200), with other content a conflict (409)."
        ),
        access=parts.SOURCE,
        body=json_body(ref("NewEvent")),
        answers={202: ("Accepted.", ref("Receipt")), 200: ("Known already.", ref("Receipt"))},
        problems=(409, 415, 422, 429),
        headers={429: _RETRY_AFTER},
    ),
    Operation(
        method="post",
        path="/v1/events/batch",
        name="postBatch",
        tag="events",
        summary="Post up to 5,000 events, one a line, in their order.",
        text=(
            "One signature over the whole body. A bad line never spoils its neighbours. Should the store go away midway the "
            "answer is 503: send all again, what was committed is told as duplicates."
        ),
        access=parts.SOURCE,
        body=json_body(text("One event as in `NewEvent` on each line.", format="events-ndjson"), media_types=(NDJSON,)),
        answers={200: ("What became of the lines.", ref("BatchReceipt"))},
        problems=(415, 422, 429),
        headers={429: _RETRY_AFTER},
    ),
    Operation(
        method="get",
        path="/v1/events/batch",
        name="showEventNamedBatch",
        tag="events",
        summary="Show the event whose id is `batch`, as any other.",
        access=parts.VIEWER_OR_SOURCE,
        parameters=(shared("source"),),
        answers={200: ("The event.", ref("Event"))},
        problems=(404, 410, 422),
    ),
    Operation(
        method="get",
        path="/v1/events",
        name="listEvents",
        tag="events",
        summary="List events, the newest first; a source sees its own.",
        access=parts.VIEWER_OR_SOURCE,
        parameters=(
            in_query("status", words(*EventStatus), "In this state."),
            in_query("event_type", text(pattern=TYPE_PATTERN), "Of this type; or the beginning of one and a star."),
            in_query("source", LOOKED_UP, "Of this source."),
            in_query("endpoint", LOOKED_UP, "With a delivery to this endpoint."),
            in_query("trace_id", LOOKED_UP, "Of this trace."),
            shared("since"),
            shared("until"),
            in_query("cursor", text(format="events-cursor"), "`next_cursor` of the page before."),
            shared("limit"),
        ),
        answers={200: ("A page.", ref("Events"))},
        problems=(422,),
    ),
    Operation(
        method="get",
        path="/v1/events/{event_id}",
        name="showEvent",
        tag="events",
        summary="Show an event with its deliveries, their attempts, and where waits what is unfinished.",
        access=parts.VIEWER_OR_SOURCE,
        parameters=(shared("event_id"), shared("source")),
        answers={200: ("The event.", ref("Event"))},
        problems=(404, 410, 422),
    ),
    Operation(
        method="post",
        path="/v1/events/{event_id}/cancel",
        name="cancelEvent",
        tag="events",
        summary="End what has not ended of an event, or of its way to one endpoint.",
        access=parts.OPERATOR_OR_SOURCE,
        parameters=(shared("event_id"), shared("source")),
        body=json_body(ref("Cancel"), required=False),
        answers={200: ("Cancelled, as far as it had not ended.", ref("Cancelled"))},
        problems=(404, 409, 410, 415, 422),
        audited=True,
    ),
    Operation(
        method="post",
        path="/v1/events/{event_id}/replay",
        name="replayEvent",
        tag="events",
        summary="Send again what is dead; with `force` also what succeeded.",
        access=parts.OPERATOR,
        parameters=(shared("event_id"), shared("source")),
        body=json_body(ref("Replay")),
        answers={200: ("Queued again.", ref("Replayed"))},
        problems=(404, 409, 410, 415, 422),
        audited=True,
    ),
    Operation(
        method="post",
        path="/v1/events/{event_id}/reroute",
        name="rerouteEvent",
        tag="events",
        summary="Route an event again whose rules were wrong and are mended.",
        access=parts.OPERATOR,
        parameters=(shared("event_id"), shared("source")),
        body=json_body(ref("Why")),
        answers={200: ("To be routed again.", ref("Rerouted"))},
        problems=(404, 409, 410, 415, 422),
        audited=True,
    ),
    Operation(
        method="post",
        path="/v1/events/{event_id}/erase",
        name="eraseEvent",
        tag="events",
        summary="Erase the payload of an event that has ended, and all that was made of it.",
        access=parts.ADMIN,
        parameters=(shared("event_id"), shared("source")),
        body=json_body(ref("Why")),
        answers={200: ("Erased.", ref("Erased"))},
        problems=(404, 409, 410, 415, 422),
        audited=True,
    ),
    Operation(
        method="post",
        path="/v1/endpoints/{name}/cancel",
        name="cancelEndpoint",
        tag="endpoints",
        summary="End all that waits for an endpoint, whether or not that is still configured.",
        text="It works for some seconds; when `complete` is false, ask again.",
        access=parts.OPERATOR,
        parameters=(in_path("name", text(minLength=1, maxLength=255, pattern=parts.PRINTABLE), "Its name."),),
        body=json_body(ref("Why")),
        answers={200: ("Cancelled.", ref("EndpointCancelled"))},
        problems=(404, 415, 422),
        audited=True,
    ),
)
