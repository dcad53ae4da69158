"""TLS to a pinned address: name and certificate stay those of the URL, and a receiver that is another gets no byte of it."""

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from madeira.delivery.answer import Answer, CallFailed
from madeira.delivery.client import Caller
from madeira.delivery.verdict import judge
from madeira.records import ClientCertificate
from madeira.states import ErrorCode, Outcome
from tests.delivery.places import Names, watching
from tests.delivery.samples import ENDPOINT, LOOPBACK, post
from tests.receiver import Receiver

#: What a receiver that is not the right one must never see.
PAYLOAD = b'{"card": "4111111111111111"}'


def issued(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


def caller(ca_file: Path, *addresses: str) -> Caller:
    return Caller(egress=LOOPBACK, max_connections=4, ca_file=ca_file, resolver=Names(*addresses or ("127.0.0.1",)).resolver())


def call(who: Caller, url: str, certificate: ClientCertificate | None = None) -> Answer:
    return who.call(replace(post(url, PAYLOAD), client_certificate=certificate), deadline_s=5)


class Ear:
    """A TLS server that answers nothing and keeps every byte that it could decrypt, and every name that it was asked for."""

    def __init__(self, context: ssl.SSLContext, address: str = "127.0.0.1") -> None:
        self._context = context
        self._context.sni_callback = lambda _socket, name, _context: self.names.append(name)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self.names: list[str | None] = []
        self.heard = b""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(5)
        with connection, contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True) as secured:
            while data := secured.recv(10_000):
                self.heard += data

    def all_heard(self) -> bytes:
        """What it heard, once the client has gone."""
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()
        return self.heard


@contextlib.contextmanager
def answering(context: ssl.SSLContext, host: str = "127.0.0.1") -> Iterator[tuple[Receiver, list[str | None]]]:
    names: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    with Receiver(tls=context, host=host) as receiver:
        yield receiver, names


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.7", "::1"])
def test_the_right_receiver_is_told_its_name_and_gets_the_request(address, authority, ca_file):
    """By its IPv4 or its only IPv6 address; the Host header has the port."""
    with answering(issued(authority.issue_cert("a.test")), address) as (receiver, names):
        with caller(ca_file, address) as who:
            assert call(who, f"https://a.test:{receiver.port}/").status == 200
        [seen] = receiver.calls
    assert names == ["a.test"]
    assert seen.headers["host"] == f"a.test:{receiver.port}"
    assert seen.body == PAYLOAD


def test_the_name_decides_which_certificate_is_asked_for(authority, ca_file):
    """One address, two names, two certificates: as at any hosting company."""
    contexts = {name: issued(authority.issue_cert(name)) for name in ("a.test", "b.test")}
    front = issued(authority.issue_cert("front.test"))

    def choose(sock: ssl.SSLObject | ssl.SSLSocket, name: str | None, _context: ssl.SSLContext) -> None:
        sock.context = contexts[name or ""]

    front.sni_callback = choose
    with Receiver(tls=front) as receiver, caller(ca_file) as who:
        for name in ("a.test", "b.test", "a.test"):
            assert call(who, f"https://{name}:{receiver.port}/").status == 200
        assert receiver.connections == 2


def test_a_name_with_a_dot_at_its_end_is_checked_without_it(authority, ca_file):
    """Certificates never have the dot."""
    with answering(issued(authority.issue_cert("a.test"))) as (receiver, names), caller(ca_file) as who:
        assert call(who, f"https://a.test.:{receiver.port}/").status == 200
    assert names == ["a.test"]


def test_an_address_in_the_url_is_checked_and_no_name_is_told(authority, ca_file):
    """RFC 6066 has no SNI for addresses."""
    with answering(issued(authority.issue_cert("127.0.0.1"))) as (receiver, names), caller(ca_file) as who:
        assert call(who, receiver.url()).status == 200
    assert names == [None]


def _self_signed() -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a.test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - datetime.timedelta(1), now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("a.test")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(Encoding.PEM) + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with trustme.Blob(pem).tempfile() as path:
        context.load_cert_chain(path)
    return context


def _wrong(kind: str, authority: trustme.CA) -> ssl.SSLContext:
    past, future = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2090, 1, 1, tzinfo=datetime.UTC)
    match kind:
        case "another name":
            return issued(authority.issue_cert("b.test"))
        case "a wildcard above":
            return issued(authority.issue_cert("*.a.test"))
        case "the address instead of the name":
            return issued(authority.issue_cert("127.0.0.1"))
        case "only a common name":
            return issued(authority.issue_cert("b.test", common_name="a.test"))
        case "expired":
            return issued(authority.issue_cert("a.test", not_after=past))
        case "not yet valid":
            return issued(authority.issue_cert("a.test", not_before=future, not_after=future + datetime.timedelta(1)))
        case "another authority":
            return issued(trustme.CA().issue_cert("a.test"))
        case "self-signed":
            return _self_signed()
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("another name", "mismatch"),
        ("a wildcard above", "mismatch"),
        ("the address instead of the name", "mismatch"),
        ("only a common name", "mismatch"),
        ("expired", "expired"),
        ("not yet valid", "not yet valid"),
        ("another authority", "local issuer"),
        ("self-signed", "self-signed"),
    ],
)
def test_a_wrong_certificate_gets_no_byte_of_the_request(kind, reason, authority, ca_file):
    """The failure is tls, says what is wrong, and is tried again: certificates get renewed."""
    ear = Ear(_wrong(kind, authority))
    with caller(ca_file) as who, pytest.raises(CallFailed) as caught:
        call(who, f"https://a.test:{ear.port}/")
    assert ear.all_heard() == b""
    assert ear.names == ["a.test"]
    assert caught.value.error_code is ErrorCode.TLS
    assert reason in caught.value.reason
    assert judge(caught.value, ENDPOINT).outcome is Outcome.RETRYABLE


def test_the_ear_hears_what_the_right_receiver_gets(authority, ca_file):
    """What the test above rests on: with the right certificate the payload does arrive there."""
    ear = Ear(issued(authority.issue_cert("a.test")))
    with caller(ca_file) as who, pytest.raises(CallFailed):
        who.call(post(f"https://a.test:{ear.port}/", PAYLOAD), deadline_s=0.5)
    assert ear.all_heard().endswith(PAYLOAD)


def test_a_usual_root_is_not_trusted_for_less(authority):
    """Without the test's authority its certificates are not good: nothing switches the check off."""
    ear = Ear(issued(authority.issue_cert("a.test")))
    with Caller(egress=LOOPBACK, max_connections=1, resolver=Names("127.0.0.1").resolver()) as who, pytest.raises(CallFailed):
        call(who, f"https://a.test:{ear.port}/")
    assert ear.all_heard() == b""


def test_an_authority_of_ones_own_is_named_in_the_environment(authority, ca_file, monkeypatch):
    """As for other programs that use OpenSSL; the usual roots go on to be trusted."""
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    resolver = Names("127.0.0.1").resolver()
    with (
        answering(issued(authority.issue_cert("a.test"))) as (receiver, _),
        Caller(egress=LOOPBACK, max_connections=1, resolver=resolver) as who,
    ):
        assert call(who, f"https://a.test:{receiver.port}/").status == 200
        trusted = who._context(None).get_ca_certs()
    assert len(trusted) > 50


# Client certificates


def shown(certificate: trustme.LeafCert) -> ClientCertificate:
    chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems).decode()
    return ClientCertificate(chain=chain, key=certificate.private_key_pem.bytes().decode())


def serial(certificate: ClientCertificate) -> int:
    return x509.load_pem_x509_certificates(certificate.chain.encode())[0].serial_number


@pytest.fixture
def asking(authority):
    """A receiver that asks for a client certificate, and takes calls without one too."""
    context = issued(authority.issue_cert("a.test"))
    context.verify_mode = ssl.CERT_OPTIONAL
    authority.configure_trust(context)
    with Receiver(tls=context) as receiver:
        yield receiver


def test_each_endpoint_shows_its_own_certificate(asking, authority, ca_file):
    """Connections are kept, and none is shared by two that show different ones, or one and none."""
    one, two = shown(authority.issue_cert("one.test")), shown(authority.issue_cert("two.test"))
    order = [one, two, None, one, None, two, replace(one), two]
    with caller(ca_file) as who:
        for certificate in order:
            assert call(who, f"https://a.test:{asking.port}/", certificate).status == 200
    expected = [serial(c) if c else None for c in order]
    assert [int(c.client_serial, 16) if c.client_serial else None for c in asking.calls] == expected
    assert asking.connections == 3
    by_connection = {(c.connection, c.client_serial) for c in asking.calls}
    assert len(by_connection) == 3


def test_a_receiver_that_insists_on_a_certificate_is_called_with_one_only(authority, ca_file):
    """Without one the failure is tls, whichever side of the handshake it shows on."""
    context = issued(authority.issue_cert("a.test"))
    context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(context)
    with Receiver(tls=context) as receiver, caller(ca_file) as who:
        url = f"https://a.test:{receiver.port}/"
        assert call(who, url, shown(authority.issue_cert("one.test"))).status == 200
        for certificate in (None, shown(trustme.CA().issue_cert("stranger.test"))):
            with pytest.raises(CallFailed) as caught:
                call(who, url, certificate)
            assert caught.value.error_code in (ErrorCode.TLS, ErrorCode.RESET)
        assert receiver.count() == 1


def test_a_certificate_that_cannot_be_used_is_a_failure_for_good_and_connects_to_nothing(asking, authority, ca_file):
    """It is named, and its key is not."""
    good, other = shown(authority.issue_cert("one.test")), shown(authority.issue_cert("two.test"))
    for bad in (
        ClientCertificate(chain="", key=good.key),
        ClientCertificate(chain=good.chain, key="hunter2"),
        ClientCertificate(chain=good.chain, key=other.key),
    ):
        with caller(ca_file) as who, watching() as seen, pytest.raises(CallFailed) as caught:
            call(who, f"https://a.test:{asking.port}/", bad)
        assert caught.value.error_code is ErrorCode.TEMPLATE
        assert judge(caught.value, ENDPOINT).outcome is Outcome.PERMANENT
        assert "client certificate" in caught.value.reason
        assert "hunter2" not in caught.value.reason
        assert seen.connected == []


def test_more_certificates_than_are_kept_work_too(asking, authority, ca_file, monkeypatch):
    """The settings of the one that was not used for longest are made again."""
    monkeypatch.setattr("madeira.delivery.client.MAX_CONTEXTS", 2)
    many = [shown(authority.issue_cert(f"n{number}.test")) for number in range(4)]
    with Caller(egress=LOOPBACK, max_connections=2, ca_file=ca_file, resolver=Names("127.0.0.1").resolver()) as who:
        for certificate in (*many, *many):
            assert call(who, f"https://a.test:{asking.port}/", certificate).status == 200
    assert [int(c.client_serial or "0", 16) for c in asking.calls] == [serial(c) for c in (*many, *many)]


def test_a_request_does_not_show_its_key(authority):
    """Neither printed nor logged."""
    certificate = shown(authority.issue_cert("one.test"))
    request = replace(post("https://a.test/"), client_certificate=certificate)
    assert "PRIVATE" not in repr(request)
    assert "CERTIFICATE" not in repr(certificate)
