"""Tokens: made once, shown once, kept as a digest, ended at will; and what they let one do."""

import json
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from madeira.api.known_tokens import KnownTokens
from madeira.errors import AlreadyThere, NotThere, StoreUnavailable
from madeira.states import Role
from madeira.store import tokens
from madeira.store.database import Database
from tests.api.people import ADMIN, audited, bearer, in_json, person, token
from tests.api.serving import Api
from tests.servers import OwnPostgres
from tests.system.harness import wait_until

#: Seconds within which a change of a token counts everywhere.
SOON_S = 2.0


def make(api: Api, headers: dict[str, str] = ADMIN, **fields: object) -> tuple[int, dict]:
    reply = api.request("POST", "/v1/tokens", json.dumps(fields).encode(), in_json(headers))
    return reply.status, reply.json


def name_of_a_token() -> str:
    return f"t-{uuid.uuid4().hex}"


def test_roles_are_ranked() -> None:
    """Each role may do what the ones below it may, and no more."""
    ranked = [Role.VIEWER, Role.OPERATOR, Role.ADMIN]
    for n, role in enumerate(ranked):
        assert [role.suffices(need) for need in ranked] == [m <= n for m in range(3)]


def test_a_token_is_told_once_and_kept_as_a_digest(shared_api: Api) -> None:
    """The answer holds its text; neither the list nor the table nor the audit does."""
    name = name_of_a_token()
    status, made = make(shared_api, name=name, role="operator", reason="for the nightly run")
    text = made.pop("token")
    assert status == 201
    assert re.fullmatch(r"mdr_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", text)
    listed = shared_api.request("GET", "/v1/tokens", None, ADMIN)
    assert made in listed.json["tokens"]
    secret = text.split("_", 2)[2]
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        rows = str(c.execute("SELECT * FROM api_token").fetchall()) + str(c.execute("SELECT * FROM audit").fetchall())
        noted = c.execute("SELECT who, action, why, detail FROM audit WHERE what = %s", (f"token {name}",)).fetchall()
    for place in (listed.body.decode(), rows, shared_api.log.read_text()):
        assert secret not in place
    assert noted == [
        (
            "admin",
            "create",
            "for the nightly run",
            {"after": {"handle": made["handle"], "role": "operator", "expires_at": None}},
        )
    ]


def test_a_token_counts_from_the_moment_at_which_it_was_made(shared_api: Api) -> None:
    """In every process, also when one has read the tokens a moment before."""
    before = person(shared_api, Role.VIEWER)
    for _ in range(10):
        assert shared_api.request("GET", "/v1/audit", None, before).status == 200
        new = person(shared_api, Role.VIEWER)
        assert shared_api.request("GET", "/v1/audit", None, new).status == 200


@pytest.mark.alone
def test_a_revoked_token_stops_to_count_within_two_seconds(shared_api: Api) -> None:
    """In all processes, while it is in use; its name is free again then."""
    text, name = token(shared_api, Role.OPERATOR)
    assert shared_api.request("GET", "/v1/audit", None, bearer(text)).status == 200
    reply = shared_api.request("DELETE", f"/v1/tokens/{name}?reason=left+the+house", None, ADMIN)
    assert reply.status == 200
    assert reply.json["revoked_at"]
    revoked = time.monotonic()
    last = 0.0
    # Beyond the two seconds, since one process may have forgotten it while the other has not.
    while (asked := time.monotonic() - revoked) < SOON_S + 0.5:
        if shared_api.request("GET", "/v1/audit?limit=1", None, bearer(text)).status == 200:
            last = asked
    assert last < SOON_S
    for _ in range(20):
        assert shared_api.request("GET", "/v1/audit", None, bearer(text)).status == 401
    assert shared_api.request("DELETE", f"/v1/tokens/{name}", None, ADMIN).status == 404
    assert make(shared_api, name=name, role="viewer")[0] == 201
    assert shared_api.request("GET", "/v1/audit", None, bearer(text)).status == 401


def test_an_expired_token_counts_no_more(shared_api: Api) -> None:
    """It is still listed, as expired."""
    text, name = token(shared_api, Role.VIEWER, expires_s=1)
    until = time.monotonic() + 1
    assert shared_api.request("GET", "/v1/audit", None, bearer(text)).status == 200
    wait_until(
        lambda: shared_api.request("GET", "/v1/audit", None, bearer(text)).status == 401, what="the expiry", timeout=1 + SOON_S
    )
    assert time.monotonic() >= until
    listed = shared_api.request("GET", "/v1/tokens", None, ADMIN).json["tokens"]
    assert [t["expired"] for t in listed if t["name"] == name] == [True]


def test_whatever_is_wrong_with_a_token_the_answer_is_the_same(shared_api: Api) -> None:
    """Unknown, revoked, expired, cut off, with another secret, of another scheme, absent: the same bytes."""
    good, name = token(shared_api, Role.ADMIN)
    expired, _ = token(shared_api, Role.ADMIN, expires_s=0.001)
    revoked, gone = token(shared_api, Role.ADMIN)
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        tokens.revoke(c, name=gone, who="tests")
    other, _ = token(shared_api, Role.ADMIN)
    mixed = "_".join((*good.split("_")[:2], other.split("_", 2)[2]))
    unknown = f"mdr_{'0' * 12}_{'A' * 43}"
    wrong = [unknown, revoked, expired, good[:-1], good + "x", mixed, good.upper(), "", name, "mdr_", "a b", good + " " + good]
    tried = [bearer(text) for text in wrong]
    tried += [{"Authorization": v} for v in (good, f"Basic {good}", f"Token {good}", "Bearer", "")]
    answers = [shared_api.request("GET", "/v1/audit", None, headers) for headers in [*tried, {}]]
    assert {(a.status, a.headers["content-type"], a.headers["www-authenticate"], a.body) for a in answers} == {
        (401, "application/problem+json", 'Bearer realm="madeira"', answers[0].body)
    }
    for spelt in (f"Bearer {good}", f"bearer  {good}", f"BEARER {good} "):
        assert shared_api.request("GET", "/v1/audit", None, {"Authorization": spelt}).status == 200


def test_too_low_a_role_is_told_which_one_is_needed(shared_api: Api) -> None:
    """403, and the reason is for a person and for a program."""
    reply = shared_api.request("GET", "/v1/tokens", None, person(shared_api, Role.OPERATOR))
    assert (reply.status, reply.json["type"]) == (403, "urn:madeira:problem:forbidden")
    assert (reply.json["role"], reply.json["needed"]) == ("operator", "admin")
    assert "role admin" in reply.json["detail"]


def test_a_name_is_taken_as_long_as_its_token_holds(shared_api: Api) -> None:
    """The second one is refused and leaves no trace, and so is revoking what is not there; a race has one winner."""
    name = name_of_a_token()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: make(shared_api, name=name, role="viewer"), range(8)))
    assert sorted(status for status, _ in answers) == [201] + [409] * 7
    assert {a["type"] for status, a in answers if status == 409} == {"urn:madeira:problem:already-there"}
    before = audited(shared_api)
    assert make(shared_api, name=name, role="admin")[0] == 409
    for unknown in ("nobody", "%00", "a b", "a" * 65, "."):
        reply = shared_api.request("DELETE", f"/v1/tokens/{unknown.replace(' ', '%20')}", None, ADMIN)
        assert (reply.status, reply.json["type"]) == (404, "urn:madeira:problem:unknown-token")
    assert audited(shared_api) == before


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("name", {"role": "viewer"}),
        ("name", {"name": "a b", "role": "viewer"}),
        ("name", {"name": ".hidden", "role": "viewer"}),
        ("name", {"name": 1, "role": "viewer"}),
        ("role", {"name": "x"}),
        ("role", {"name": "x", "role": "Admin"}),
        ("role", {"name": "x", "role": ["admin"]}),
        ("expires_in", {"name": "x", "role": "viewer", "expires_in": 0}),
        ("expires_in", {"name": "x", "role": "viewer", "expires_in": True}),
        ("expires_in", {"name": "x", "role": "viewer", "expires_in": "30d"}),
        ("expires_in", {"name": "x", "role": "viewer", "expires_in": 1e12}),
        ("reason", {"name": "x", "role": "viewer", "reason": "a\nb"}),
        ("reason", {"name": "x", "role": "viewer", "reason": 1}),
        ("owner", {"name": "x", "role": "viewer", "owner": "me"}),
    ],
)
def test_a_wrong_field_of_a_token_is_named(shared_api: Api, field: str, fields: dict[str, object]) -> None:
    """422, and nothing is made."""
    before = audited(shared_api)
    status, answer = make(shared_api, **fields)
    assert (status, [e["field"] for e in answer["errors"]]) == (422, [field])
    assert audited(shared_api) == before


def test_the_last_use_is_noted_at_most_once_a_minute(database_url: str) -> None:
    """Behind the request's back: by the first use, and not by a thousand more."""
    database = Database(url=database_url, application="tests", pool_max=2)
    database.open()
    known = KnownTokens(database=database)
    with psycopg.connect(database_url, autocommit=True) as c:
        text, made = tokens.create(c, name="ci", role=Role.VIEWER, expires_s=None, who="tests")
        assert made["last_used_at"] is None
        assert known.find(text) == tokens.live(c)[made["handle"]]
        wait_until(lambda: tokens.listed(c)[0]["last_used_at"] is not None, what="the note of the use")
        # An hour ago, so that only the process's own restraint keeps it from being noted again.
        c.execute("UPDATE api_token SET last_used_at = clock_timestamp() - interval '1 h'")
        before = tokens.listed(c)[0]["last_used_at"]
        for _ in range(1000):
            assert known.find(text) is not None
        known.stop()
        assert tokens.listed(c)[0]["last_used_at"] == before
    database.close()


def test_a_process_that_ends_notes_what_it_has_not_noted_yet(database_url: str) -> None:
    """The last use is there when `stop` returns."""
    database = Database(url=database_url, application="tests", pool_max=2)
    database.open()
    known = KnownTokens(database=database)
    with psycopg.connect(database_url, autocommit=True) as c:
        text, _ = tokens.create(c, name="ci", role=Role.VIEWER, expires_s=None, who="tests")
        known.find(text)
        known.stop()
        assert tokens.listed(c)[0]["last_used_at"] is not None
    database.close()


@pytest.mark.long
def test_without_postgres_tokens_are_503_and_the_administrator_of_the_settings_is_known(
    serve: Callable[..., Api], own_postgres: OwnPostgres, redis_url: str
) -> None:
    """Not 401, since nobody knows; at once for the many, so that no thread is held; and well again when it is back."""
    api = serve(own_postgres.url, redis_url).start()
    text, _ = token(api, Role.ADMIN)
    assert api.request("GET", "/v1/audit", None, bearer(text)).status == 200
    own_postgres.kill()
    wait_until(lambda: api.request("GET", "/v1/audit", None, bearer(text)).status != 200, what="the tokens to be unknown")
    reply = api.request("GET", "/v1/audit", None, bearer(text))
    assert (reply.status, reply.json["type"], "retry-after" in reply.headers) == (503, "urn:madeira:problem:unavailable", True)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: api.request("GET", "/v1/tokens", None, bearer(text)), range(64)))
    assert {a.status for a in answers} == {503}
    assert max(a.duration_s for a in answers) < 8
    # Recognised, and then without anything to show; a text that is no token of ours needs no Postgres to be refused.
    assert api.request("GET", "/v1/tokens", None, ADMIN).status == 503
    assert make(api, name="a b", role="viewer")[0] == 422
    assert api.request("GET", "/v1/tokens", None, bearer("guessed")).status == 401
    own_postgres.start()
    wait_until(lambda: api.request("GET", "/v1/audit", None, bearer(text)).status == 200, what="the tokens to be known again")


@pytest.mark.long
def test_a_frozen_postgres_holds_requests_with_tokens_for_a_bounded_time(own_postgres: OwnPostgres) -> None:
    """One of them asks, the others wait for it at most two seconds."""
    database = Database(url=own_postgres.url, application="tests", pool_max=2, statement_timeout_s=1.0)
    database.open()
    known = KnownTokens(database=database)
    with psycopg.connect(own_postgres.url, autocommit=True) as c:
        text, _ = tokens.create(c, name="ci", role=Role.VIEWER, expires_s=None, who="tests")
    assert known.find(text) is not None
    own_postgres.stall()
    wait_until(lambda: _refused(known, text), what="the first refusal", timeout=15)
    started = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda _: _refused(known, text), range(32)))
    assert time.monotonic() - started < 10
    own_postgres.resume()
    wait_until(lambda: not _refused(known, text), what="Postgres' return", timeout=15)
    known.stop()
    database.close()


def _refused(known: KnownTokens, text: str) -> bool:
    try:
        return known.find(text) is None
    except StoreUnavailable:
        return True


def test_the_store_tells_near_cases_apart(database_url: str) -> None:
    """A name that is taken, one that is not there, one that was revoked."""
    with psycopg.connect(database_url, autocommit=True) as c:
        tokens.create(c, name="ci", role=Role.VIEWER, expires_s=None, who="tests")
        with pytest.raises(AlreadyThere, match="ci"):
            tokens.create(c, name="ci", role=Role.VIEWER, expires_s=None, who="tests")
        with pytest.raises(NotThere, match="other"):
            tokens.revoke(c, name="other", who="tests")
        tokens.revoke(c, name="ci", who="tests")
        with pytest.raises(NotThere, match="revoked"):
            tokens.revoke(c, name="ci", who="tests")


def test_a_record_of_a_token_does_not_show_its_digest(database_url: str) -> None:
    """Nor is a text with anything behind it taken for a token."""
    with psycopg.connect(database_url, autocommit=True) as c:
        text, made = tokens.create(c, name="ci", role=Role.VIEWER, expires_s=None, who="tests")
        [known] = tokens.live(c).values()
    assert known.digest.hex() not in repr(known)
    assert str(known.digest) not in repr(known)
    assert tokens.handle_of(text) == made["handle"]
    assert tokens.handle_of(text + "\n") is None
