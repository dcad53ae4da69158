"""What can be asked about jobs, and done with them."""

from typing import Final

from madeira.api import jobs
from madeira.api.openapi import parts
from madeira.api.openapi.parts import (
    EVENT_ID,
    Operation,
    Schema,
    array,
    flag,
    in_path,
    in_query,
    json_body,
    moment,
    nullable,
    number,
    obj,
    ref,
    shared,
    text,
    whole,
    words,
)
from madeira.reasons import MAX_REASON
from madeira.states import ErrorCode, FailureClass, JobState
from madeira.store import selection
from madeira.store.jobs import KEY_PATTERN, RATES

_ID: Final = in_path("id", {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}, "Its number.")

_SEARCHED: Final = text(minLength=1, maxLength=selection.MAX_TEXT, format="searched-text")

_MADE: Final[Schema] = {"Location": {"description": "Where it is.", "schema": {"type": "string"}}}

_FILTER: Final = obj(
    {
        "source": _SEARCHED,
        "endpoint": _SEARCHED,
        "event_type": text("A type; or the beginning of one and a star.", pattern=selection.TYPE_PATTERN),
        "failure_class": words(*FailureClass),
        "error": text("The code of the last failure.", pattern=f"^(http_[0-9]{{3}}|{'|'.join(ErrorCode)})$"),
        "since": moment("Died (of what is not dead: was made) at this time or later."),
        "until": moment("Died (of what is not dead: was made) before this time."),
        "text": _SEARCHED | {"description": "What stands in the words of the last failure, or in the event's id."},
        "event_ids": array(EVENT_ID) | {"minItems": 1, "maxItems": selection.MAX_EVENT_IDS},
        "delivery_ids": array({"type": "integer", "minimum": 1, "maximum": 10**18 - 1})
        | {"minItems": 1, "maxItems": selection.MAX_DELIVERY_IDS},
    }
)

_JOB: Final = obj(
    id=whole(),
    action=words(*jobs.ACTIONS),
    filter=ref("Selection"),
    among=words(*jobs.AMONG),
    reason=text(),
    who=text("Who made it."),
    key=nullable(text()),
    ordered=flag(),
    rate=nullable(number()),
    state=words(*JobState),
    total=whole("How many it is about, as counted when it was made."),
    done=whole("Delivered, cancelled, or to be routed again."),
    failed=whole("Replayed, and dead again."),
    skipped=whole("Passed over, or taken by somebody else before their turn."),
    skips={
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "description": "Why they were skipped: `no_longer` (somebody else was first), `born_dead` (never had a body or an "
        "address: reroute), `erased`, `not_routed` (waits for its routing), or what became of them.",
    },
    begun=whole("On their way: neither done, failed nor skipped yet."),
    left=whole("What it has not come to yet."),
    missing=array(
        text(
            "Of a replay that has not ended, the endpoints that were removed: what goes there, and with it the job, waits until "
            "one of that name is made, or it is cancelled."
        )
    ),
    error=nullable(text("Why its last page failed.")),
    created_at=moment(),
    updated_at=moment(),
    finished_at=nullable(moment("When what it had begun had ended too.")),
)

SCHEMAS: Final[dict[str, Schema]] = {
    "Selection": _FILTER | {"description": "Those that match all that is given; `{}`: all."},
    "NewJob": obj(
        {
            "among": words(*jobs.AMONG, about="Of a cancel: what has not ended (the default), or what is dead."),
            "ordered": flag(
                "Of a replay only: one at a time per endpoint, in the order of the events; true unless said otherwise."
            ),
            "rate": nullable(number("How many a second, at most; not of a cancel.", minimum=RATES[0], maximum=RATES[1])),
            "key": nullable(text("Makes a request that is sent twice one job.", pattern=KEY_PATTERN)),
            "dry_run": flag("Only count, and show a few."),
        },
        action=words(*jobs.ACTIONS),
        filter=ref("Selection"),
        reason=text("Why; kept in the audit.", minLength=1, maxLength=MAX_REASON, pattern=parts.NOT_EMPTY),
    ),
    "Job": _JOB,
    "SteeredJob": obj(
        **_JOB["properties"],
        already=flag("Whether it was in this state before."),
        since=nullable(moment("Since when it is; null when the audit does not go back so far.")),
        by=nullable(text("Who brought it there.")),
    ),
    "JobPreview": obj(
        dry_run=flag(),
        total=whole(),
        missing=array(
            text("Of a replay, the endpoints that were removed: what goes there waits until one of that name is made.")
        ),
        sample=array(
            obj(
                source=text(),
                event_id=EVENT_ID,
                event_type=text(),
                endpoint=nullable(text("Null: the event has no delivery.")),
                at=moment("When it died; of what is not dead: when it was made."),
                failure_class=nullable(words(*FailureClass)),
                last_error=nullable(text()),
            )
        ),
    ),
    "Jobs": obj(jobs=array(ref("Job")), next_cursor=nullable(text("Where the next page begins; null on the last one."))),
}

_SUMMARIES: Final = {
    "pause": "Pause a job: it begins nothing more; what it has begun goes on.",
    "resume": "Let a paused job go on from where it was.",
    "cancel": "End a job: it begins nothing more, and nothing that it did is undone.",
}


def _steer(steer: str, needs_reason: bool) -> Operation:
    return Operation(
        method="post",
        path=f"/v1/jobs/{{id}}/{steer}",
        name=f"{steer}Job",
        tag="jobs",
        summary=_SUMMARIES[steer],
        text="Twice is the same as once, and told as such. A job that has ended is told as 409.",
        access=parts.OPERATOR,
        parameters=(_ID,),
        body=json_body(ref("Why")) if needs_reason else json_body(ref("LetGo"), required=False),
        answers={200: ("As it is now.", ref("SteeredJob"))},
        problems=(404, 409, 415, 422),
        audited=True,
    )


JOBS: Final = (
    Operation(
        method="post",
        path="/v1/jobs",
        name="startJob",
        tag="jobs",
        summary="Replay, cancel or reroute many at once, or count what that would be about.",
        text="The workers do it, page by page; each delivery is taken by one job, whatever overlaps.",
        access=parts.OPERATOR,
        body=json_body(ref("NewJob")),
        answers={
            201: ("Made; the workers begin.", ref("Job")),
            200: (
                "Of a dry run, what it would be about; of a key that was given before, the job of then.",
                {"anyOf": [ref("JobPreview"), ref("Job")]},
            ),
        },
        headers={201: _MADE},
        problems=(409, 415, 422),
        audited=True,
    ),
    Operation(
        method="get",
        path="/v1/jobs",
        name="listJobs",
        tag="jobs",
        summary="List jobs, the latest first.",
        access=parts.VIEWER,
        parameters=(
            in_query("state", words(*JobState), "In this state."),
            in_query("action", words(*jobs.ACTIONS), "With this action."),
            in_query("cursor", text(pattern="^[0-9]{1,18}$"), "`next_cursor` of the page before."),
            shared("limit"),
        ),
        answers={200: ("A page.", ref("Jobs"))},
        problems=(422,),
    ),
    Operation(
        method="get",
        path="/v1/jobs/{id}",
        name="showJob",
        tag="jobs",
        summary="Show a job and how far it has come.",
        access=parts.VIEWER,
        parameters=(_ID,),
        answers={200: ("It.", ref("Job"))},
        problems=(404, 422),
    ),
    *(_steer(steer, needs_reason) for steer, needs_reason in jobs.STEERS.items()),
)
