"""TLS that is wrong, slow or cut off: a failure with its own code, and no byte of the request where the certificate is bad."""

import socket
import ssl
import threading
from datetime import UTC, datetime

import pytest
import trustme

from madeira.delivery.client import Caller
from madeira.delivery.verdict import judge
from madeira.states import ErrorCode, Outcome
from tests.delivery.calling import CONNECTED_S, call, failure, resolving
from tests.delivery.samples import ENDPOINT, LOOPBACK
from tests.receiver import Answer as Scripted
from tests.receiver import Gate, Receiver


def server_context(ca: trustme.CA, *names: str, seen: list[str | None] | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(*names).configure_cert(context)
    if seen is not None:
        context.sni_callback = lambda _socket, name, _context: seen.append(name)
    return context


def test_tls_checks_the_name_and_tells_it(authority, ca_file):
    """SNI and certificate are those of the name, though the connection goes to an address; connections are kept too."""
    seen: list[str | None] = []
    with Receiver(tls=server_context(authority, "a.test", seen=seen)) as receiver:
        receiver.default(Scripted(body=b"[" + b"1," * 30_000 + b"1]"))
        with Caller(
            egress=LOOPBACK, max_connections=1, ca_file=ca_file, resolver=resolving(("127.0.0.1", receiver.port))
        ) as caller:
            for _ in range(3):
                answer = call(caller, f"https://a.test:{receiver.port}/", body=b"x" * 3_000_000)
                assert (answer.status, len(answer.body)) == (200, 60_003)
        assert seen == ["a.test"]
        assert receiver.calls[0].headers["host"] == f"a.test:{receiver.port}"
        assert receiver.connections == 1


def test_tls_to_an_address_checks_the_address(authority, ca_file):
    """A certificate may be for an address."""
    with (
        Receiver(tls=server_context(authority, "127.0.0.1")) as receiver,
        Caller(egress=LOOPBACK, max_connections=1, ca_file=ca_file) as caller,
    ):
        assert call(caller, receiver.url()).status == 200


@pytest.mark.parametrize("kind", ["another name", "another authority", "expired"])
def test_a_bad_certificate_gets_no_byte_of_the_request(kind, authority, ca_file):
    """The failure is tls, retryable, and says what is wrong."""
    ca = trustme.CA() if kind == "another authority" else authority
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if kind == "expired":
        ca.issue_cert("a.test", not_after=datetime(2020, 1, 1, tzinfo=UTC)).configure_cert(context)
    else:
        ca.issue_cert("b.test" if kind == "another name" else "a.test").configure_cert(context)
    with Receiver(tls=context) as receiver:
        with Caller(
            egress=LOOPBACK, max_connections=1, ca_file=ca_file, resolver=resolving(("127.0.0.1", receiver.port))
        ) as caller:
            failed = failure(caller, "https://a.test/")
        assert failed.error_code is ErrorCode.TLS
        assert judge(failed, ENDPOINT).outcome is Outcome.RETRYABLE
        assert {"another name": "mismatch", "another authority": "local issuer", "expired": "expired"}[kind] in failed.reason
        assert receiver.count() == 0


def test_a_port_without_tls_is_a_tls_failure(caller):
    """https to a plain port fails in the handshake."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)

        def plain() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=plain)
        thread.start()
        failed = failure(caller, f"https://127.0.0.1:{listener.getsockname()[1]}/")
        thread.join()
    assert failed.error_code is ErrorCode.TLS
    assert "wrong version" in failed.reason.lower()


def test_a_slow_answer_over_tls_ends_at_the_deadline(authority, ca_file):
    """The deadline holds inside TLS too."""
    with (
        Receiver(tls=server_context(authority, "127.0.0.1")) as receiver,
        Caller(egress=LOOPBACK, max_connections=1, ca_file=ca_file) as caller,
    ):
        for scripted, code in (
            (Scripted(drip_body_s=0.05, body=b"x" * 1000), ErrorCode.DEADLINE),
            (Scripted(hold=Gate()), ErrorCode.READ_TIMEOUT),
        ):
            receiver.default(scripted)
            assert failure(caller, receiver.url(), deadline_s=CONNECTED_S).error_code is code


def test_a_lost_answer_over_tls_is_a_reset(authority, ca_file):
    """A close without answer is one failed call, on a kept connection too."""
    with (
        Receiver(tls=server_context(authority, "127.0.0.1")) as receiver,
        Caller(egress=LOOPBACK, max_connections=1, ca_file=ca_file) as caller,
    ):
        call(caller, receiver.url("/good"))
        receiver.answer("/lost", Scripted(no_answer=True))
        assert failure(caller, receiver.url("/lost")).error_code is ErrorCode.RESET
        assert receiver.count("/lost") == 1


def test_an_unreadable_authority_stops_the_start(tmp_path):
    """A wrong path is found when the caller is made, not at the first call."""
    with pytest.raises(OSError, match="No such file"):
        Caller(egress=LOOPBACK, max_connections=1, ca_file=tmp_path / "none.pem")
