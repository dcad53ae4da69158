"""Where Madeira may call: a policy over names and addresses. Pure: it looks nothing up.

Whoever posts an event with a callback address, configures an endpoint, or runs the name server of one, decides where a
machine inside the network connects to. What only that machine should reach is therefore denied unless the operator opens
it: the machine itself, the cloud's metadata, and whatever is no ordinary unicast address. Private networks are open, since
Madeira lives in an intranet. Ranges for documentation and benchmarks are open too: nobody's service is there.

Judged is the address that will be connected to, as a number, so that its spelling does not matter; an IPv4 address that
hides in an IPv6 one is judged by the same rules, and both must pass. Who wins when several entries fit stands at `Egress`.
"""

import fnmatch
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from madeira import target
from madeira.errors import SettingsError

_ALLOW: Final = "MADEIRA_EGRESS_ALLOW"
_DENY: Final = "MADEIRA_EGRESS_DENY"

#: Answers that are remembered, each way.
_REMEMBERED: Final = 8192

_Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network

#: What opens a name of this machine.
_BOTH: Final = "127.0.0.1,::1"

_LOOPBACK: Final = "this machine itself (loopback)"
_METADATA: Final = "the metadata service of a cloud"
_LINK_LOCAL: Final = "a link-local address"
_RESERVED: Final = "in a reserved range"

#: What is denied by itself; the longest prefix decides, and None means open.
_BUILT_IN: Final[dict[str, str | None]] = {
    "0.0.0.0/8": "an unspecified address, which means this machine",
    "127.0.0.0/8": _LOOPBACK,
    "169.254.0.0/16": _LINK_LOCAL,
    "192.0.0.0/24": _RESERVED,
    "192.88.99.0/24": _RESERVED,
    "224.0.0.0/4": "a multicast address",
    "240.0.0.0/4": _RESERVED,
    "255.255.255.255/32": "the broadcast address",
    # IPv6: only what is given out for unicast is open.
    "::/0": _RESERVED,
    "2000::/3": None,
    "fc00::/7": None,
    "64:ff9b::/96": None,
    "::/128": "an unspecified address, which means this machine",
    "::1/128": _LOOPBACK,
    "fe80::/10": _LINK_LOCAL,
    "ff00::/8": "a multicast address",
    # AWS, Google, Azure, Oracle, OpenStack, DigitalOcean and others
    "169.254.169.254/32": _METADATA,
    "fd00:ec2::/32": _METADATA,
    "fd20:ce::254/128": _METADATA,
    "fd00:c1::a9fe:a9fe/128": _METADATA,
    "fe80::a9fe:a9fe/128": _METADATA,
    # AWS: credentials of containers and pods, time, names
    "169.254.170.2/32": _METADATA,
    "169.254.170.23/32": _METADATA,
    "169.254.169.253/32": _METADATA,
    "169.254.169.123/32": _METADATA,
    # Azure's host, Oracle's older one, Alibaba, Tencent, Scaleway
    "168.63.129.16/32": _METADATA,
    "192.0.0.192/32": _METADATA,
    "100.100.100.200/32": _METADATA,
    "169.254.0.23/32": _METADATA,
    "169.254.10.10/32": _METADATA,
    "169.254.42.42/32": _METADATA,
    "fd00:42::42/128": _METADATA,
}

#: Names that are denied without asking a name server.
_BUILT_IN_NAMES: Final[dict[str, str]] = {
    "localhost": _LOOPBACK,
    "*.localhost": _LOOPBACK,
    "localhost.localdomain": _LOOPBACK,
    "localhost6": _LOOPBACK,
    "localhost6.localdomain6": _LOOPBACK,
    "ip6-localhost": _LOOPBACK,
    "ip6-loopback": _LOOPBACK,
    "metadata.google.internal": _METADATA,
    "metadata.goog": _METADATA,
    "*.metadata.goog": _METADATA,
    "metadata.azure.internal": _METADATA,
    "metadata.azure.com": _METADATA,
    "instance-data": _METADATA,
    "instance-data.ec2.internal": _METADATA,
    "metadata.ec2.internal": _METADATA,
    "metadata.tencentyun.com": _METADATA,
    "metadata.platformequinix.com": _METADATA,
    "metadata.packet.net": _METADATA,
}

_MAPPED: Final = IPv6Network("::ffff:0:0/96")
_COMPATIBLE: Final = IPv6Network("::/96")
_TRANSLATED: Final = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"), IPv6Network("::ffff:0:0:0/96"))
_SIX_TO_FOUR: Final = IPv6Network("2002::/16")
_TEREDO: Final = IPv6Network("2001::/32")

#: Bits 64 to 95 of an ISATAP address, without the two that tell universal from local and group from single.
_ISATAP: Final = 0x0000_5EFE
_ISATAP_MASK: Final = 0xFCFF_FFFF

_EVERYTHING: Final = ("0.0.0.0/0", "::/0")
_PATTERN: Final = re.compile(r"[a-z0-9_*?-]+(\.[a-z0-9_*?-]+)*")
_LOOKS_LIKE_NETWORK: Final = re.compile(r"[0-9.*?/]*|.*[:/].*")

#: Rank of a host pattern without wildcard; one with wildcards ranks by its other characters, of which there are fewer.
_EXACT: Final = 1000


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A host pattern; the higher `rank`, the more specific."""

    text: str
    matches: re.Pattern[str]
    rank: int


class Egress:
    """What may be called, from the settings ``MADEIRA_EGRESS_ALLOW`` and ``MADEIRA_EGRESS_DENY``.

    Entries are addresses (``127.0.0.1``), networks (``10.1.0.0/16``) and host patterns (``ledger.internal``, ``*.internal``;
    ``*`` stands for any characters, dots too); a lone ``*`` is every address.

    Names first: the most specific pattern that fits a name decides (an exact name before one with wildcards, then the longer
    one); denied is denied, whatever its addresses. Then addresses: the longest prefix decides. In both, a denial wins over
    an allowance of the same length, and either wins over what is built in. An allowed name lifts denials of
    ``MADEIRA_EGRESS_DENY`` from its addresses: an exact name all of them, one with wildcards only that of every address.
    It never lifts what is built in, or whoever runs its name server could open this machine: only an address or a network
    does (``localhost`` alone may also be opened by its name).

    Raises:
        SettingsError: an entry is none of these; the message names it.
    """

    def __init__(self, *, allow: tuple[str, ...] = (), deny: tuple[str, ...] = ()) -> None:
        self._allowed, self._allowed_names = _entries(allow, _ALLOW)
        self._denied, self._denied_names = _entries(deny, _DENY)
        self._opens_loopback = any(network.is_loopback for network in self._allowed)
        everything = {ip_network(text) for text in _EVERYTHING}
        self._only_names = everything <= set(self._denied) and not self._allowed
        # Asked at every attempt, mostly for the same few.
        self._of_host = functools.lru_cache(maxsize=_REMEMBERED)(self._judge_host)
        self._of_address = functools.lru_cache(maxsize=_REMEMBERED)(self._judge)

    def refusal_of_host(self, host: str) -> str | None:
        """Why `host`, a name or an address, is not called whatever a look-up would say; None when nothing speaks against it.

        `host` is in ASCII, as in `madeira.target.Target`; an IPv6 address may have its brackets. The reason is one line.
        """
        return self._of_host(host)

    def refusal(self, host: str, address: str) -> str | None:
        """Why `address`, which `host` has (or is), is not connected to; None when it may be. The reason is one line."""
        return self._of_address(host, address)

    def _judge_host(self, host: str) -> str | None:
        name = _bare(host)
        if _parse(name) is not None:
            return self.refusal(name, name)
        if target.is_numeric(name):
            return f"{name} is a number, which the system may take for an address that nobody wrote"
        allowed, denied, built_in = _best(name, self._allowed_names), _best(name, self._denied_names), _best(name, _NAMES)
        rank = allowed.rank if allowed else -1
        if denied and denied.rank >= rank:
            return f"{name} is denied by {_DENY} ({denied.text})"
        if built_in and built_in.rank > rank:
            return self._refusal_of_known_name(name, _BUILT_IN_NAMES[built_in.text])
        if self._only_names and not allowed:
            return f"{name} is not among the names that {_ALLOW} holds, and {_DENY} denies everything else"
        return None

    def _refusal_of_known_name(self, name: str, kind: str) -> str | None:
        if kind != _LOOPBACK:
            return f"{name} is {kind}, which is not called unless {_ALLOW} names it and its address"
        if self._opens_loopback:
            return None
        return f"{name} is {kind}, which is not called; allow it with {_ALLOW}={_BOTH}"

    def _judge(self, host: str, address: str) -> str | None:
        name = _bare(host)
        found = _parse(address)
        if found is None:
            return f"{address} of {name} is no IP address"
        literal = _parse(name) is not None
        if not literal:
            refused = self.refusal_of_host(name)
            if refused:
                return refused
        allowed = None if literal else _best(name, self._allowed_names)
        # Such a name mostly has two addresses: to be told of one, and then of the other, would be tiresome.
        is_loopback = not literal and _names_loopback(_best(name, _NAMES))
        shown = str(found) if literal else f"{found}, an address of {name},"
        for each in (found, *_embedded(found)):
            refused = self._refusal_of_address(each, allowed, _BOTH if is_loopback else str(each))
            if refused:
                return f"{shown if each is found else f'{each}, which {shown} stands for,'} {refused}"
        return None

    def _refusal_of_address(self, address: _Address, allowed_name: _Pattern | None, remedy: str) -> str | None:
        allowed = _longest(address, self._allowed)
        length = allowed.prefixlen if allowed else -1
        built_in = _longest(address, _NETWORKS)
        kind = _NETWORKS[built_in] if built_in else None
        if built_in and kind and built_in.prefixlen > length and not (kind == _LOOPBACK and _names_loopback(allowed_name)):
            if kind == _LOOPBACK:
                return f"is {kind}, which is not called; allow it with {_ALLOW}={remedy}"
            return f"is {kind}, which is not called unless {_ALLOW} names it"
        denied = _longest(address, self._denied)
        if denied is None or denied.prefixlen < length:
            return None
        if allowed_name and (allowed_name.rank >= _EXACT or denied.prefixlen == 0):
            return None
        return f"is denied by {_DENY} ({denied})"


def _entries(texts: Iterable[str], setting: str) -> tuple[dict[_Network, None], list[_Pattern]]:
    networks: dict[_Network, None] = {}
    patterns: list[_Pattern] = []
    for text in texts:
        if text == "*":
            networks |= dict.fromkeys(ip_network(each) for each in _EVERYTHING)
        elif _LOOKS_LIKE_NETWORK.fullmatch(text):
            networks[_network(text, setting)] = None
        else:
            patterns.append(_pattern(text, setting))
    return networks, patterns


def _network(text: str, setting: str) -> _Network:
    if "%" in text:
        raise SettingsError(f"{setting}: {text!r} has a zone, which means something on one machine only; leave it out")
    try:
        network = ip_network(text)
    except ValueError as e:
        raise SettingsError(
            f"{setting}: {text!r} is neither an address nor a network such as 10.0.0.0/8 or fd00::/8: {e}"
        ) from None
    if isinstance(network, IPv6Network) and network.prefixlen >= 96 and network.subnet_of(_MAPPED):
        low = int(network.network_address) & 0xFFFF_FFFF
        return IPv4Network((low, network.prefixlen - 96))
    return network


def _pattern(text: str, setting: str) -> _Pattern:
    name = text.lower().removesuffix(".")
    if not _PATTERN.fullmatch(name) or target.is_numeric(name):
        raise SettingsError(
            f"{setting}: {text!r} is no host pattern: it is a name such as ledger.internal or *.internal, "
            "without scheme, port and path; international ones in punycode (xn--)"
        )
    return _compiled(name)


def _compiled(name: str) -> _Pattern:
    literal = name.replace("*", "").replace("?", "")
    rank = _EXACT if literal == name else len(literal)
    return _Pattern(name, re.compile(fnmatch.translate(name)), rank)


def _best(name: str, patterns: Iterable[_Pattern]) -> _Pattern | None:
    """The most specific of `patterns` that fits `name`."""
    return max((p for p in patterns if p.matches.fullmatch(name)), key=lambda p: p.rank, default=None)


def _longest(address: _Address, networks: Iterable[_Network]) -> _Network | None:
    """The one of `networks` with the longest prefix that holds `address`."""
    fitting = (n for n in networks if n.version == address.version and address in n)
    return max(fitting, key=lambda n: n.prefixlen, default=None)


def _names_loopback(pattern: _Pattern | None) -> bool:
    return pattern is not None and _BUILT_IN_NAMES.get(pattern.text) == _LOOPBACK


def _bare(host: str) -> str:
    return host.lower().removeprefix("[").removesuffix("]").rstrip(".")


def _parse(text: str) -> _Address | None:
    """The address that `text` is; a zone does not matter, and IPv4 in IPv6 clothes (``::ffff:1.2.3.4``) is IPv4."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def _embedded(address: _Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that a gateway, or this machine, may make of an IPv6 one."""
    if isinstance(address, IPv4Address):
        return ()
    value = int(address)
    low = value & 0xFFFF_FFFF
    found: list[int] = []
    if any(address in network for network in _TRANSLATED) or (address in _COMPATIBLE and low > 1):
        found.append(low)
    if address in _SIX_TO_FOUR:
        found.append(value >> 80 & 0xFFFF_FFFF)
    if address in _TEREDO:
        found += [value >> 64 & 0xFFFF_FFFF, low ^ 0xFFFF_FFFF]
    if value >> 32 & _ISATAP_MASK == _ISATAP:
        found.append(low)
    return tuple(IPv4Address(each) for each in found)


_NETWORKS: Final[dict[_Network, str | None]] = {ip_network(text): kind for text, kind in _BUILT_IN.items()}
_NAMES: Final = tuple(_compiled(name) for name in _BUILT_IN_NAMES)
