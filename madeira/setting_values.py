"""How the text of a setting becomes its value; of a text that is none, a ValueError says why.

An error tells no part of what may be a secret.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

from madeira import digits, sealing, without

without.load("redis", without="opentelemetry")

import redis  # noqa: E402

_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def url(*schemes: str) -> Callable[[str], str]:
    """An address of Postgres or of Redis that begins with one of `schemes`, and that its client can read."""

    def parse(value: str) -> str:
        if not value.startswith(tuple(f"{s}://" for s in schemes)):
            raise ValueError(f"the URL must start with {' or '.join(s + '://' for s in schemes)}")
        if _BAD_ESCAPE.search(value):
            raise ValueError("the URL holds a '%' that two hexadecimal digits do not follow; write a literal one as %25")
        try:
            (_check_redis if "redis" in schemes else _check_postgres)(value)
        except (ValueError, TypeError, AttributeError, psycopg.Error, redis.RedisError):
            # The reason would repeat parts of the value, which may be the password's.
            raise ValueError(
                "the URL cannot be read: check its port, its options, and that special characters are escaped"
            ) from None
        return value

    return parse


def _check_postgres(url: str) -> None:
    ports = str(conninfo_to_dict(url).get("port") or "").split(",")
    if not all(_is_port(port) for port in ports if port):
        raise ValueError("a port is not valid")


def _check_redis(url: str) -> None:
    if not _is_port(str(urlsplit(url).port or 1)):
        raise ValueError("the port is not valid")
    # Makes the object, and connects to nothing: only that tells an unknown option.
    redis.ConnectionPool.from_url(url).make_connection()


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 65535


def namespace(value: str) -> str:
    """What may stand in front of every key in Redis."""
    if not value or not all(c.isalnum() or c in "-_." for c in value):
        raise ValueError(f"{value!r} may hold letters, digits, '-', '_' and '.' only")
    return value


def path(value: str) -> Path:
    """A file or a folder, from the root on."""
    return Path(value).expanduser().resolve()


def text(value: str) -> str:
    """Whatever it is."""
    return value


def whole(low: int, high: int) -> Callable[[str], int]:
    """A whole number from `low` to `high`."""

    def parse(value: str) -> int:
        number = digits.whole(value)
        if not low <= number <= high:
            raise ValueError(f"{number} is not between {low} and {high}")
        return number

    return parse


def keys(value: str) -> tuple[str, ...]:
    """Keys that seal, the first one first."""
    found = listed(value)
    try:
        sealing.Sealer(found)
    except sealing.SealError as e:
        raise ValueError(str(e)) from None
    return found


def listed(value: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def choice(*allowed: str) -> Callable[[str], str]:
    """One of `allowed`, in small letters."""

    def parse(value: str) -> str:
        if value.lower() not in allowed:
            raise ValueError(f"{value!r} is none of {', '.join(allowed)}")
        return value.lower()

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Seconds from `low` to `high`, with a fraction where there is one."""

    def parse(value: str) -> float:
        number = digits.number(value)
        if not low <= number <= high:
            raise ValueError(f"{value} is not between {low:g} and {high:g} seconds")
        return number

    return parse


def days(value: str) -> int:
    """Days, for a hundred years at the most."""
    return whole(0, 36_500)(value)
