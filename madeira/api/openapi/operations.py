"""The table of all that can be asked of the API."""

from typing import Final

from madeira.api.openapi import parts
from madeira.api.openapi.dead_letters import DEAD_LETTERS
from madeira.api.openapi.events import EVENTS
from madeira.api.openapi.jobs import JOBS
from madeira.api.openapi.objects import OBJECTS
from madeira.api.openapi.parts import LOOKED_UP, Operation, in_query, json_body, ref, shared, text

_TOKENS: Final = (
    Operation(
        method="get",
        path="/v1/tokens",
        name="listTokens",
        tag="tokens",
        summary="List the tokens that are not revoked.",
        access=parts.ADMIN,
        answers={200: ("The tokens, without what would let one in.", ref("Tokens"))},
        problems=(422,),
    ),
    Operation(
        method="post",
        path="/v1/tokens",
        name="createToken",
        tag="tokens",
        summary="Make a token; its text is told only in this answer.",
        access=parts.ADMIN,
        body=json_body(ref("NewToken")),
        answers={201: ("Made.", ref("TokenMade"))},
        problems=(409, 415, 422),
        audited=True,
    ),
    Operation(
        method="delete",
        path="/v1/tokens/{name}",
        name="revokeToken",
        tag="tokens",
        summary="Revoke a token; it holds for at most two seconds more.",
        access=parts.ADMIN,
        parameters=(shared("name"), shared("reason")),
        answers={200: ("Revoked.", ref("Token"))},
        problems=(404, 422),
        audited=True,
    ),
)

_DRY_RUN: Final = Operation(
    method="post",
    path="/v1/dry-run",
    name="dryRun",
    tag="dry-run",
    summary="Tell what would become of an event; nothing is stored or sent.",
    access=parts.VIEWER,
    body=json_body(ref("DryRun")),
    answers={200: ("What would become of it.", ref("DryRunReport"))},
    problems=(415, 422),
)

_RECORDS: Final = (
    Operation(
        method="get",
        path="/v1/audit",
        name="readAudit",
        tag="audit",
        summary="Read who did what, when and why; the latest first.",
        access=parts.VIEWER,
        parameters=(
            in_query("who", LOOKED_UP, "By whom, exactly."),
            in_query("action", LOOKED_UP, "What was done."),
            in_query("what", LOOKED_UP, "To what, exactly."),
            shared("since"),
            shared("until"),
            in_query("cursor", text(format="audit-cursor"), "`next_cursor` of the page before."),
            shared("limit"),
        ),
        answers={200: ("A page.", ref("Audit"))},
        problems=(422,),
    ),
    Operation(
        method="get",
        path="/v1/reconcile",
        name="readReconcile",
        tag="audit",
        summary="Show the last comparisons of Postgres with the broker.",
        access=parts.VIEWER,
        answers={200: ("The last runs, the latest first.", ref("Runs"))},
        problems=(422,),
    ),
    Operation(
        method="get",
        path="/v1/log-level",
        name="readLogLevel",
        tag="audit",
        summary="Tell from which level on all processes log, if that was asked for.",
        access=parts.VIEWER,
        answers={200: ("The level, and until when it holds.", ref("LogLevel"))},
        problems=(422,),
    ),
    Operation(
        method="put",
        path="/v1/log-level",
        name="setLogLevel",
        tag="audit",
        summary="Have all processes log from a level on, for a time or until it is changed; null gives each its own again.",
        access=parts.ADMIN,
        body=json_body(ref("NewLogLevel")),
        answers={200: ("Asked for; it counts within two seconds.", ref("LogLevel"))},
        problems=(415, 422),
        audited=True,
    ),
)

_MACHINES: Final = (
    Operation(
        method="get",
        path="/healthz",
        name="isAlive",
        tag="machines",
        summary="Whether the process is alive.",
        access=parts.OPEN,
        answers={200: ("It is.", ref("Health"))},
    ),
    Operation(
        method="get",
        path="/readyz",
        name="isReady",
        tag="machines",
        summary="Whether events can be accepted; without Redis they can (`degraded`).",
        access=parts.OPEN,
        answers={200: ("They can.", ref("Readiness")), 503: ("They cannot.", ref("Readiness"))},
    ),
    Operation(
        method="get",
        path="/metrics",
        name="readMetrics",
        tag="machines",
        summary="Numbers for Prometheus; where `MADEIRA_METRICS_TOKEN` is set, for whoever has it.",
        access=parts.OPEN,
        problems=(401,),
        answers={200: ("The numbers.", {"type": "string"})},
        media_type="text/plain",
    ),
    Operation(
        method="get",
        path="/openapi.json",
        name="describe",
        tag="machines",
        summary="This description.",
        access=parts.OPEN,
        answers={200: ("It.", {"type": "object"})},
    ),
)

OPERATIONS: Final[tuple[Operation, ...]] = (
    *EVENTS,
    *DEAD_LETTERS,
    *JOBS,
    *OBJECTS,
    _DRY_RUN,
    *_TOKENS,
    *_RECORDS,
    *_MACHINES,
)
