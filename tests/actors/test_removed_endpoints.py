"""An endpoint that is removed while events are on their way to it gets no delivery that nobody would ever end."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from madeira.broker.queues import ROUTE, Ensure
from madeira.records import PlannedDelivery
from madeira.routing.manage import Configurator
from madeira.states import FailureClass
from madeira.store import configuration, routing
from madeira.store.database import Database
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Receiver
from tests.store import making
from tests.store.waiting import until, waits_for_a_lock
from tests.system.harness import configurator, wait_until

#: To an endpoint that no test has.
GONE = PlannedDelivery("gone", "gone", ("gone",))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Connections of whoever changes the configuration."""
    database = Database(url=database_url, application="admin", pool_max=2)
    database.open()
    yield database
    database.close()


@pytest.fixture
def admin(database: Database) -> Configurator:
    """Who changes the configuration."""
    return configurator(database)


@pytest.fixture
def idle(make: Make) -> InProcess:
    """A process without a worker."""
    return make()


@pytest.fixture
def looker(database: Database) -> Iterator[making.Connection]:
    """A connection that looks at others; one inside a transaction would see the same moment again and again."""
    with database.connect() as conn:
        yield conn


def version(process: InProcess) -> int:
    return configuration.version(process.conn)


def remove(admin: Configurator, endpoint: str) -> None:
    """As a person does: the route first, then the endpoint with all that waits for it."""
    admin.delete("route", endpoint, expected=None, who="ann")
    admin.delete("endpoint", endpoint, expected=None, who="ann", why="the contract ended", unfinished="cancel")


def with_old_rules(make: Make, admin: Configurator) -> InProcess:
    """A worker that has not heard that the endpoint `a` is gone."""
    process = make()
    process.start()
    assert process.tools.rules.wait(10)
    process.tools.rules.stop()
    remove(admin, "a")
    return process


def posted(process: InProcess, **fields: object) -> int:
    """An event of the type that leads to `a`, queued to be routed; its number."""
    seq = making.accept(process.conn, event_type="a.b", **fields)
    process.queues.ensure([Ensure(ROUTE, str(seq))])
    wait_until(lambda: making.event(process.conn, seq)["status"] != "pending", what="the routing")
    return seq


def test_a_worker_that_has_not_heard_of_the_removal_makes_no_delivery(make: Make, admin: Configurator) -> None:
    """The event ends as if no route had led anywhere, and can be routed again."""
    process = with_old_rules(make, admin)
    event = making.event(process.conn, posted(process))
    assert (event["status"], event["reason"], event["deliveries"], event["unfinished"]) == ("dead", "unrouted", 0, 0)


def test_an_endpoint_made_again_by_the_same_name_gets_nothing_of_before(
    make: Make, admin: Configurator, receiver: Receiver
) -> None:
    """What was posted in between went nowhere."""
    process = with_old_rules(make, admin)
    posted(process)
    admin.create("endpoint", "a", {"url": receiver.url("/other")}, who="ann")
    assert process.conn.execute("SELECT count(*) FROM delivery").fetchone() == (0,)


def test_a_change_that_removes_nothing_loses_nothing(make: Make, admin: Configurator) -> None:
    """Plans made by the rules from before are carried out where their endpoint is still there."""
    process = make()
    process.start()
    assert process.tools.rules.wait(10)
    process.tools.rules.stop()
    admin.update("endpoint", "a", {"timeout": 7}, expected=None, who="ann")
    seq = posted(process)
    wait_until(lambda: making.event(process.conn, seq)["status"] == "succeeded", what="the delivery")


def test_of_several_planned_deliveries_those_live_whose_endpoint_is_there(idle: InProcess) -> None:
    """The built-in endpoint always is; one that would be born dead is left out like any other."""
    conn = idle.conn
    dead = PlannedDelivery("gone too", "gone too", (), FailureClass.TEMPLATE, "no such field")
    plans = [
        (making.accept(conn), [PlannedDelivery("a", "a", ("a",)), GONE, dead]),
        (making.accept(conn), [PlannedDelivery("callback", "callback@h:80")]),
        (making.accept(conn), [GONE, dead]),
    ]
    results = routing.route(conn, plans, made_for=version(idle) - 1)
    assert [(str(r.status), len(r.refs), len(r.dead)) for r in results] == [
        ("delivering", 1, 0),
        ("delivering", 1, 0),
        ("dead", 0, 0),
    ]
    assert conn.execute("SELECT endpoint FROM delivery ORDER BY 1").fetchall() == [("a",), ("callback",)]
    assert making.counts_agree(conn)


def test_events_routed_before_are_left_alone_whatever_the_configuration_is(idle: InProcess) -> None:
    """A second run, by old rules, names what the first one left unfinished."""
    [ref] = making.routed(idle.conn)
    [result] = routing.route(idle.conn, [(ref.seq, [GONE])], made_for=version(idle) - 1)
    assert result.status is None
    assert [r.delivery_id for r in result.refs] == [ref.delivery_id]


def test_routing_waits_for_a_removal_that_is_under_way(idle: InProcess, database: Database, looker: making.Connection) -> None:
    """Its plan is made by rules that the removal is just ending."""
    seq, made_for = making.accept(idle.conn), version(idle)

    def route() -> list[routing.RouteResult]:
        with database.connection() as conn:
            return routing.route(conn, [(seq, [PlannedDelivery("a", "a", ("a",))])], made_for=made_for)

    with ThreadPoolExecutor(1) as other:
        with idle.conn.transaction():
            configuration.lock(idle.conn, removes=True)
            routed = other.submit(route)
            until(lambda: waits_for_a_lock(looker, "admin"))
            configuration.delete(idle.conn, "endpoint", ["a"])
            configuration.raise_version(idle.conn)
        [result] = routed.result(10)
    assert (result.status, result.refs) == ("dead", [])


def test_a_removal_waits_for_what_is_being_routed_and_cancels_it(
    idle: InProcess, admin: Configurator, looker: making.Connection
) -> None:
    """The delivery is not committed when the removal begins, and is ended by it all the same."""
    seq = making.accept(idle.conn)
    with ThreadPoolExecutor(1) as other:
        with idle.conn.transaction():
            [result] = routing.route(idle.conn, [(seq, [PlannedDelivery("a", "a", ("a",))])], made_for=version(idle))
            removal = other.submit(remove, admin, "a")
            until(lambda: waits_for_a_lock(looker, "admin"))
        removal.result(10)
    assert making.delivery(idle.conn, result.refs[0].delivery_id)["status"] == "cancelled"
    assert making.event(idle.conn, seq)["status"] == "cancelled"


def test_a_change_that_removes_nothing_waits_for_no_routing(idle: InProcess, admin: Configurator) -> None:
    """Nor does routing wait for it."""
    made_for = version(idle)
    with idle.conn.transaction():
        routing.route(idle.conn, [(making.accept(idle.conn), [PlannedDelivery("a", "a")])], made_for=made_for)
        admin.update("endpoint", "a", {"timeout": 7}, expected=None, who="ann")
    assert version(idle) == made_for + 1
