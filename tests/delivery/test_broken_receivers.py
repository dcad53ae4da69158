"""Receivers and networks that fail in every way: one failed call with its own code, and never a second one."""

import socket
import threading

import pytest

from madeira.delivery.client import Caller
from madeira.delivery.resolve import Resolver
from madeira.egress import Egress
from madeira.states import ErrorCode
from tests.delivery.calling import call, failure
from tests.delivery.samples import LOOPBACK
from tests.receiver import Answer as Scripted
from tests.receiver import closed_port


def test_a_refused_connection(caller):
    """Nobody listens."""
    with closed_port() as port:
        failed = failure(caller, f"http://127.0.0.1:{port}/")
    assert failed.error_code is ErrorCode.CONNECT_REFUSED
    assert f"127.0.0.1:{port}" in failed.reason


def test_an_address_that_cannot_be_reached(caller):
    """The kernel knows no way there; a kind of address that it does not know is the same."""
    with Caller(egress=Egress(allow=("255.255.255.255",)), max_connections=1) as everywhere:
        assert failure(everywhere, "http://255.255.255.255/").error_code is ErrorCode.UNREACHABLE

    def getaddrinfo(host: str, port: int, **options: object) -> list[object]:
        return [(socket.AF_APPLETALK, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))]

    with Caller(egress=LOOPBACK, max_connections=1, resolver=Resolver(getaddrinfo=getaddrinfo)) as other:
        assert failure(other, "http://some.test/").error_code is ErrorCode.UNREACHABLE


@pytest.mark.parametrize(
    "scripted",
    [
        Scripted(reset=True),
        Scripted(no_answer=True),
        Scripted(reset_after=5),
        Scripted(reset_after=90),
        Scripted(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", close_after=True),
    ],
    ids=["reset", "close", "reset in the head", "reset in the body", "close in the body"],
)
@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
def test_a_lost_answer_is_one_failed_call(receiver, caller, scripted, kept):
    """A receiver that read the request and hung up may have acted on it: it is not called again within the attempt."""
    if kept:
        call(caller, receiver.url("/warm"))
        assert caller.idle_connections == 1
    receiver.queue("/lost", scripted)
    assert failure(caller, receiver.url("/lost")).error_code is ErrorCode.RESET
    assert receiver.count("/lost") == 1
    assert receiver.connections == 1
    assert call(caller, receiver.url("/lost")).status == 200


@pytest.mark.parametrize("then", ["close", "wait"])
def test_an_answer_before_the_request_was_read_counts(caller, then):
    """A receiver may refuse a large body by its headers, and read no more: its 413 is the answer, and the connection is done."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        done = threading.Event()

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
                if then == "close":
                    connection.shutdown(socket.SHUT_WR)
                    # Some of it, and never all: whoever has sent everything may well keep the connection.
                    connection.recv(1_000_000)
                done.wait(10)

        thread = threading.Thread(target=refuse)
        thread.start()
        answer = call(caller, f"http://127.0.0.1:{listener.getsockname()[1]}/", body=b"x" * 20_000_000)
        done.set()
        thread.join()
    assert answer.status == 413
    assert answer.duration_s < 5
    assert caller.idle_connections == 0


@pytest.mark.parametrize(
    "raw", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x16" + b"\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"]
)
def test_something_that_is_not_http(receiver, caller, raw):
    """Another protocol on the port is a protocol error."""
    receiver.default(Scripted(raw=raw, close_after=True))
    assert failure(caller, receiver.url()).error_code is ErrorCode.PROTOCOL
