"""The description of the API in OpenAPI 3.1: written once, served at ``/openapi.json``, and held against the server by tests.

`operations` is the table of what can be asked, `schemas` says how bodies look, `parts` are the words both are written in.
"""

import json
from functools import cache
from typing import Any

import falcon

import madeira
from madeira.api.openapi.dead_letters import SCHEMAS as DEAD_LETTERS_SCHEMAS
from madeira.api.openapi.jobs import SCHEMAS as JOBS_SCHEMAS
from madeira.api.openapi.objects import SCHEMAS as OBJECTS_SCHEMAS
from madeira.api.openapi.operations import OPERATIONS
from madeira.api.openapi.parts import PARAMETERS, SECURITY, Operation
from madeira.api.openapi.schemas import SCHEMAS

_ABOUT = """\
Sources post events by a signature of their own; people and programs use bearer tokens with a role: a viewer reads, an operator
also acts on events and endpoints, an admin also changes the configuration. `x-madeira-role` says which role an operation needs.
Every error is a problem document (RFC 9457) whose `type` is stable.
"""


class Description:
    """``GET /openapi.json``; open to everybody, as it tells nothing of an installation."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Show it."""
        resp.data = _text()


@cache
def document() -> dict[str, Any]:
    """The whole description."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Madeira", "version": madeira.__version__, "description": _ABOUT, "license": {"name": "MIT"}},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(o.tag for o in OPERATIONS)],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS | DEAD_LETTERS_SCHEMAS | JOBS_SCHEMAS | OBJECTS_SCHEMAS,
            "parameters": PARAMETERS,
            "securitySchemes": SECURITY,
        },
    }


@cache
def _text() -> bytes:
    return json.dumps(document()).encode()


def _described(o: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": o.name,
        "tags": [o.tag],
        "summary": o.summary,
        "security": o.access.security(),
        "responses": o.responses(),
    }
    if o.text:
        described["description"] = o.text
    if o.parameters:
        described["parameters"] = list(o.parameters)
    if o.body is not None:
        described["requestBody"] = o.body
    if o.access.role is not None:
        described["x-madeira-role"] = o.access.role
    if o.audited:
        described["x-madeira-audited"] = True
    return described
