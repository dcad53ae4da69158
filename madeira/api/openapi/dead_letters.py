"""What can be asked about dead letters, and how the answers look."""

from typing import Final

from madeira.api.openapi import parts
from madeira.api.openapi.parts import (
    EVENT_ID,
    PRINTABLE,
    Operation,
    Schema,
    array,
    flag,
    in_path,
    in_query,
    moment,
    nullable,
    obj,
    ref,
    shared,
    text,
    whole,
    words,
)
from madeira.states import ErrorCode, FailureClass
from madeira.store.selection import MAX_TEXT, TYPE_PATTERN

_TEXT: Final = text(minLength=1, maxLength=MAX_TEXT, pattern=PRINTABLE)

_ERROR: Final = text(pattern=f"^({'|'.join(ErrorCode)}|http_[0-9]{{3}})$")

_FILTERS: Final = (
    in_query("source", _TEXT, "Of events of this source."),
    in_query("endpoint", _TEXT, "On their way to this endpoint."),
    in_query("event_type", text(pattern=TYPE_PATTERN), "Of this type; or the beginning of one and a star."),
    in_query("failure_class", words(*FailureClass), "Of this class."),
    in_query("error", _ERROR, "Whose last failure has this code."),
    in_query("since", moment(), "That died not before this time."),
    in_query("until", moment(), "That died before this time."),
    in_query("text", _TEXT, "With this in the words of the last failure or in the event's id, whatever the case of its letters."),
)

_ITEM: Final[dict[str, Schema]] = {
    "id": whole("Of the delivery."),
    "event_id": EVENT_ID,
    "source": text(),
    "event_type": text(),
    "endpoint": text(),
    "routes": array(text()),
    "failure_class": words(*FailureClass),
    "error_code": nullable(text("Of the last failure.")),
    "last_error": nullable(text("The last failure, in words.")),
    "attempt": whole("Number of the last attempt; 0 when none was made."),
    "first_failed_at": moment("Of all attempts, those before a replay too."),
    "last_failed_at": moment(),
    "died_at": moment(),
    "accepted_at": moment("When the event was."),
    "trace_id": text(),
    "erased_at": nullable(moment("When the event's payload was erased: it cannot be sent again.")),
}

SCHEMAS: Final[dict[str, Schema]] = {
    "DeadLetterInShort": obj(**_ITEM),
    "DeadLetter": obj(**_ITEM, attempts=array(ref("Attempt"))),
    "DeadLetters": obj(
        dead_letters=array(ref("DeadLetterInShort")),
        next_cursor=nullable(text("Where the next page begins; null on the last one.")),
        complete=flag("False when it has looked at as many as a page may; the rest is behind the cursor."),
    ),
    "DeadLetterGroups": obj(
        groups=array(
            obj(
                endpoint=text(),
                error_code=nullable(text("Of the last failure.")),
                count=whole(),
                first_died_at=moment(),
                last_died_at=moment(),
                example=whole("The id of one of them."),
                failure_class=nullable(words(*FailureClass)),
                last_error=nullable(text("What that one says.")),
            )
        ),
        counted=whole("Dead letters in all groups, those not shown too."),
        complete=flag("False when there are more than are counted: then these are of the latest."),
    ),
}

DEAD_LETTERS: Final = (
    Operation(
        method="get",
        path="/v1/dead-letters",
        name="listDeadLetters",
        tag="dead letters",
        summary="List the deliveries that were given up, the latest first.",
        access=parts.VIEWER,
        parameters=(
            *_FILTERS,
            in_query("cursor", text(format="audit-cursor"), "`next_cursor` of the page before."),
            shared("limit"),
        ),
        answers={200: ("A page.", ref("DeadLetters"))},
        problems=(422,),
    ),
    Operation(
        method="get",
        path="/v1/dead-letters/groups",
        name="groupDeadLetters",
        tag="dead letters",
        summary="Count the deliveries that were given up by endpoint and error, the largest group first.",
        access=parts.VIEWER,
        parameters=(*_FILTERS, shared("limit")),
        answers={200: ("The groups.", ref("DeadLetterGroups"))},
        problems=(422,),
    ),
    Operation(
        method="get",
        path="/v1/dead-letters/{delivery_id}",
        name="showDeadLetter",
        tag="dead letters",
        summary="Show a delivery that was given up, with all attempts, what was sent and what came back.",
        access=parts.VIEWER,
        parameters=(in_path("delivery_id", whole(maximum=10**18 - 1), "The id of the delivery."),),
        answers={200: ("It.", ref("DeadLetter"))},
        problems=(404, 422),
    ),
)
