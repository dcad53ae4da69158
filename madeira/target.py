"""A URL that can be called, taken apart once.

The checks are stricter than what URL libraries let pass, since a URL may come from a stranger (``target_uri``): whatever
cannot be called is refused here, with a reason, so that nothing below raises an error outside the closed list. A host that
is a number in disguise (``127.1``, ``0x7f.1``, ``①②⑦.0.0.1``) is refused too: the system's resolver would take it for an
address that nobody wrote. So is what two programs read differently: more than one ``@``, text around an address in
brackets, letters and dots that only look like those of ASCII.
"""

import base64
import functools
import ipaddress
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

import idna

from madeira import without
from madeira.errors import MadeiraError

without.load("httpx", without="pygments")

import httpx  # noqa: E402

#: Characters of a URL, at most.
MAX_URL: Final = 8192

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_OTHER_DOTS: Final = "\u3002\uff0e\uff61"
_PLACE: Final = re.compile(r"(\[[^\[\]@]+\]|[^\[\]@:]*)(:[0-9]+)?")


class BadUrl(MadeiraError):
    """Raised when a URL cannot be called, whatever the network; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a call goes."""

    scheme: str
    #: In ASCII, lower case; an IPv6 address without its brackets.
    host: str
    port: int
    #: The value of the Host header.
    authority: str
    #: Path and query, as they go on the wire.
    path: str
    #: The URL without user, password and fragment: what is logged.
    url: str
    #: The same for httpx.
    httpx_url: httpx.URL = field(repr=False)
    #: The value of an Authorization header that follows from user and password in the URL.
    authorization: str | None = field(default=None, repr=False)

    @property
    def origin(self) -> tuple[str, str, int]:
        """What connections may be shared by."""
        return (self.scheme, self.host, self.port)


@functools.lru_cache(maxsize=4096)
def parse(url: str) -> Target:
    """Take `url` apart.

    Raises:
        BadUrl: it is not an absolute http or https URL, or its host or port cannot exist.
    """
    _check_characters(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as e:
        raise BadUrl(f"the URL is malformed: {e}") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise BadUrl("the URL must begin with http:// or https://" + (f", not {parts.scheme}:" if parts.scheme else ""))
    if port == 0 or parts.netloc.endswith(":"):
        raise BadUrl("the URL's port must be between 1 and 65535")
    userinfo, _, rest = parts.netloc.rpartition("@")
    place = _PLACE.fullmatch(rest)
    if place is None or "@" in userinfo:
        raise BadUrl("what stands before the URL's path is not [user[:password]@]host[:port]")
    host = _ipv6(place[1][1:-1]) if place[1].startswith("[") else _host(place[1])
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port in (None, _DEFAULT_PORTS[parts.scheme]) else f"{shown}:{port}"
    bare = f"{parts.scheme}://{authority}{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    try:
        known = httpx.URL(bare)
        path = known.raw_path.decode("ascii")
    except (httpx.InvalidURL, UnicodeError) as e:
        raise BadUrl(f"the URL is malformed: {e}") from None
    return Target(
        scheme=parts.scheme,
        host=host,
        port=port or _DEFAULT_PORTS[parts.scheme],
        authority=authority,
        path=path,
        url=str(known),
        httpx_url=known,
        authorization=_basic(parts.username, parts.password),
    )


def is_numeric(host: str) -> bool:
    """Whether the system may take `host` (ASCII, lower case) for a number: whether its last label is one."""
    return _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]) is not None


def _check_characters(url: str) -> None:
    if len(url) > MAX_URL:
        raise BadUrl(f"the URL is longer than {MAX_URL} characters")
    if any(c.isspace() or not c.isprintable() or c == "\\" for c in url):
        raise BadUrl("the URL holds a space, a control character or a backslash")


def _host(host: str) -> str:
    if not host:
        raise BadUrl("the URL names no host")
    ascii_host = _to_ascii(host)
    if is_numeric(ascii_host):
        return _ipv4(ascii_host)
    labels = ascii_host.removesuffix(".").split(".")
    if len(ascii_host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise BadUrl("the URL's host is no possible name")
    for label in labels:
        if label.startswith("xn--"):
            _check_punycode(label)
    return ascii_host


def _ipv6(host: str) -> str:
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise BadUrl("the URL's host is no IPv6 address") from None
    if address.scope_id is not None:
        raise BadUrl("the URL's host is an IPv6 address with a zone, which means something on one machine only")
    return str(address)


def _ipv4(host: str) -> str:
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        raise BadUrl("the URL's host looks like a number and is no IPv4 address in dotted form") from None


def _to_ascii(host: str) -> str:
    if host.isascii():
        return host.lower()
    try:
        encoded = idna.encode(host.lower()).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        raise BadUrl("the URL's host is no possible international name") from None
    # A full stop of another script, or a letter that becomes one of ASCII in lower case: nothing international is in it.
    if "xn--" not in encoded or any(dot in host for dot in _OTHER_DOTS):
        raise BadUrl("the URL's host is written with letters or dots that only look like those of ASCII")
    return encoded


def _check_punycode(label: str) -> None:
    try:
        idna.ulabel(label)
    except (idna.IDNAError, UnicodeError):
        raise BadUrl("the URL's host holds a label in punycode (xn--) that stands for nothing") from None


def _basic(user: str | None, password: str | None) -> str | None:
    if user is None and password is None:
        return None
    pair = f"{unquote(user or '')}:{unquote(password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode("ascii")
