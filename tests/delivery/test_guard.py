"""Where calls go: no connection is made to what the policy denies, however it is spelled, named, redirected to or remembered."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from madeira import target
from madeira.delivery.answer import Answer, CallFailed
from madeira.delivery.client import Caller
from madeira.delivery.resolve import FRESH_S, Resolver
from madeira.delivery.verdict import judge
from madeira.egress import Egress
from madeira.states import ErrorCode, Outcome
from madeira.target import BadUrl
from tests.delivery.places import Names, watching
from tests.delivery.samples import ENDPOINT, LOOPBACK, post
from tests.receiver import Answer as Scripted
from tests.receiver import Receiver

DEFAULT = Egress()


@pytest.fixture
def canary():
    """A receiver on this machine, which must not be called."""
    with Receiver() as running:
        yield running


def call(caller: Caller, url: str) -> Answer:
    return caller.call(post(url), deadline_s=5)


def refusal(caller: Caller, url: str) -> CallFailed:
    """What a call that is denied fails with; nothing was connected to meanwhile."""
    with watching() as seen, pytest.raises(CallFailed) as caught:
        call(caller, url)
    assert seen.connected == []
    assert caught.value.error_code is ErrorCode.DENIED_BY_POLICY
    assert caught.value.reason.isprintable()
    assert judge(caught.value, ENDPOINT).outcome is Outcome.PERMANENT
    return caught.value


# Spellings

#: Hosts that some program takes for this machine, or for the metadata of a cloud, and that no URL may name.
NO_HOSTS = [
    "127.1",
    "127.0.1",
    "0177.0.0.1",
    "0177.0.0.01",
    "00000177.00.000.01",
    "0x7f.0.0.1",
    "0X7F.0x0.0x0.0x1",
    "0x7f.1",
    "0x7f000001",
    "0x000000007f000001",
    "017700000001",
    "2130706433",
    "4294967297",
    "18446744071562067969",
    "0",
    "0x0",
    "0.0",
    "127.0.0.1.",
    "127.0.0.1..",
    "127..0.0.1",
    "127.0.0.1.0",
    "127.0.0.256",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "169.254.43518",
    "%31%32%37.0.0.1",
    "127%2e0%2e0%2e1",
    "127.0.0.1%00.a.test",
    "127.0.0.1%2f.a.test",
    "127.0.0.1%20",
    "localhost%00",
    "%6c%6f%63%61%6c%68%6f%73%74",
    "\u2460\u2461\u2466.\u2460.\u2460.\u2460",
    "\uff11\uff12\uff17.\uff10.\uff10.\uff11",
    "\u0661\u0662\u0667.0.0.1",
    "\u00b9\u00b2\u2077.0.0.1",
    "127\u30020\u30020\u30021",
    "127\uff0e0\uff0e0\uff0e1",
    "127\uff610\uff610\uff611",
    "a\u3002test",
    "b\u00fccher\u3002test",
    "\uff4c\uff4f\uff43\uff41\uff4c\uff48\uff4f\uff53\uff54",
    "\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3",
    "localho\u017ft",
    "\u212aubernetes",
    "loc\u00adalhost",
    "localhost\u200b",
    "127.0.0.1\u2024",
    "xn--127-.0.0.1",
    "xn--localhost-.xn--",
    "127.0.0.1 ",
    " 127.0.0.1",
    "127.0.0.1\t",
    "127.0.0\n.1",
    "a.test\\@127.0.0.1",
    "127.0.0.1\\@a.test",
    "127.0.0.1\\.a.test",
    "a.test@b@127.0.0.1",
    "127.0.0.1@a.test@127.0.0.1",
    "a.test:80:127.0.0.1",
    "[::1",
    "::1]",
    "::1",
    "[::1].a.test",
    "a.test[::1]",
    "[::1]a.test",
    "[[::1]]",
    "[127.0.0.1]",
    "[localhost]",
    "[::1%25lo]",
    "[::1%lo]",
    "[fe80::1%25eth0]",
    "[::ffff:127.1]",
    "[::ffff:0177.0.0.1]",
    "[::ffff:0x7f.0.0.1]",
    "[0:0:0:0:0:0:0:0:1]",
    "[v1.127.0.0.1]",
    "[\u2460::]",
    "{127.0.0.1}",
    "127.0.0.1,a.test",
    "127.0.0.1;a.test",
    "127.0.0.1|a.test",
    "127.0.0.1&a.test",
    "$(hostname)",
    "a.test\x00127.0.0.1",
    "\ud800.test",
]

#: Hosts that a URL may name, and that the policy denies.
DENIED_HOSTS = [
    "127.0.0.1",
    "127.0.0.2",
    "127.255.255.254",
    "0.0.0.0",
    "x@127.0.0.1",
    "x:y@127.0.0.1",
    "a.test:80@127.0.0.1",
    "a.test%40@127.0.0.1",
    "%61.test@127.0.0.1",
    "[::1]",
    "[0::1]",
    "[0:0:0:0:0:0:0:1]",
    "[0000:0000:0000:0000:0000:0000:0000:0001]",
    "[::]",
    "[::0]",
    "x@[::1]",
    "[::ffff:127.0.0.1]",
    "[::FFFF:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:7f00:0001]",
    "[::ffff:0.0.0.0]",
    "[::127.0.0.1]",
    "[::7f00:1]",
    "[::ffff:0:127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b:1::127.0.0.1]",
    "[2002:7f00:1::]",
    "[2001:0:7f00:1::]",
    "[2001:0:808:808::80ff:fffe]",
    "[2a00::5efe:127.0.0.1]",
    "localhost",
    "LocalHost",
    "localhost.",
    "a.localhost",
    "ip6-localhost",
    "169.254.169.254",
    "[::ffff:169.254.169.254]",
    "[64:ff9b::a9fe:a9fe]",
    "[fd00:ec2::254]",
    "metadata.google.internal",
    "metadata.google.internal.",
    "169.254.170.2",
    "100.100.100.200",
    "[fe80::1]",
    "224.0.0.1",
    "255.255.255.255",
    "[ff02::1]",
]


@pytest.mark.parametrize("host", NO_HOSTS, ids=ascii)
def test_a_host_that_is_spelled_in_two_ways_is_no_url(host, canary):
    """No request can be made of it, so no call either."""
    for url in (f"http://{host}:{canary.port}/", f"http://{host}/", f"https://{host}/x?y"):
        with pytest.raises(BadUrl):
            target.parse(url)


@pytest.mark.parametrize("host", DENIED_HOSTS)
@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
def test_a_denied_host_is_neither_looked_up_nor_connected_to(host, scheme, canary):
    """With a port where somebody listens, and without one."""
    with Caller(egress=DEFAULT, max_connections=1) as caller:
        for url in (f"{scheme}://{host}:{canary.port}/", f"{scheme}://{host}/"):
            with watching() as seen:
                refusal(caller, url)
            assert seen.looked_up == []
    assert canary.connections == 0


@pytest.mark.parametrize("host", ["127.1", "0x7f.0.0.1", "017700000001", "2130706433", "127.0.0.1"])
def test_a_client_without_policy_reaches_the_canary_by_these(host, canary):
    """What the table is for: the system takes each of them for this machine, and the canary does count."""
    with socket.create_connection((host, canary.port), timeout=5):
        canary.wait_until(lambda: canary.connections == 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "x@127.0.0.1", "[::ffff:127.0.0.1]", "localhost"])
def test_what_the_operator_opens_is_called(host, canary):
    """The same URLs with a policy that allows this machine."""
    with Caller(egress=LOOPBACK, max_connections=1) as caller:
        assert call(caller, f"http://{host}:{canary.port}/").status == 200
    assert canary.count() == 1


# Names


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["0.0.0.0"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"],
        ["169.254.169.254"],
        ["10.0.0.1", "127.0.0.1"],
        ["127.0.0.1", "10.0.0.1"],
        ["203.0.113.10", "127.0.0.1"],
        ["2600::1", "10.0.0.1", "::1"],
        ["fe80::1%2", "10.0.0.1"],
    ],
    ids=" ".join,
)
def test_a_name_with_one_denied_address_is_not_called(addresses, canary):
    """Whatever its other addresses, and wherever in the list it stands: the next look-up may put it first."""
    names = Names(*addresses)
    with Caller(egress=DEFAULT, max_connections=1, resolver=names.resolver()) as caller:
        assert "some.test" in refusal(caller, f"http://some.test:{canary.port}/").reason
    assert names.asked == ["some.test"]
    assert canary.connections == 0


def test_a_name_that_becomes_internal_between_two_attempts_is_not_called(canary):
    """Each attempt looks at what the name has now: the first finds a receiver, the others this machine."""
    names = Names("127.0.0.2")
    with (
        socket.create_server(("127.0.0.2", canary.port)) as receiver,
        ThreadPoolExecutor(1) as pool,
        Caller(egress=Egress(allow=("127.0.0.2",)), max_connections=1, resolver=names.resolver()) as caller,
    ):
        accepted = pool.submit(_answer_one, receiver)
        assert call(caller, f"http://some.test:{canary.port}/").status == 200
        assert accepted.result(5) == 1
        names.addresses = ["127.0.0.1"]
        for _ in range(3):
            names.now += FRESH_S
            refusal(caller, f"http://some.test:{canary.port}/")
    assert len(names.asked) == 4
    assert canary.connections == 0


def test_one_attempt_makes_one_look_up_and_connects_to_what_it_found(canary):
    """A name server that answers differently the second time is not asked a second time."""
    asked = []

    def rebinding(host: str, port: int, **options: object) -> list[object]:
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "169.254.169.254"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    with Caller(egress=LOOPBACK, max_connections=1, resolver=Resolver(getaddrinfo=rebinding)) as caller, watching() as seen:
        assert call(caller, f"http://some.test:{canary.port}/").status == 200
    assert asked == ["some.test"]
    assert seen.looked_up == []
    assert seen.connected == [("127.0.0.1", canary.port)]


def test_a_name_that_does_not_exist_makes_no_connection(canary):
    """NXDOMAIN, no address at all, and a name server that is away: dns, to be tried again."""
    names = Names()
    with Caller(egress=LOOPBACK, max_connections=1, resolver=names.resolver()) as caller, watching() as seen:
        for failure in (None, socket.gaierror(socket.EAI_NONAME, "Name or service not known"), OSError("no name server")):
            names.failure = failure
            with pytest.raises(CallFailed) as caught:
                call(caller, f"http://some.test:{canary.port}/")
            assert caught.value.error_code is ErrorCode.DNS
            assert judge(caught.value, ENDPOINT).outcome is Outcome.RETRYABLE
    assert len(names.asked) == 3, "a failure is not remembered"
    assert seen.connected == []


# Kept connections


def test_a_kept_connection_is_used_only_while_its_name_leads_there():
    """The name has moved: a new connection goes to the new place, and the old one is closed."""
    names = Names("127.0.0.1")
    with Receiver() as old:
        with socket.create_server(("127.0.0.2", old.port)) as new, ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(_answer_one, new)
            with Caller(egress=LOOPBACK, max_connections=1, resolver=names.resolver()) as caller:
                url = f"http://some.test:{old.port}/"
                call(caller, url)
                call(caller, url)
                assert (old.count(), old.connections) == (2, 1)
                names.addresses = ["127.0.0.2"]
                names.now += FRESH_S
                assert call(caller, url).body == b"new"
                assert accepted.result(5) == 1
                old.wait_until(lambda: old.open_connections == 0)
        assert old.count() == 2


def _answer_one(listener: socket.socket) -> int:
    connection, _ = listener.accept()
    with connection:
        connection.recv(10_000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nnew")
    return 1


def test_a_kept_connection_is_not_used_once_its_name_is_denied(canary):
    """From the time when the name was good there is a connection; it carries nothing more."""
    names = Names("127.0.0.1")
    egress = Egress(allow=("127.0.0.1",))
    with Caller(egress=egress, max_connections=1, resolver=names.resolver()) as caller:
        url = f"http://some.test:{canary.port}/"
        call(caller, url)
        assert caller.idle_connections == 1
        for addresses in (["169.254.169.254"], ["127.0.0.1", "127.0.0.2"]):
            names.addresses = addresses
            names.now += FRESH_S
            refusal(caller, url)
    assert canary.count() == 1


def test_a_kept_connection_goes_on_where_a_name_has_several_addresses(canary):
    """Its peer is still among them, in whatever order."""
    names = Names("127.0.0.1")
    with Caller(egress=LOOPBACK, max_connections=1, resolver=names.resolver()) as caller:
        for addresses in (["127.0.0.1", "127.0.0.9"], ["127.0.0.9", "127.0.0.1"], ["127.0.0.1"]):
            names.addresses = addresses
            names.now += FRESH_S
            call(caller, f"http://some.test:{canary.port}/")
    assert (canary.count(), canary.connections, len(names.asked)) == (3, 1, 3)


def test_a_name_is_looked_up_once_in_a_while_and_an_address_never(canary):
    """A thousand calls in one moment take one look-up, and no thread."""
    names = Names("127.0.0.1")
    with Caller(egress=LOOPBACK, max_connections=1, resolver=names.resolver()) as caller:
        call(caller, f"http://some.test:{canary.port}/")
        before = set(threading.enumerate())
        for _ in range(500):
            call(caller, f"http://some.test:{canary.port}/")
            call(caller, canary.url())
        assert names.asked == ["some.test"]
        assert set(threading.enumerate()) <= before
        names.now += FRESH_S
        call(caller, f"http://some.test:{canary.port}/")
        assert len(names.asked) == 2


def test_the_names_that_are_remembered_are_bounded(monkeypatch):
    """The oldest is forgotten."""
    monkeypatch.setattr("madeira.delivery.resolve.MAX_KNOWN", 2)
    names = Names("10.0.0.1")
    resolver = names.resolver()
    for host in ("a.test", "b.test", "c.test", "b.test", "c.test", "a.test"):
        resolver.resolve(host, 80, 5)
    assert names.asked == ["a.test", "b.test", "c.test", "a.test"]


# Redirects and proxies


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 305, 307, 308])
@pytest.mark.parametrize(
    "form", ["http://127.0.0.1:{}/", "//127.0.0.1:{}/", "http://localhost:{}/", "http://[::ffff:127.0.0.1]:{}/"]
)
def test_no_redirect_reaches_the_canary(status, form, canary):
    """Location, Refresh, a list in the body: the answer is the end of the attempt, its status is told."""
    where = form.format(canary.port)
    headers = {"Location": where, "Refresh": f"0; url={where}", "Content-Location": where, "Link": f"<{where}>; rel=preload"}
    body = f'<meta http-equiv="refresh" content="0; url={where}"><a href="{where}">1</a>'
    with Receiver(default=Scripted(status=status, headers=headers, body=body)) as receiver:
        with Caller(egress=LOOPBACK, max_connections=1) as caller, watching() as seen:
            attempt = judge(call(caller, receiver.url()), ENDPOINT)
        assert seen.connected == [("127.0.0.1", receiver.port)]
        assert receiver.count() == 1
    assert (attempt.outcome, attempt.error_code, attempt.status_code) == (Outcome.UNKNOWN, f"http_{status}", status)
    assert where in (attempt.reason or "")
    assert canary.connections == 0


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_in_the_environment_changes_nothing(scheme, canary, monkeypatch):
    """What is denied stays denied, what is open is called directly, and the proxy hears of neither."""
    with Receiver() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url())
        for egress in (DEFAULT, LOOPBACK):
            with Caller(egress=egress, max_connections=1) as caller:
                with pytest.raises(CallFailed) as caught:
                    call(caller, f"{scheme}://169.254.169.254/")
                assert caught.value.error_code is ErrorCode.DENIED_BY_POLICY
        with Caller(egress=LOOPBACK, max_connections=1) as caller:
            assert call(caller, canary.url()).status == 200
        assert proxy.connections == 0


def test_ipv6_only_names_are_called():
    """A name whose only address is of the newer kind."""
    with Receiver(host="::1") as receiver:
        names = Names("::1")
        with Caller(egress=LOOPBACK, max_connections=1, resolver=names.resolver()) as caller:
            assert call(caller, f"http://six.test:{receiver.port}/").status == 200
        assert receiver.calls[0].headers["host"] == f"six.test:{receiver.port}"
