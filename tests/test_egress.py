"""The policy of what may be called: which addresses and names, in which disguise, and who wins."""

import re
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from madeira.egress import Egress
from madeira.errors import SettingsError
from madeira.settings import load

DEFAULT = Egress()

#: Denied unless opened, with a word that the refusal must hold.
DENIED = {
    "127.0.0.1": "loopback",
    "127.255.255.255": "loopback",
    "::1": "loopback",
    "0.0.0.0": "unspecified",
    "0.1.2.3": "unspecified",
    "::": "unspecified",
    "169.254.0.1": "link-local",
    "fe80::1": "link-local",
    "fe80::1%eth0": "link-local",
    "febf:ffff::1": "link-local",
    "169.254.169.254": "metadata",
    "169.254.170.2": "metadata",
    "fd00:ec2::254": "metadata",
    "fd00:ec2::23": "metadata",
    "fd20:ce::254": "metadata",
    "100.100.100.200": "metadata",
    "168.63.129.16": "metadata",
    "192.0.0.192": "metadata",
    "192.0.0.1": "reserved",
    "192.88.99.1": "reserved",
    "224.0.0.1": "multicast",
    "239.255.255.250": "multicast",
    "ff02::1": "multicast",
    "ff0e::1": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.254": "reserved",
    "255.255.255.255": "broadcast",
    "100::1": "reserved",
    "fec0::1": "reserved",
    "4000::1": "reserved",
    "5f00::1": "reserved",
    "::2": "reserved",
    # IPv4 inside IPv6
    "::ffff:127.0.0.1": "loopback",
    "::ffff:7f00:1": "loopback",
    "0:0:0:0:0:ffff:a9fe:a9fe": "metadata",
    "::ffff:0.0.0.0": "unspecified",
    "::127.0.0.1": "reserved",
    "::ffff:0:127.0.0.1": "reserved",
    "64:ff9b::127.0.0.1": "loopback",
    "64:ff9b::a9fe:a9fe": "metadata",
    "64:ff9b::e000:1": "multicast",
    "64:ff9b:1::7f00:1": "reserved",
    "64:ff9b:1:ffff::1": "reserved",
    "2002:7f00:1::": "loopback",
    "2002:7f00:1:1234::5678": "loopback",
    "2002:a9fe:a9fe::1": "metadata",
    "2001:0:7f00:1::": "loopback",
    "2001:0:808:808:0:0:80ff:fffe": "loopback",
    "2001::a9fe:a9fe:0:0:f7f7:f7f7": "metadata",
    "2001:db8::5efe:127.0.0.1": "loopback",
    "2001:db8::200:5efe:169.254.169.254": "metadata",
    "fd00::5efe:7f00:1": "loopback",
}

OPEN = [
    "8.8.8.8",
    "1.0.0.1",
    "126.255.255.255",
    "128.0.0.1",
    "223.255.255.255",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "169.253.255.255",
    "169.255.0.1",
    "192.0.1.1",
    "203.0.113.10",
    "198.18.0.1",
    "2600::1",
    "2a00:1450::1",
    "2001:db8::1",
    "fc00::1",
    "fd12:3456::1",
    "::ffff:10.0.0.1",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "64:ff9b::10.0.0.1",
    "2002:808:808::1",
    "2001:0:808:808::f7f7:f7f7",
    "fd00::5efe:10.0.0.1",
]


@pytest.mark.parametrize("address", DENIED)
def test_what_only_this_machine_should_reach_is_denied(address):
    """As an address in the URL, in brackets, and as what a name leads to; the refusal says what it is."""
    for refused in (
        DEFAULT.refusal_of_host(address),
        DEFAULT.refusal_of_host(f"[{address}]"),
        DEFAULT.refusal(address, address),
        DEFAULT.refusal("some.test", address),
    ):
        assert refused is not None
        assert DENIED[address] in refused


@pytest.mark.parametrize("address", OPEN)
def test_ordinary_and_private_addresses_are_open(address):
    """Also where IPv4 is inside IPv6; ranges for documentation and benchmarks too."""
    assert DEFAULT.refusal_of_host(address) is None
    assert DEFAULT.refusal("some.test", address) is None


@pytest.mark.parametrize(
    "name",
    [
        "localhost",
        "LOCALHOST",
        "localhost.",
        "a.localhost",
        "a.b.localhost.",
        "localhost.localdomain",
        "ip6-localhost",
        "metadata.google.internal",
        "Metadata.Google.Internal.",
        "metadata.goog",
        "instance-data.ec2.internal",
    ],
)
def test_known_names_are_denied_without_a_look_up(name):
    """Whatever they resolve to."""
    assert DEFAULT.refusal_of_host(name) is not None
    assert DEFAULT.refusal(name, "8.8.8.8") is not None


@pytest.mark.parametrize("name", ["some.test", "localhost.test", "notlocalhost", "metadata", "a.internal", "xn--bcher-kva.test"])
def test_other_names_are_judged_by_their_addresses(name):
    """Nothing is known against them before."""
    assert DEFAULT.refusal_of_host(name) is None
    assert DEFAULT.refusal(name, "10.0.0.1") is None
    assert DEFAULT.refusal(name, "127.0.0.1") is not None


@pytest.mark.parametrize("host", ["0", "127.1", "2130706433", "0x7f.1", "0x7f000001", "017700000001", "127.0.0.01", "a.1", "0x"])
def test_a_number_that_is_no_address_is_denied(host):
    """The system's resolver would make one of it."""
    assert "number" in (DEFAULT.refusal_of_host(host) or "")


@pytest.mark.parametrize("address", ["", "x", "127.0.0.1:80", "1.2.3", "::g"])
def test_what_is_no_address_is_not_connected_to(address):
    """A look-up gives addresses; anything else is a fault."""
    assert "no IP address" in (DEFAULT.refusal("some.test", address) or "")


# Disguises


def in_disguise(value: int) -> list[str]:
    client = value ^ 0xFFFF_FFFF
    return [
        str(IPv6Address(0xFFFF << 32 | value)),
        str(IPv6Address(0x64_FF9B << 96 | value)),
        str(IPv6Address(0x2002 << 112 | value << 80 | 1)),
        str(IPv6Address(0x2001_0000 << 96 | value << 64 | 0xF7F7_F7F7)),
        str(IPv6Address(0x2001_0000 << 96 | 0x0808_0808 << 64 | client)),
        str(IPv6Address(0x2A00 << 112 | 0x5EFE << 32 | value)),
        str(IPv6Address(0x2A00 << 112 | 0x0200_5EFE << 32 | value)),
    ]


@given(st.integers(0, 2**32 - 1) | st.sampled_from([int(ip_address(a)) for a in DENIED if "." in a and ":" not in a]))
@example(0x7F00_0001)
@example(0xA9FE_A9FE)
@example(0x0A00_0001)
def test_an_ipv4_address_is_judged_alike_in_every_disguise(value):
    """Mapped, NAT64, 6to4, Teredo and ISATAP: open exactly when the plain one is."""
    plain = DEFAULT.refusal("some.test", str(IPv4Address(value))) is None
    assert [DEFAULT.refusal("some.test", each) is None for each in in_disguise(value)] == [plain] * 7


_UNICAST = [IPv6Network(n) for n in ("2000::/3", "fc00::/7", "64:ff9b::/96", "::ffff:0:0/96")]


@given(st.integers(0, 2**128 - 1))
def test_no_ipv6_address_outside_of_unicast_is_open(value):
    """What is not given out for unicast today may be anything tomorrow."""
    address = IPv6Address(value)
    if not any(address in network for network in _UNICAST):
        assert DEFAULT.refusal("some.test", str(address)) is not None


@given(st.text(max_size=80), st.text(max_size=80))
@example("[", "]")
@example("%", "%")
def test_whatever_the_host_a_refusal_is_one_line_or_none(host, address):
    """Nothing is raised, and what is no address is refused."""
    for refused in (DEFAULT.refusal_of_host(host), DEFAULT.refusal(host, address)):
        assert refused is None or isinstance(refused, str)
    if host.isprintable() and address.isprintable():
        assert "\n" not in (DEFAULT.refusal(host, address) or "")


# Entries of the operator


@pytest.mark.parametrize(
    ("allow", "deny", "host", "address", "open_"),
    [
        # one address of this machine
        (["127.0.0.1"], [], "127.0.0.1", "127.0.0.1", True),
        (["127.0.0.1"], [], "127.0.0.2", "127.0.0.2", False),
        (["127.0.0.1"], [], "some.test", "127.0.0.1", True),
        (["127.0.0.1"], [], "localhost", "127.0.0.1", True),
        (["127.0.0.1"], [], "localhost", "::1", False),
        (["127.0.0.1"], [], "some.test", "::ffff:127.0.0.1", True),
        (["127.0.0.1"], [], "some.test", "2002:7f00:1::", True),
        (["127.0.0.0/8", "::1"], [], "localhost", "::1", True),
        (["::ffff:127.0.0.1"], [], "127.0.0.1", "127.0.0.1", True),
        (["localhost"], [], "localhost", "127.0.0.1", True),
        (["localhost"], [], "localhost", "::1", True),
        (["localhost"], [], "localhost", "169.254.169.254", False),
        (["localhost"], [], "127.0.0.1", "127.0.0.1", False),
        (["localhost"], [], "some.test", "127.0.0.1", False),
        (["*.localhost"], [], "a.localhost", "127.0.0.1", True),
        (["*.localhost"], [], "localhost", "127.0.0.1", False),
        # a whole range does not open what is special in it
        (["*"], [], "some.test", "127.0.0.1", False),
        (["0.0.0.0/0", "::/0"], [], "some.test", "169.254.169.254", False),
        (["169.254.0.0/16"], [], "some.test", "169.254.1.1", True),
        (["169.254.0.0/16"], [], "some.test", "169.254.169.254", False),
        (["169.254.169.254"], [], "some.test", "169.254.169.254", True),
        (["64:ff9b:1::/48"], [], "some.test", "64:ff9b:1::8.8.8.8", True),
        (["64:ff9b:1::/48"], [], "some.test", "64:ff9b:1::127.0.0.1", False),
        (["2002::/16"], [], "some.test", "2002:7f00:1::", False),
        (["::/96"], [], "some.test", "::127.0.0.1", False),
        # a name does not open it either
        (["some.test"], [], "some.test", "127.0.0.1", False),
        (["*.test"], [], "some.test", "::1", False),
        (["metadata.google.internal"], [], "metadata.google.internal", "169.254.169.254", False),
        (["*.internal"], [], "metadata.google.internal", "10.0.0.1", False),
        (["metadata.google.internal", "169.254.169.254"], [], "metadata.google.internal", "169.254.169.254", True),
        # a part of a private range is denied
        ([], ["10.66.0.0/16"], "some.test", "10.66.1.1", False),
        ([], ["10.66.0.0/16"], "some.test", "10.67.1.1", True),
        ([], ["10.66.0.0/16"], "10.66.1.1", "10.66.1.1", False),
        ([], ["10.66.0.0/16"], "some.test", "::ffff:10.66.1.1", False),
        ([], ["10.66.0.0/16"], "some.test", "64:ff9b::10.66.1.1", False),
        ([], ["::ffff:10.66.0.0/112"], "some.test", "10.66.1.1", False),
        (["10.66.7.0/24"], ["10.66.0.0/16"], "some.test", "10.66.7.1", True),
        (["10.66.7.0/24"], ["10.66.0.0/16", "10.66.7.9"], "some.test", "10.66.7.9", False),
        (["10.66.0.0/16"], ["10.66.0.0/16"], "some.test", "10.66.7.9", False),
        ([], ["fd00::/8"], "some.test", "fd12::1", False),
        (["127.0.0.0/8"], ["127.0.0.2"], "some.test", "127.0.0.2", False),
        # everything but a list
        (["10.0.0.0/8"], ["*"], "some.test", "10.1.2.3", True),
        (["10.0.0.0/8"], ["*"], "some.test", "8.8.8.8", False),
        (["10.0.0.0/8"], ["0.0.0.0/0", "::/0"], "some.test", "2600::1", False),
        (["ledger.internal"], ["*"], "ledger.internal", "10.1.2.3", True),
        (["ledger.internal"], ["*"], "other.internal", "10.1.2.3", False),
        (["ledger.internal"], ["*"], "10.1.2.3", "10.1.2.3", False),
        (["*.internal"], ["*"], "a.b.internal", "8.8.8.8", True),
        (["*.internal"], ["*"], "internal", "8.8.8.8", False),
        (["*.internal"], ["*"], "a.internal", "127.0.0.1", False),
        # an exact name lifts every denial of its addresses, a pattern only that of everything
        (["ledger.internal"], ["10.66.0.0/16"], "ledger.internal", "10.66.1.1", True),
        (["*.internal"], ["10.66.0.0/16"], "ledger.internal", "10.66.1.1", False),
        (["*.internal"], ["*", "10.66.0.0/16"], "ledger.internal", "10.66.1.1", False),
        # names among themselves
        ([], ["*.evil.test"], "a.evil.test", "8.8.8.8", False),
        ([], ["*.evil.test"], "evil.test", "8.8.8.8", True),
        ([], ["*.Evil.Test."], "A.EVIL.test.", "8.8.8.8", False),
        (["good.evil.test"], ["*.evil.test"], "good.evil.test", "8.8.8.8", True),
        (["*.good.evil.test"], ["*.evil.test"], "a.good.evil.test", "8.8.8.8", True),
        (["*.test"], ["*.evil.test"], "a.evil.test", "8.8.8.8", False),
        (["a.test"], ["a.test"], "a.test", "8.8.8.8", False),
        (["8.8.8.8"], ["a.test"], "a.test", "8.8.8.8", False),
        ([], ["web-?.test"], "web-1.test", "8.8.8.8", False),
        ([], ["web-?.test"], "web-12.test", "8.8.8.8", True),
    ],
)
def test_the_most_specific_entry_decides_and_a_denial_wins_a_tie(allow, deny, host, address, open_):
    """Names first, then addresses; what is built in yields to an address or network that is at least as specific."""
    refused = Egress(allow=tuple(allow), deny=tuple(deny)).refusal(host, address)
    assert (refused is None) is open_, refused


@given(st.permutations(["10.66.7.0/24", "10.0.0.0/8", "ledger.internal", "127.0.0.1", "*.internal"]))
def test_the_order_of_entries_means_nothing(allow):
    """A list is a set."""
    egress = Egress(allow=tuple(allow), deny=("*", "10.66.0.0/16", "x.internal"))
    hosts = ["ledger.internal", "x.internal", "y.internal", "some.test"]
    addresses = ["10.66.7.1", "10.66.8.1", "10.1.1.1", "127.0.0.1", "8.8.8.8"]
    open_ = {(h, a) for h in hosts for a in addresses if egress.refusal(h, a) is None}
    assert open_ == {
        *(("ledger.internal", a) for a in addresses),
        *(("y.internal", a) for a in addresses if a != "10.66.8.1"),
        *(("some.test", a) for a in ("10.66.7.1", "10.1.1.1", "127.0.0.1")),
    }


def test_where_only_names_are_allowed_no_other_name_is_looked_up():
    """Its look-up would tell its name server that somebody is here."""
    egress = Egress(allow=("*.internal",), deny=("*",))
    assert egress.refusal_of_host("a.internal") is None
    assert "MADEIRA_EGRESS_ALLOW" in (egress.refusal_of_host("some.test") or "")
    assert Egress(allow=("*.internal", "10.0.0.0/8"), deny=("*",)).refusal_of_host("some.test") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "a.localhost", "2002:7f00:1::"])
def test_the_remedy_for_this_machine_works_as_it_is_told(host):
    """The refusal ends in a setting; with exactly that the call is allowed."""
    refused = DEFAULT.refusal_of_host(host) or ""
    [remedy] = re.findall(r"allow it with MADEIRA_EGRESS_ALLOW=(\S+)$", refused)
    egress = Egress(allow=load({"MADEIRA_EGRESS_ALLOW": remedy}).egress_allow)
    assert egress.refusal_of_host(host) is None
    if "localhost" in host:
        assert egress.refusal(host, "127.0.0.1") is egress.refusal(host, "::1") is None


def test_the_remedy_for_a_name_of_this_machine_opens_both_its_addresses():
    """Whoever has opened one is not told of the other one only, to be told of the first next time."""
    for opened, found in (("127.0.0.1", "::1"), ("::1", "127.0.0.1")):
        refused = Egress(allow=(opened,)).refusal("localhost", found) or ""
        assert refused.endswith("MADEIRA_EGRESS_ALLOW=127.0.0.1,::1")


def test_a_refusal_names_the_entry_that_denies():
    """Whoever reads it is on call, and looks for the line to change."""
    egress = Egress(deny=("10.66.0.0/16", "*.evil.test"))
    assert "MADEIRA_EGRESS_DENY (10.66.0.0/16)" in (egress.refusal("some.test", "10.66.1.1") or "")
    assert "MADEIRA_EGRESS_DENY (*.evil.test)" in (egress.refusal_of_host("a.evil.test") or "")


@pytest.mark.parametrize(
    "entry",
    [
        "",
        " ",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "10.0.0",
        "127.1",
        "10.*",
        "**",
        "*.*",
        "2130706433",
        "0x7f.1",
        "::g",
        "[::1]",
        "fe80::1%eth0",
        "fd00::/129",
        "http://a.test",
        "a.test:80",
        "a.test/x",
        "*.",
        "a..test",
        ".test",
        "a b",
        "a,b",
        "[ab].test",
        "b\u00fccher.test",
        "a.test\n",
    ],
    ids=ascii,
)
@pytest.mark.parametrize("setting", ["allow", "deny"])
def test_a_malformed_entry_stops_the_start_and_is_named(entry, setting):
    """A policy that is not understood is not a policy."""
    with pytest.raises(SettingsError) as caught:
        Egress(**{setting: ("10.0.0.0/8", entry)})
    assert f"MADEIRA_EGRESS_{setting.upper()}" in str(caught.value)
    assert repr(entry) in str(caught.value)


def test_the_settings_of_every_process_are_checked_when_they_are_read():
    """Not only where calls are made."""
    with pytest.raises(SettingsError, match=r"MADEIRA_EGRESS_DENY: 'http://a\.test'"):
        load({"MADEIRA_EGRESS_DENY": "10.0.0.0/8, http://a.test"})
    assert load({"MADEIRA_EGRESS_ALLOW": "127.0.0.1, *.internal,"}).egress_allow == ("127.0.0.1", "*.internal")
