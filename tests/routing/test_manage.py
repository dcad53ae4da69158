"""Sources, endpoints and routes as they are changed, in a real database."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from madeira.errors import AlreadyThere, ConfigurationInvalid, InUse, NotThere, Stale
from madeira.routing.manage import Configurator
from tests.routing.whole import WHOLE, everything, fields_of, rows, version
from tests.store import making
from tests.system.harness import wait_until

# -- one object -----------------------------------------------------------------------------------------------------


def test_an_object_is_made_changed_and_removed(configurator: Configurator, database_url: str) -> None:
    """Each change counts once, raises both versions, and leaves one row in the audit."""
    made = configurator.create("endpoint", "e", {"url": "http://h.example/", "retry": {"max": 900}}, who="ann", why="new")
    assert (made.version, made.document) == (1, {"url": "http://h.example/", "retry": {"max": 900.0}})
    changed = configurator.update("endpoint", "e", {"retry": {"max": None, "jitter": 0}, "rate": 5}, expected=1, who="bob")
    assert (changed.version, changed.document["retry"], changed.document["rate"]) == (2, {"jitter": 0.0}, 5.0)
    configurator.delete("endpoint", "e", expected=2, who="cid", why="gone")
    with pytest.raises(NotThere, match="no endpoint 'e'"):
        configurator.get("endpoint", "e")
    audit = rows(database_url, "SELECT who, action, what, why, detail FROM audit ORDER BY id")
    assert [(a["who"], a["action"], a["what"], a["why"]) for a in audit] == [
        ("ann", "create", "endpoint e", "new"),
        ("bob", "update", "endpoint e", None),
        ("cid", "delete", "endpoint e", "gone"),
    ]
    assert audit[1]["detail"]["changed"] == ["rate", "retry.jitter", "retry.max"]
    assert audit[1]["detail"]["before"]["retry"] == {"max": 900.0}
    assert version(database_url) == 4


def test_a_change_that_changes_nothing_leaves_no_trace(configurator: Configurator, database_url: str) -> None:
    """Not in the audit, not in the versions."""
    configurator.create("source", "s", {"secrets": ["a-secret"], "rate": 5}, who="t")
    before = everything(database_url)
    same = configurator.update("source", "s", {"rate": 5, "secrets": ["a-secret"]}, expected=None, who="t")
    assert same.version == 1
    assert everything(database_url) == before


def test_a_change_to_an_old_version_is_refused(configurator: Configurator) -> None:
    """Of two people who read the same version the second one must look again."""
    configurator.create("source", "s", {"secrets": ["a-secret"]}, who="t")
    configurator.update("source", "s", {"rate": 1}, expected=1, who="t")
    with pytest.raises(Stale, match="version 2 by now, not 1"):
        configurator.update("source", "s", {"rate": 2}, expected=1, who="t")
    with pytest.raises(Stale):
        configurator.delete("source", "s", expected=1, who="t")
    assert configurator.get("source", "s").document["rate"] == 1.0


def test_of_changes_at_the_same_moment_one_wins(configurator: Configurator, database_url: str) -> None:
    """Four people change the same version at once: one change counts, three are refused, nothing is mixed."""
    configurator.create("source", "s", {"secrets": ["a-secret"]}, who="t")

    def change(n: int) -> bool:
        try:
            configurator.update("source", "s", {"rate": n + 1, "burst": n + 1}, expected=1, who=f"t{n}")
        except Stale:
            return False
        return True

    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(4) as pool:
        holder.execute("SELECT 1 FROM configuration FOR UPDATE")
        changes = [pool.submit(change, n) for n in range(4)]
        until_waiting(database_url, 4)
        holder.rollback()
        assert sorted(done.result() for done in changes) == [False, False, False, True]
    found = configurator.get("source", "s")
    assert found.version == 2
    assert found.document["rate"] == found.document["burst"]
    assert len(rows(database_url, "SELECT 1 FROM audit")) == 2


def until_waiting(database_url: str, count: int) -> None:
    """Wait until so many sessions of this database wait for a lock."""
    statement = """
        SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
    """
    wait_until(lambda: rows(database_url, statement)[0]["n"] == count, what="the waiting for the lock")


def test_two_files_at_the_same_moment_are_applied_one_after_the_other(configurator: Configurator, database_url: str) -> None:
    """Whichever comes last, the whole is that of one file: no route of one leads to an endpoint of the other."""
    text = '[[endpoint]]\nname = "{0}"\nurl = "http://{0}.example/"\n[[route]]\nname = "r"\nendpoint = "{0}"\n'
    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(2) as pool:
        holder.execute("SELECT 1 FROM configuration FOR UPDATE")
        applied = [pool.submit(configurator.apply, text.format(name), prune=True, who="t") for name in "ab"]
        until_waiting(database_url, 2)
        holder.rollback()
        differences = [done.result() for done in applied]
    (endpoint,), (route,) = configurator.list("endpoint"), configurator.list("route")
    assert route.document["endpoint"] == endpoint.name
    assert sorted(len(difference.removed) for difference in differences) == [0, 1], "the second one saw the first one's"


def test_a_name_is_given_once(configurator: Configurator) -> None:
    """A second object of a name is refused, and so is one that could not be named."""
    configurator.create("source", "s", {"secrets": ["a-secret"]}, who="t")
    with pytest.raises(AlreadyThere):
        configurator.create("source", "s", {"secrets": ["a-secret-too"]}, who="t")
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.create("source", "a b", {"secrets": ["a-secret-too"]}, who="t")
    assert fields_of(e) == ["name"]
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.update("source", "s", {"name": "t"}, expected=None, who="t")
    assert fields_of(e) == ["name"]


def test_the_built_in_endpoint_stays_as_it_is(configurator: Configurator) -> None:
    """It can neither be made again, nor changed, nor removed; routes may lead to it."""
    with pytest.raises(ConfigurationInvalid, match="built in"):
        configurator.create("endpoint", "callback", {"url": "{+target_uri}"}, who="t")
    with pytest.raises(ConfigurationInvalid, match="built in"):
        configurator.update("endpoint", "callback", {"rate": 1}, expected=None, who="t")
    with pytest.raises(ConfigurationInvalid, match="built in"):
        configurator.delete("endpoint", "callback", expected=None, who="t")
    configurator.create("route", "r", {"endpoint": "callback"}, who="t")


@pytest.mark.parametrize("value", ["a\0b", "a\ud800b"])
def test_a_text_that_cannot_be_kept_is_refused(configurator: Configurator, value: str) -> None:
    """What JSON can say and Postgres cannot keep is an error of the document, not of the store."""
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.create("route", "r", {"endpoint": "callback", "routing_key": value}, who="t")
    assert fields_of(e) == ["routing_key"]
    for field, document in (
        ("secrets[0]", {"secrets": ["long-enough" + value]}),
        ("headers.A", {"headers": {"A": value}}),
        ("client_certificate.key", {"client_certificate": {"chain": "env:CHAIN", "key": value}}),
    ):
        with pytest.raises(ConfigurationInvalid) as e:
            configurator.create("endpoint", "e", {"url": "http://h.example/"} | document, who="t")
        assert fields_of(e) == [field]


# -- what is in use -------------------------------------------------------------------------------------------------


def test_what_a_route_names_cannot_be_removed(configurator: Configurator) -> None:
    """Neither an endpoint nor a source leaves a route without it behind."""
    configurator.apply(WHOLE, who="t")
    for kind, name in (("endpoint", "ledger"), ("source", "billing")):
        with pytest.raises(InUse, match="z-first"):
            configurator.delete(kind, name, expected=None, who="t", unfinished="cancel")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.apply('[[route]]\nname = "z-first"\nendpoint = "ledger"\n', prune=True, who="t")
    assert fields_of(e) == ["route[z-first].endpoint"]


def test_an_endpoint_with_unfinished_deliveries_stays_unless_they_are_cancelled(
    configurator: Configurator, database_url: str
) -> None:
    """Refused with their number; together with the decision they end, their events are counted, and the audit says how many."""
    for name in ("a", "b"):
        configurator.create("endpoint", name, {"url": "http://h.example/"}, who="t")
    with psycopg.connect(database_url, autocommit=True) as conn:
        refs = [making.routed(conn, ("a", "b"))[0] for _ in range(30)]
        called = making.routed(conn, ("a",))[0]
        making.claimed(conn, called)
        with pytest.raises(InUse, match=r"a \(31\)"):
            configurator.delete("endpoint", "a", expected=1, who="t")
        with pytest.raises(InUse, match=r"a \(31\)"):
            configurator.apply("", prune=True, who="t")
        removed = configurator.delete("endpoint", "a", expected=1, who="ann", why="closed", unfinished="cancel")
        assert {ref.delivery_id for ref in removed.cancelled} == {ref.delivery_id for ref in refs}
        assert removed.requested == 1
        for ref in refs:
            assert making.delivery(conn, ref.delivery_id)["status"] == "cancelled"
            event = making.event(conn, ref.seq)
            assert (event["status"], event["unfinished"], event["cancelled"]) == ("delivering", 1, 1)
        assert making.delivery(conn, called.delivery_id)["cancel_requested_at"] is not None
    with pytest.raises(NotThere):
        configurator.get("endpoint", "a")
    (audit,) = rows(database_url, "SELECT who, why, detail FROM audit WHERE action = 'delete'")
    assert (audit["who"], audit["why"], audit["detail"]["cancelled"], audit["detail"]["requested"]) == ("ann", "closed", 30, 1)


def test_nothing_is_cancelled_for_an_endpoint_that_stays(configurator: Configurator, database_url: str) -> None:
    """Whether it can be removed is seen before the first delivery is touched."""
    configurator.create("endpoint", "a", {"url": "http://h.example/"}, who="t")
    configurator.create("route", "r", {"endpoint": "a"}, who="t")
    with psycopg.connect(database_url, autocommit=True) as conn:
        (ref,) = making.routed(conn, ("a",))
        for error, expected in ((InUse, None), (Stale, 7)):
            with pytest.raises(error):
                configurator.delete("endpoint", "a", expected=expected, who="t", unfinished="cancel")
        assert making.delivery(conn, ref.delivery_id)["status"] == "pending"
