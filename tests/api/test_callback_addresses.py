"""Addresses at the door: what would never be called is refused when an event brings it and when an endpoint is saved."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import trustme

from tests.api.people import ADMIN, in_json
from tests.api.serving import Api, Reply, event, signed
from tests.delivery.test_guard import DENIED_HOSTS, NO_HOSTS
from tests.receiver import Receiver
from tests.servers import with_database

#: Beside what is denied anyway.
POLICY = {"MADEIRA_EGRESS_ALLOW": "169.254.7.7", "MADEIRA_EGRESS_DENY": "10.66.0.0/16,*.evil.test"}

OPEN = ["partner.test", "10.0.0.1", "8.8.8.8", "[2600::1]", "169.254.7.7", "[64:ff9b::808:808]", "evil.test"]
DENIED = ["10.66.1.1", "a.evil.test", "A.EVIL.TEST.", "[::ffff:10.66.1.1]", *DENIED_HOSTS]


@contextlib.contextmanager
def fresh_api(postgres_url: str, template: str, redis_url: str, folders: pytest.TempPathFactory, **env: str) -> Iterator[Api]:
    """An API with a database of its own."""
    name = f"madeira_api_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    url = with_database(postgres_url, name)
    api = Api(folder=folders.mktemp("api"), database_url=url, redis_url=redis_url, MADEIRA_NAMESPACE=name, **env)
    try:
        yield api.start()
    finally:
        api.stop()
        with psycopg.connect(postgres_url, autocommit=True) as c:
            c.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(scope="module")
def strict_api(
    postgres_url: str, template_database: str, shared_redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    """An API with a policy of its own."""
    with fresh_api(postgres_url, template_database, shared_redis_url, tmp_path_factory, **POLICY) as api:
        yield api


def save(api: Api, **fields: Any) -> Reply:
    """Ask for a new endpoint."""
    return api.request("POST", "/v1/endpoints", json.dumps(fields).encode(), in_json(ADMIN))


def wrong(reply: Reply) -> dict[str, str]:
    """The fields that a refusal names, and why."""
    return {e["field"]: e["detail"] for e in reply.json["errors"]}


def test_an_event_with_an_address_that_would_never_be_called_is_refused(strict_api: Api) -> None:
    """Each with 422 that names the field; no id is used up by it, and the good ones are accepted."""
    for host in (*DENIED, *NO_HOSTS):
        reply = strict_api.post(event("the-same-id", target_uri=f"http://{host}/x"))
        assert reply.status == 422, (host, reply.body)
        assert wrong(reply).keys() == {"target_uri"}, host
    reply = strict_api.post(event("the-same-id", target_uri="http://127.0.0.1:8080/"))
    assert wrong(reply)["target_uri"].endswith("MADEIRA_EGRESS_ALLOW=127.0.0.1")
    for number, host in enumerate(OPEN):
        assert strict_api.post(event(f"good-{number}", target_uri=f"http://{host}/x")).status == 202, host
    assert strict_api.post(event("the-same-id", target_uri="http://partner.test/x")).status == 202


def test_a_denied_address_in_a_batch_is_one_rejected_line(strict_api: Api) -> None:
    """Its neighbours are accepted."""
    targets = ["http://partner.test/", "http://127.0.0.1/", "http://10.0.0.1/", "http://[::ffff:7f00:1]/", "http://a.evil.test/"]
    body = b"\n".join(event(f"line-{number}", target_uri=uri) for number, uri in enumerate(targets))
    reply = strict_api.request("POST", "/v1/events/batch", body, signed(body) | {"Content-Type": "application/x-ndjson"})
    assert reply.status == 200
    assert reply.json["accepted"] == 2
    assert [r["line"] for r in reply.json["rejected"]] == [2, 4, 5]


def test_an_endpoint_at_an_address_that_would_never_be_called_is_not_saved(strict_api: Api) -> None:
    """However it is spelled; a port that cannot exist and a label that is too long too."""
    for host in (*DENIED, *NO_HOSTS, "xn--", "a:99999", "a:0", "a" * 300, "x\r\ny"):
        reply = save(strict_api, name="bad", url=f"http://{host}/x")
        assert reply.status == 422, (host, reply.status, reply.body)
        assert wrong(reply).keys() == {"url"}, host
    for number, host in enumerate(OPEN):
        assert save(strict_api, name=f"good-{number}", url=f"http://{host}/x").status == 201, host


def test_an_endpoint_with_a_client_certificate_that_cannot_be_used_is_not_saved(strict_api: Api) -> None:
    """What is wrong is named; the key is not told, neither then nor when a good one is read."""
    ca = trustme.CA()
    good, other = (ca.issue_cert(name) for name in ("good.test", "other.test"))
    chain = b"".join(pem.bytes() for pem in good.cert_chain_pems).decode()
    key = good.private_key_pem.bytes().decode()
    for bad in (other.private_key_pem.bytes().decode(), "not a key"):
        reply = save(strict_api, name="tls", url="https://partner.test/", client_certificate={"chain": chain, "key": bad})
        assert reply.status == 422, reply.body
        assert all(field.startswith("client_certificate") for field in wrong(reply))
        assert bad.splitlines()[-2 if "\n" in bad else 0].encode() not in reply.body
    reply = save(strict_api, name="tls", url="https://partner.test/", client_certificate={"chain": chain, "key": key})
    assert reply.status == 201, reply.body
    shown = strict_api.request("GET", "/v1/endpoints/tls", None, ADMIN)
    for line in key.splitlines()[1:-1]:
        assert line.encode() not in reply.body + shown.body


def test_a_test_call_goes_only_where_deliveries_go(
    postgres_url: str, template_database: str, shared_redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An endpoint that was saved under another policy is not called by hand either."""
    with (
        Receiver() as canary,
        fresh_api(postgres_url, template_database, shared_redis_url, tmp_path_factory, MADEIRA_EGRESS_ALLOW="") as api,
    ):
        url = json.dumps(canary.url("/x"))
        with psycopg.connect(api.env["MADEIRA_DATABASE_URL"], autocommit=True) as c:
            c.execute("UPDATE endpoint SET spec = jsonb_set(spec, '{url}', %s::jsonb) WHERE name = 'sink'", (url,))
        reply = api.request("POST", "/v1/endpoints/sink/test", b'{"reason": "does it answer?"}', in_json(ADMIN))
        assert b"denied_by_policy" in reply.body, reply.body
        assert canary.connections == 0
