"""Names: each address is tried, all within one deadline, and a resolver that hangs holds up nobody for longer."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from madeira.delivery.answer import CallFailed
from madeira.delivery.client import Caller
from madeira.delivery.resolve import MAX_LOOKUPS, Resolver
from madeira.delivery.verdict import judge
from madeira.states import ErrorCode, Outcome
from tests.delivery.calling import SHORT_S, call, failure, resolving
from tests.delivery.samples import ENDPOINT, LOOPBACK
from tests.receiver import black_hole_port, closed_port


def test_a_name_that_does_not_exist(caller):
    """A failed look-up can be tried again."""
    failed = failure(caller, "http://does-not-exist.invalid/")
    assert failed.error_code is ErrorCode.DNS
    assert "does-not-exist.invalid" in failed.reason
    assert judge(failed, ENDPOINT).outcome is Outcome.RETRYABLE


def test_a_name_is_connected_to_by_its_address(receiver):
    """The Host header keeps the name; the reason of a failure tells the address."""
    with Caller(egress=LOOPBACK, max_connections=1, resolver=resolving(("127.0.0.1", receiver.port))) as caller:
        assert call(caller, "http://some.test/").status == 200
        assert receiver.calls[0].headers["host"] == "some.test"
        receiver.stop()
        assert "some.test (127.0.0.1)" in failure(caller, "http://some.test/").reason


def test_the_second_address_is_tried_when_the_first_is_dead(receiver):
    """Refused at once, or dropped: each address gets its share of the time."""
    with closed_port() as closed, black_hole_port() as hole:
        for dead in (closed, hole):
            with Caller(
                egress=LOOPBACK, max_connections=1, resolver=resolving(("127.0.0.1", dead), ("127.0.0.1", receiver.port))
            ) as caller:
                assert call(caller, "http://some.test/", deadline_s=1.0).status == 200


def test_three_dead_addresses_end_at_one_deadline():
    """They share it; they do not add up."""
    with black_hole_port() as a, black_hole_port() as b, black_hole_port() as c:
        three = resolving(("127.0.0.1", a), ("127.0.0.1", b), ("127.0.0.1", c))
        with Caller(egress=LOOPBACK, max_connections=1, resolver=three) as caller:
            assert failure(caller, "http://some.test/", deadline_s=SHORT_S).error_code is ErrorCode.CONNECT_TIMEOUT


def test_a_resolver_that_hangs_costs_a_call_its_deadline_and_one_thread():
    """Ten calls for one name wait in one look-up, which the process does not wait for."""
    entered, go_on = threading.Semaphore(0), threading.Event()

    def hang(host: str, port: int, **options: object) -> list[object]:
        entered.release()
        go_on.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    before = set(threading.enumerate())
    with Caller(egress=LOOPBACK, max_connections=10, resolver=Resolver(getaddrinfo=hang)) as caller:
        with ThreadPoolExecutor(10) as pool:
            failed = [pool.submit(failure, caller, "http://some.test/", deadline_s=SHORT_S) for _ in range(10)]
        assert {each.result().error_code for each in failed} == {ErrorCode.DNS}
        assert entered.acquire(timeout=5)
        assert not entered.acquire(blocking=False), "only one look-up may have been made"
        hung = [thread for thread in threading.enumerate() if thread.name == "resolve some.test"]
        assert len(hung) == 1
        assert hung[0].daemon
        go_on.set()
        hung[0].join(10)
        assert set(threading.enumerate()) <= before
        assert "Temporary failure" in failure(caller, "http://some.test/").reason


def test_look_ups_are_bounded():
    """Names that hang take 64 threads and no more; further names fail at once, to be tried later."""
    go_on = threading.Event()

    def hang(host: str, port: int, **options: object) -> list[object]:
        go_on.wait(30)
        return []

    resolver = Resolver(getaddrinfo=hang)
    try:
        for number in range(MAX_LOOKUPS):
            with pytest.raises(CallFailed):
                resolver.resolve(f"n{number}.test", 80, 0.0)
        with pytest.raises(CallFailed, match=f"{MAX_LOOKUPS} other look-ups"):
            resolver.resolve("one.more.test", 80, 30)
    finally:
        go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("resolve"):
            thread.join(10)
