"""`madeira token`, `madeira endpoints` and `madeira dry-run`: what people administer and try from a terminal."""

import getpass
import json
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from madeira.store import tokens
from tests import terminal
from tests.receiver import Answer, Receiver
from tests.system.harness import KEY, configure

pytestmark = pytest.mark.long

SECRET = "a-signing-secret-of-this-test"

RULES = """
[[source]]
name = "shop"
secrets = ["{secret}"]

[[endpoint]]
name = "ledger"
url = "{url}"
rate = 5
secrets = ["{secret}"]

[[route]]
name = "large"
endpoint = "ledger"
filter = "payload.amount > 100"
"""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def environ(tmp_path: Path, database_url: str, receiver: Receiver) -> dict[str, str]:
    """An environment with a database that holds `RULES`."""
    configure(database_url, RULES.format(url=receiver.url("/{event_type}"), secret=SECRET))
    return terminal.environ(
        MADEIRA_DATA_DIR=str(tmp_path / "data"),
        MADEIRA_DATABASE_URL=database_url,
        MADEIRA_SECRET_KEY=KEY,
        MADEIRA_EGRESS_ALLOW="127.0.0.0/8",
    )


def run(environ: dict[str, str], *arguments: str, given: str = "", fails: bool = False) -> "subprocess.CompletedProcess[str]":
    done = terminal.run(environ, *arguments, given=given, code=None)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done


def audit(environ: dict[str, str]) -> list[tuple[str, str, str, str | None]]:
    with psycopg.connect(environ["MADEIRA_DATABASE_URL"]) as c:
        return c.execute("SELECT who, action, what, why FROM audit WHERE who LIKE 'cli %' ORDER BY id").fetchall()


def test_a_token_is_made_listed_and_revoked(environ: dict[str, str]) -> None:
    """Standard output holds the token alone, so that a script can take it; who did it is on record."""
    done = run(environ, "token", "create", "ci", "--role", "operator", "--expires", "30d", "--reason", "the nightly run")
    text = done.stdout.removesuffix("\n")
    assert re.fullmatch(r"mdr_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", text)
    assert "not shown again" in done.stderr
    with psycopg.connect(environ["MADEIRA_DATABASE_URL"]) as c:
        [known] = tokens.live(c).values()
    assert (known.digest, known.name, known.role) == (tokens.digest_of(text), "ci", "operator")
    [listed] = json.loads(run(environ, "token", "list", "--json").stdout)
    until = datetime.fromisoformat(listed["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=29.9) < until <= timedelta(days=30)
    table = run(environ, "token", "list").stdout
    assert "ci" in table
    assert text.split("_", 2)[2] not in table
    assert "there is a token ci already" in run(environ, "token", "create", "ci", "--role", "admin", fails=True).stderr
    run(environ, "token", "revoke", "ci", "--reason", "leaked")
    assert "there is no token 'ci'" in run(environ, "token", "revoke", "ci", fails=True).stderr
    who = f"cli {getpass.getuser()}"
    assert audit(environ) == [(who, "create", "token ci", "the nightly run"), (who, "revoke", "token ci", "leaked")]


def test_a_list_of_tokens_says_how_long_each_holds(environ: dict[str, str]) -> None:
    """Until a time, until somebody revokes it, or no longer; none of them is called revoked."""
    for name, life in (("forever", []), ("month", ["--expires", "30d"]), ("over", ["--expires", "1h"])):
        run(environ, "token", "create", name, "--role", "viewer", *life)
    with psycopg.connect(environ["MADEIRA_DATABASE_URL"]) as c:
        c.execute("UPDATE api_token SET created_at = '2026-01-01Z', expires_at = '2026-01-02 12:00Z' WHERE name = 'over'")
        [month] = c.execute("SELECT expires_at FROM api_token WHERE name = 'month'").fetchone()
    lines = {line.split()[0]: line for line in run(environ, "token", "list").stdout.splitlines()}
    assert "until revoked" in lines["forever"]
    assert f"until {month.astimezone():%Y-%m-%d %H:%M}" in lines["month"]
    assert f"expired {datetime(2026, 1, 2, 12, tzinfo=UTC).astimezone():%Y-%m-%d %H:%M}" in lines["over"]


@pytest.mark.parametrize(
    "arguments", [["a b", "--role", "viewer"], ["x", "--role", "owner"], ["x", "--role", "admin", "--expires", "1y"]]
)
def test_a_token_that_cannot_be_is_refused(environ: dict[str, str], arguments: list[str]) -> None:
    """With what would be right, and nothing is made."""
    run(environ, "token", "create", *arguments, fails=True)
    assert audit(environ) == []


def test_endpoints_are_listed_and_shown_without_their_secrets(environ: dict[str, str], receiver: Receiver) -> None:
    """As a table, as lines, as JSON."""
    shown = [
        run(environ, "endpoints", *arguments).stdout
        for arguments in (["list"], ["list", "--json"], ["show", "ledger"], ["show", "ledger", "--json"])
    ]
    assert all("ledger" in text and receiver.url("/{event_type}") in text and SECRET not in text for text in shown)
    assert json.loads(shown[3])["unfinished"] == 0
    assert json.loads(shown[3])["secrets"] == ["hidden:1"]
    assert "there is no endpoint 'nobody'" in run(environ, "endpoints", "show", "nobody", fails=True).stderr


def test_an_endpoint_is_called_for_a_test(environ: dict[str, str], receiver: Receiver) -> None:
    """The exit code says whether it works; the call is marked, and on record."""
    told = run(
        environ, "endpoints", "test", "ledger", "--type", "order.paid", "--payload", '{"n": 1}', "--reason", "new url"
    ).stdout
    [call] = receiver.calls
    assert (call.path, call.headers["x-madeira-test"], json.loads(call.body)["payload"]) == ("/order.paid", "1", {"n": 1})
    assert "succeeded" in told
    assert call.headers["x-madeira-signature"] not in told
    receiver.default(Answer(status=500))
    failed = run(environ, "endpoints", "test", "ledger", "--json", fails=True)
    assert json.loads(failed.stdout)["verdict"]["error_code"] == "http_500"
    who = f"cli {getpass.getuser()}"
    assert audit(environ) == [(who, "test", "endpoint ledger", "new url"), (who, "test", "endpoint ledger", None)]
    for wrong in (["nobody"], ["ledger", "--payload", "{"], ["callback"]):
        run(environ, "endpoints", "test", *wrong, fails=True)
    assert len(receiver.calls) == 2


def test_a_dry_run_tells_what_would_become_of_an_event(environ: dict[str, str], receiver: Receiver, tmp_path: Path) -> None:
    """From a file or standard input; which routes match, the request, the verdict on an answer; nothing is called."""
    large = '{"event_type": "order.paid", "payload": {"amount": 500}}'
    (tmp_path / "event.json").write_text(large)
    arguments = ["dry-run", str(tmp_path / "event.json"), "--source", "shop"]
    told = run(environ, *arguments, "--response-status", "503", "--response-header", "Retry-After: 7").stdout
    assert "route large to ledger: matches" in told
    assert f"POST {receiver.url('/order.paid')}" in told
    assert "tried again after" in told
    assert SECRET not in told
    small = large.replace("500", "5")
    found = json.loads(run(environ, "dry-run", "-", "--source", "shop", "--json", given=small).stdout)
    assert (found["status"], found["deliveries"]) == ("unrouted", [])
    assert found["routes"][0]["matches"] is False
    assert not receiver.calls
    with psycopg.connect(environ["MADEIRA_DATABASE_URL"]) as c:
        assert c.execute("SELECT count(*) FROM event").fetchone() == (0,)
    assert audit(environ) == []


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"event_type": "a"}', '{"event_type": 1, "payload": 1}', '{"event_type": "a", "payload": 1, "x": 1}']
)
def test_a_dry_run_of_what_is_no_event_says_why(environ: dict[str, str], text: str) -> None:
    """In one line."""
    told = run(environ, "dry-run", "-", "--source", "shop", given=text, fails=True).stderr
    assert len(told.splitlines()) == 1
    assert told.startswith("Error: -: ")


def test_a_dry_run_tells_all_that_is_wrong_with_an_event(environ: dict[str, str]) -> None:
    """Not only the first."""
    told = run(environ, "dry-run", "-", "--source", "shop", given='{"x": 1, "trace_id": 5}', fails=True).stderr
    assert [word for word in ("'x'", "event_type", "payload", "trace_id must") if word not in told] == []


def test_a_dry_run_that_cannot_mean_anything_fails(environ: dict[str, str]) -> None:
    """A source that could not post, with the one that was meant; parts of an answer without its status."""
    event = '{"event_type": "a", "payload": 1}'
    done = run(environ, "dry-run", "-", "--source", "shopp", given=event, fails=True)
    assert done.stdout == ""
    assert "did you mean 'shop'" in done.stderr
    for part in (["--response-header", "A: b"], ["--response-body", "{}"]):
        done = run(environ, "dry-run", "-", "--source", "shop", *part, given=event, fails=True)
        assert "--response-status" in done.stderr
        assert done.stdout == ""
