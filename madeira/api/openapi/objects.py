"""What can be asked about sources, endpoints and routes; their fields come from the table that the file is checked by."""

from typing import Any, Final

from madeira.api.admin.bodies import MERGE_PATCH
from madeira.api.admin.lanes import ACTIONS
from madeira.api.openapi import parts
from madeira.api.openapi.parts import (
    JSON,
    PRINTABLE,
    Operation,
    Schema,
    array,
    flag,
    in_query,
    json_body,
    moment,
    nullable,
    obj,
    ref,
    shared,
    text,
    whole,
    words,
)
from madeira.routing.fields import KINDS, Kind, schema

_ETAG: Final[Schema] = {"ETag": {"description": "Its version, for `If-Match`.", "schema": {"type": "string"}}}

_MADE: Final[Schema] = _ETAG | {"Location": {"description": "Where it is.", "schema": {"type": "string"}}}

_KEPT: Final = {"version": whole("Rises with each change."), "created_at": moment(), "updated_at": moment()}

_UNFINISHED: Final = nullable(whole("Deliveries that have not ended; null when there are too many of all endpoints to count."))


#: What the texts of some fields are, where that is more than a pattern can say; by field, in whatever table it stands.
_FORMATS: Final = {
    "url": "url-template",
    "body": "json-template",
    "success": "cel-of-answer",
    "filter": "cel-of-event",
    "event_type": "event-type-pattern",
    "ordering": "cel-of-order",
    "chain": "pem-certificates",
    "key": "pem-key",
}

_HEADERS: Final = {
    "propertyNames": {"pattern": r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$"},
    "additionalProperties": text(minLength=1, maxLength=8192, pattern=r"^[\t\u0020-\u007e\u00a0-\u00ff]*$"),
}


#: A secret that something is signed with.
_SECRET: Final = {"pattern": r"^[^\u0000]*$", "description": "A literal that is not kept yet has at least 8 characters."}


def _written(kind: Kind) -> Schema:
    """An object as a client writes it."""
    found = _with_formats(schema(kind))
    properties = found["properties"]
    if "headers" in properties:
        properties["headers"] |= _HEADERS
    if "routing_key" in properties:
        properties["routing_key"] |= {"pattern": PRINTABLE}
    if "secrets" in properties:
        properties["secrets"] |= {"items": properties["secrets"]["items"] | _SECRET}
    return found


def _with_formats(written: Schema) -> Schema:
    properties = {}
    for name, value in written["properties"].items():
        found = _with_formats(value) if "properties" in value else dict(value)
        properties[name] = found | ({"format": _FORMATS[name]} if name in _FORMATS else {})
    return {**written, "properties": properties}


_OF_ENDPOINT: Final[dict[str, Schema]] = {
    "unfinished": _UNFINISHED,
    "state": words("active", "paused", "disabled", about="Whether somebody holds it."),
    "reason": nullable(text("Why it is held.")),
    "since": nullable(moment("Since when it is in this state.")),
    "by": nullable(text("Who said so last.")),
    "lane": nullable(ref("Lane")),
}


def _schemas() -> dict[str, Schema]:
    found: dict[str, Schema] = {
        "Removed": obj(
            name=text(),
            removed=flag(),
            cancelled=whole("Deliveries that ended by it."),
            requested=whole("Deliveries that are being called at this moment: they end with this attempt."),
        )
    }
    for kind in KINDS:
        name = kind.capitalize()
        found[f"New{name}"] = _written(kind)
        found[name] = _shown(schema(kind), _OF_ENDPOINT if kind == "endpoint" else {})
        found[f"{name}Patch"] = _patch(_written(kind))
        found[f"{name}s"] = obj(**{f"{kind}s": array(ref(name))})
    return found


def _shown(written: Schema, more: dict[str, Schema]) -> Schema:
    """An object as it is shown: no defaults of what it does not say, and what Madeira keeps of it."""
    return {
        **written,
        "properties": {**written["properties"], **_KEPT, **more},
        "required": [*written.get("required", ()), *_KEPT],
        "description": "Secrets are references (`env:NAME`) or `hidden`.",
    }


def _patch(written: Schema) -> Schema:
    """A change by RFC 7396: whatever is in it replaces what was, null removes it, tables are merged."""
    patch = _merged(written)
    patch["properties"]["version"] = whole("Of what was read; as `If-Match`.")
    patch["properties"]["name"] = {**written["properties"]["name"], "description": "The same as in the address, or left out."}
    return patch


def _merged(written: Schema) -> Schema:
    found: dict[str, Any] = {k: v for k, v in written.items() if k not in ("required", "default")}
    if "properties" in found:
        required = written.get("required", ())
        found["properties"] = {
            name: _merged(value) if name in required else nullable(_merged(value)) for name, value in found["properties"].items()
        }
    if isinstance(found.get("additionalProperties"), dict):
        found["additionalProperties"] = nullable(_merged(found["additionalProperties"]))
    return found


def _operations(kind: Kind) -> tuple[Operation, ...]:
    name, path = kind.capitalize(), f"/v1/{kind}s"
    return (
        Operation(
            method="get",
            path=path,
            name=f"list{name}s",
            tag=f"{kind}s",
            summary=f"List the {kind}s.",
            access=parts.VIEWER,
            answers={200: ("All of them.", ref(f"{name}s"))},
            problems=(422,),
        ),
        Operation(
            method="post",
            path=path,
            name=f"create{name}",
            tag=f"{kind}s",
            summary=f"Make {_a(kind)}.",
            access=parts.ADMIN,
            parameters=(shared("reason"),),
            body=json_body(ref(f"New{name}")),
            answers={201: ("Made.", ref(name))},
            headers={201: _MADE},
            problems=(409, 415, 422),
            audited=True,
        ),
        *_operations_on_one(kind, name, f"{path}/{{name}}"),
    )


def _operations_on_one(kind: Kind, name: str, one: str) -> tuple[Operation, ...]:
    removal = (in_query("unfinished", words("refuse", "cancel"), "What becomes of its unfinished deliveries."),)
    return (
        Operation(
            method="get",
            path=one,
            name=f"show{name}",
            tag=f"{kind}s",
            summary=f"Show {_a(kind)}.",
            access=parts.VIEWER,
            parameters=(shared("name"),),
            answers={200: ("It.", ref(name))},
            headers={200: _ETAG},
            problems=(404, 422),
        ),
        Operation(
            method="patch",
            path=one,
            name=f"update{name}",
            tag=f"{kind}s",
            summary=f"Change {_a(kind)}, by a JSON merge patch (RFC 7396).",
            text="`hidden`, sent back, keeps the secret of that place. What changes nothing leaves no trace.",
            access=parts.ADMIN,
            parameters=(shared("name"), shared("if_match"), shared("reason")),
            body=json_body(ref(f"{name}Patch"), media_types=(MERGE_PATCH, JSON)),
            answers={200: ("As it is now.", ref(name))},
            headers={200: _ETAG},
            problems=(404, 412, 415, 422),
            audited=True,
        ),
        Operation(
            method="delete",
            path=one,
            name=f"delete{name}",
            tag=f"{kind}s",
            summary=f"Remove {_a(kind)}.",
            text=(
                "While it has unfinished deliveries the answer is 409, unless `unfinished=cancel` and a reason say what is to "
                "become of them."
            )
            if kind == "endpoint"
            else "",
            access=parts.ADMIN,
            parameters=(shared("name"), shared("if_match"), *(removal if kind == "endpoint" else ()), shared("reason")),
            answers={200: ("Removed.", ref("Removed"))},
            problems=(404, 409, 412, 422),
            audited=True,
        ),
    )


def _a(kind: Kind) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


_SUMMARIES: Final[dict[str, str]] = {
    "pause": "Hold an endpoint: what waits for it stays in its place, and nothing is counted.",
    "resume": "Let a paused endpoint go on, in the order in which everything waits.",
    "disable": "Hold an endpoint that is not to be called until it is mended.",
    "enable": "Let a disabled endpoint go on, in the order in which everything waits.",
}


def _action(name: str, needs_reason: bool) -> Operation:
    return Operation(
        method="post",
        path=f"/v1/endpoints/{{name}}/{name}",
        name=f"{name}Endpoint",
        tag="endpoints",
        summary=_SUMMARIES[name],
        text="It counts within a second, in all processes; calls under way come to their end. Twice is the same as once, and "
        "told as such.",
        access=parts.OPERATOR,
        parameters=(shared("name"),),
        body=json_body(ref("Hold")) if needs_reason else json_body(ref("LetGo"), required=False),
        answers={200: ("As it is now.", ref("Held"))},
        problems=(404, 409, 415, 422),
        audited=True,
    )


SCHEMAS: Final = _schemas()

_TEST: Final = Operation(
    method="post",
    path="/v1/endpoints/{name}/test",
    name="testEndpoint",
    tag="endpoints",
    summary="Call an endpoint once, and tell what came of it.",
    text="The call carries `X-Madeira-Test: 1`, and its `webhook-id` begins with `msg_test_`; no event and no delivery is "
    "stored. It takes at most the endpoint's timeout. With a `target_uri`, an endpoint that calls the event's address and has "
    "secrets, headers or a client certificate needs the role admin.",
    access=parts.OPERATOR,
    parameters=(shared("name"),),
    body=json_body(ref("TestCall"), required=False),
    answers={200: ("What came of it, whatever that is.", ref("TestAnswer"))},
    problems=(404, 409, 415, 422),
    audited=True,
)

OBJECTS: Final = (
    *(operation for kind in KINDS for operation in _operations(kind)),
    *(_action(name, needs_reason) for name, needs_reason in ACTIONS.items()),
    _TEST,
)
