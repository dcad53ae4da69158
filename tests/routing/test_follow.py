"""The rules follow the database while a process runs."""

import threading
import uuid
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql
from structlog.testing import capture_logs

from madeira import sealing
from madeira.errors import StoreUnavailable
from madeira.records import CALLBACK_URL
from madeira.routing.config import Rules
from madeira.routing.follow import RulesFollower
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.store import configuration
from madeira.store.database import Database
from madeira.store.schema import NO_TABLES
from tests.servers import OwnPostgres, with_database
from tests.system.harness import KEY, wait_until
from tests.system.harness import configurator as make_configurator

#: Seconds within which a change must count.
SOON_S = 2.0


def source(name: str) -> str:
    return f'[[source]]\nname = "{name}"\nsecrets = ["a-secret"]\n'


class Changes:
    """Collects what a follower tells, so that a test can wait for it."""

    def __init__(self) -> None:
        self.seen: list[Rules] = []
        self._told = threading.Semaphore(0)

    def __call__(self, rules: Rules) -> None:
        self.seen.append(rules)
        self._told.release()

    def wait(self, timeout_s: float = 10.0) -> Rules:
        assert self._told.acquire(timeout=timeout_s), "no change was told"
        return self.seen[-1]


@pytest.fixture
def changes() -> Changes:
    return Changes()


Follow = Callable[..., RulesFollower]


@pytest.fixture
def follow(database: Database) -> Iterator[Follow]:
    """Starts followers: ``follow(on_change, key=…, environ=…)``."""
    followers: list[RulesFollower] = []

    def start(
        on_change: Callable[[Rules], None] | None = None,
        *,
        key: str = KEY,
        environ: dict[str, str] | None = None,
        database: Database = database,
        **options: float,
    ) -> RulesFollower:
        sealer = Sealer((key,))
        follower = RulesFollower(database=database, sealer=sealer, on_change=on_change, environ=environ or {}, **options)
        followers.append(follower)
        follower.start()
        return follower

    yield start
    for follower in followers:
        follower.stop()


def test_the_rules_are_what_the_database_holds(configurator: Configurator, follow: Follow, changes: Changes) -> None:
    """Secrets are opened and looked up; the built-in endpoint is there; the version is the configuration's."""
    endpoint = '[[endpoint]]\nname = "e"\nurl = "http://h.example/"\nsecrets = ["sealed-one", "env:TWO"]\n'
    configurator.apply(source("s") + endpoint + '[[route]]\nname = "r"\nendpoint = "e"\n', who="t")
    follower = follow(changes, environ={"TWO": "two"})
    rules = changes.wait()
    assert follower.current is rules
    assert rules.endpoints["e"].secrets == ("sealed-one", "two")
    assert rules.endpoints["callback"].url == CALLBACK_URL
    assert [r.name for r in rules.routes] == ["r"]
    assert follower.version == rules.version == 2


@pytest.mark.alone
def test_a_change_counts_within_two_seconds(configurator: Configurator, follow: Follow, changes: Changes) -> None:
    """Without anybody asking for it; whoever depends on the rules is told, and what did not change stays the same object."""
    configurator.apply(source("one"), who="t")
    follower = follow(changes)
    before = changes.wait()
    configurator.apply(source("two"), who="t")
    rules = changes.wait(SOON_S)
    assert set(rules.sources) == {"one", "two"}
    assert rules.sources["one"] is before.sources["one"]
    assert follower.version == before.version + 1


def test_an_object_that_is_removed_and_made_anew_is_the_new_one(
    configurator: Configurator, follow: Follow, changes: Changes
) -> None:
    """The version of an object begins afresh, so it does not decide what is read."""
    configurator.create("source", "s", {"secrets": ["a-secret"], "rate": 1}, who="t")
    follower = follow(changes, period_s=60.0)
    assert changes.wait().sources["s"].rate == 1.0
    configurator.delete("source", "s", expected=None, who="t")
    configurator.create("source", "s", {"secrets": ["a-secret"], "rate": 2}, who="t")
    follower.reload()
    assert changes.wait().sources["s"].rate == 2.0


def test_a_reload_looks_at_once(configurator: Configurator, follow: Follow, changes: Changes) -> None:
    """Who cannot wait for the next look asks for one."""
    follower = follow(changes, period_s=60.0)
    changes.wait()
    configurator.apply(source("s"), who="t")
    follower.reload()
    assert "s" in changes.wait().sources


def test_what_cannot_be_used_makes_nothing_else_unusable(configurator: Configurator, follow: Follow, changes: Changes) -> None:
    """A variable that is not set, and a secret that no key opens: told once, each with its reason, and all else holds."""
    configurator.apply(source("good") + source("bad").replace('"a-secret"', '"env:NOT_SET"'), who="t")
    for name, document in {"e": {"headers": {"A": "env:NOT_SET"}}, "f": {}}.items():
        configurator.create("endpoint", name, {"url": "http://h.example/"} | document, who="t")
        configurator.create("route", name, {"endpoint": name}, who="t")
    with capture_logs() as lines:
        follower = follow(changes)
        rules = changes.wait()
        configurator.create("source", "more", {"secrets": ["a-secret"]}, who="t")
        follower.reload()
        changes.wait()
    assert set(rules.sources) == {"good"}
    assert set(rules.unusable) == {"source/bad", "endpoint/e"}
    assert "headers.A: the environment variable NOT_SET is not set" in rules.unusable["endpoint/e"]
    assert rules.endpoint("e") is None
    assert rules.endpoint("f") is rules.endpoints["f"]
    assert rules.endpoints["e"].url == "http://h.example/", "events are routed to it and wait"
    assert rules.endpoints["e"].headers == {}
    assert [r.name for r in rules.routes] == ["e", "f"]
    told = [line["what"] for line in lines if line["event"] == "rules.unusable"]
    assert sorted(told) == ["endpoint/e", "source/bad"]


def test_a_secret_that_no_key_opens_makes_its_object_unusable(
    configurator: Configurator, follow: Follow, changes: Changes
) -> None:
    """The reason names the place and the remedy, and no secret."""
    configurator.create("endpoint", "e", {"url": "http://h.example/", "secrets": ["my-secret"]}, who="t")
    follow(changes, key=sealing.generate())
    reason = changes.wait().unusable["endpoint/e"]
    assert "secrets[0]" in reason
    assert "no key in MADEIRA_SECRET_KEY opens it" in reason
    assert "my-secret" not in reason


def test_a_reference_from_before_to_what_is_ours_makes_its_object_unusable(
    configurator: Configurator, database_url: str, follow: Follow, changes: Changes
) -> None:
    """A row that was kept before such names were refused is not resolved, although the variable is set."""
    configurator.create("endpoint", "e", {"url": "http://h.example/", "headers": {"A": "env:FORMER"}}, who="t")
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE endpoint SET spec = replace(spec::text, 'FORMER', 'MADEIRA_SECRET_KEY')::jsonb")
    follow(changes, environ={"MADEIRA_SECRET_KEY": "guarded-value"})
    rules = changes.wait()
    assert rules.endpoint("e") is None
    assert "headers.A: the environment variable MADEIRA_SECRET_KEY may not be read" in rules.unusable["endpoint/e"]
    assert "guarded-value" not in repr(rules) + rules.unusable["endpoint/e"]


@pytest.mark.parametrize("missing", ["env:NOT_SET", "sealed under a lost key"])
def test_a_source_verifies_with_those_secrets_that_can_be_used(
    configurator: Configurator, follow: Follow, changes: Changes, missing: str
) -> None:
    """The missing one is told with its place, and that it is not the whole source; with none left it is the whole one."""
    key = KEY if missing.startswith("env:") else sealing.generate()
    configurator.create("source", "some", {"secrets": [missing, "env:HERE", missing, "env:HERE_TOO"]}, who="t")
    configurator.create("source", "none", {"secrets": [missing, missing]}, who="t")
    with capture_logs() as lines:
        follow(changes, key=key, environ={"HERE": "one", "HERE_TOO": "two"})
        rules = changes.wait()
    assert {name: source.secrets for name, source in rules.sources.items()} == {"some": ("one", "two")}
    assert "secrets[0]: " in rules.unusable["source/some"]
    assert "secrets[2]: " in rules.unusable["source/some"]
    assert "secrets[1]" not in rules.unusable["source/some"]
    assert rules.is_partly_usable("source/some")
    assert not rules.is_partly_usable("source/none")
    told = {line["what"]: line["event"] for line in lines if "unusable" in line["event"]}
    assert told == {"source/some": "rules.partly_unusable", "source/none": "rules.unusable"}


def test_an_endpoint_waits_when_one_of_its_secrets_is_missing(
    configurator: Configurator, follow: Follow, changes: Changes
) -> None:
    """A call with fewer signatures than configured would be refused by a receiver that knows only the missing secret."""
    configurator.create("endpoint", "e", {"url": "http://h.example/", "secrets": ["env:HERE", "env:NOT_SET"]}, who="t")
    follow(changes, environ={"HERE": "one"})
    assert changes.wait().endpoint("e") is None


def test_without_any_rules_yet_nobody_is_told_that_they_hold(follow: Follow) -> None:
    """A process that starts while Postgres is away has no rules from before."""
    nowhere = Database(url="postgresql://nobody@127.0.0.1:1/none", application="tests", pool_max=1)
    with capture_logs() as lines:
        follower = RulesFollower(database=nowhere, sealer=Sealer((KEY,)), period_s=0.01)
        follower.start()
        wait_until(lambda: "rules.not_followed" in [line["event"] for line in lines], what="the line in the log")
        follower.stop()
    [told] = [line["detail"] for line in lines if line["event"] == "rules.not_followed"]
    assert "there are none yet" in told
    assert "from before" not in told


def test_what_was_mended_is_usable_again(configurator: Configurator, follow: Follow, changes: Changes) -> None:
    """A corrected reference counts like any change."""
    configurator.create("endpoint", "e", {"url": "http://h.example/", "secrets": ["env:NOT_SET"]}, who="t")
    follow(changes, environ={"SET": "x"})
    assert changes.wait().endpoint("e") is None
    configurator.update("endpoint", "e", {"secrets": ["env:SET"]}, expected=None, who="t")
    rules = changes.wait()
    assert rules.unusable == {}
    assert rules.endpoint("e") is not None


def test_a_listener_that_fails_does_not_end_the_following(configurator: Configurator, follow: Follow) -> None:
    """An error of whoever is told is logged; the next change is told again."""
    told = Changes()

    def fail_first(rules: Rules) -> None:
        told(rules)
        if len(told.seen) == 1:
            raise RuntimeError("listener")

    follow(fail_first)
    told.wait()
    configurator.apply(source("two"), who="t")
    assert "two" in told.wait().sources


def test_without_postgres_a_process_has_no_rules_and_then_gets_them(own_postgres: OwnPostgres, follow: Follow) -> None:
    """A start while Postgres is away is no error: the rules come when it does, and whoever needs them earlier is told."""
    database = Database(url=own_postgres.url, application="tests", pool_max=2)
    database.open()
    try:
        make_configurator(database).apply(source("s"), who="t")
        own_postgres.stop()
        with capture_logs() as lines:
            follower = follow(database=database, period_s=0.1)
            wait_until(lambda: "rules.not_followed" in [line["event"] for line in lines], what="the line in the log")
            assert follower.current is None
            assert follower.version == 0
            with pytest.raises(StoreUnavailable, match="could not be read"):
                follower.need()
            own_postgres.start()
            assert follower.wait(30)
        assert "s" in follower.need().sources
        assert [line["event"] for line in lines].count("rules.not_followed") == 1
    finally:
        database.close()


def test_while_postgres_is_away_the_rules_from_before_hold(own_postgres: OwnPostgres, follow: Follow, changes: Changes) -> None:
    """Killed or frozen: the follower keeps what it has, says so once, and finds what changed when Postgres is back."""
    database = Database(url=own_postgres.url, application="tests", pool_max=2, statement_timeout_s=0.5)
    database.open()
    try:
        configurator = make_configurator(database)
        configurator.apply(source("one"), who="t")
        with capture_logs() as lines:
            follower = follow(changes, database=database, period_s=0.1)
            changes.wait()
            own_postgres.stall()
            wait_until(lambda: "rules.not_followed" in [line["event"] for line in lines], what="the line in the log")
            own_postgres.kill()
            assert "one" in follower.need().sources
            own_postgres.start()
            configurator.apply(source("two"), who="t")
            assert "two" in changes.wait(30).sources
        assert [line["event"] for line in lines].count("rules.followed_again") == 1
    finally:
        database.close()


def test_a_database_without_tables_is_told_and_waited_for(empty_database_url: str, follow: Follow) -> None:
    """A process that starts before the migration says what to do, to whoever needs rules too, and begins to work after it."""
    from madeira.store.migrate import migrate

    database = Database(url=empty_database_url, application="tests", pool_max=1)
    with capture_logs() as lines:
        follower = follow(database=database, period_s=0.1)
        wait_until(lambda: "rules.not_followed" in [line["event"] for line in lines], what="the line in the log")
        with pytest.raises(StoreUnavailable, match="run `madeira migrate`"):
            follower.need()
        migrate(empty_database_url)
        assert follower.wait(10)
    assert [line["error"] for line in lines if line["event"] == "rules.not_followed"] == [NO_TABLES]
    assert follower.need().sources == {}


def test_what_a_person_must_mend_is_told_though_something_else_was_told_before(postgres_url: str, follow: Follow) -> None:
    """First there is no database, then it has no tables: each is told once, however often it is found."""
    name = f"madeira_test_{uuid.uuid4().hex[:12]}"
    database = Database(url=with_database(postgres_url, name), application="tests", pool_max=1)
    with psycopg.connect(postgres_url, autocommit=True) as admin, capture_logs() as lines:
        follower = follow(database=database, period_s=0.01)
        wait_until(lambda: bool(lines), what="the first line")
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        wait_until(lambda: len(lines) > 1, what="the second line")
        follower.stop()
        admin.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))
    first, second = (str(line["error"]) for line in lines)
    assert f'database "{name}" does not exist' in first
    assert second == NO_TABLES


def test_the_level_of_the_log_follows_with_the_rules(
    database: Database, follow: Follow, changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for a time ends by itself; then each process has its own again."""
    asked: list[str | None] = []
    came = threading.Semaphore(0)

    def note(level: str | None) -> bool:
        if not asked or asked[-1] != level:
            asked.append(level)
            came.release()
        return False

    monkeypatch.setattr("madeira.routing.follow.set_level", note)
    follower = follow(changes)
    assert follower.wait(10)
    with database.connection() as conn:
        configuration.set_log_level(conn, "debug", for_s=3, who="t", why="t")
    for _ in range(2):
        assert came.acquire(timeout=10)
    assert asked == ["debug", None]
    with database.connection() as conn:
        assert configuration.log_level(conn) == (None, None)
        configuration.set_log_level(conn, "error", for_s=None, who="t", why="t")
        assert configuration.log_level(conn) == ("error", None)
