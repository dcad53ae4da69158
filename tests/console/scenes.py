"""What there is to be seen in the console: endpoints, and events in some state of their life."""

import json
import uuid
from typing import Any

import psycopg

from tests.api.people import ADMIN, in_json
from tests.api.serving import Api
from tests.store import making

#: Bytes of a page at most.
LARGEST = 60_000

#: What stands in every field that comes from outside.
HOSTILE = "</pre></td><script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{7*7}}"


def made_endpoint(api: Api, **fields: Any) -> str:
    name = f"e-{uuid.uuid4().hex[:8]}"
    body = json.dumps({"name": name, "url": "http://127.0.0.1:9/x"} | fields).encode()
    reply = api.request("POST", "/v1/endpoints", body, in_json(ADMIN))
    assert reply.status == 201, reply.body
    return name


def died(conn: psycopg.Connection[Any], endpoint: str = "sink", **fields: Any) -> str:
    """The id of an event whose delivery failed once and was tried again, and then was given up."""
    fields.setdefault("event_id", uuid.uuid4().hex)
    [ref] = making.routed(conn, (endpoint,), **fields)
    making.settled(conn, making.claimed(conn, ref), making.RETRY)
    making.make_due(conn, ref.delivery_id)
    making.settled(conn, making.claimed(conn, ref), making.GIVE_UP)
    return str(fields["event_id"])
