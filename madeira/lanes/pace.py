"""From the settings of an endpoint to those of a lane."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from madeira.lanes.state import Hold
from madeira.records import Endpoint

#: Between the name of an endpoint and the host, in the name of a callback lane.
SEPARATOR: Final = "@"

#: Gaps up to this many milliseconds are not much longer than the lateness of a busy machine: a lane that is so fast makes
#: up for some of it, or its rate would never be reached.
_FAST_MS: Final = 100.0

#: How much longer a gap is than the limit asks for, as a share of it and in milliseconds at most: calls arrive unevenly
#: late, and a second that holds one more than the limit is a broken promise, while one that holds one less is not.
_CAUTION: Final = (0.01, 50.0)

#: What a fast lane may make up for: half a gap, since calls arrive unevenly late on top of that, but at least this many
#: milliseconds, since a turn of a consumer takes a few.
_CATCH_UP_MS: Final = 10.0


class LaneSettings(NamedTuple):
    """What the broker needs to know of a lane."""

    lane: str
    #: Higher replaces lower.
    version: int
    #: Grants per second; None: not limited.
    rate: float | None
    burst: int
    concurrency: int
    #: How long a grant lives, in seconds.
    lease_s: float
    #: Whether somebody holds the lane: then nothing goes.
    hold: Hold = ""
    #: How long the breaker stays open at first, and at the longest, in seconds; 0: there is none.
    broken_s: float = 0.0
    broken_max_s: float = 0.0
    #: Changes when what the lane has learnt of its receiver is void: its breaker, and its wish to be left alone.
    era: str = ""


def gap_ms(rate: float) -> float:
    """Time between two grants, in milliseconds."""
    gap = 1000.0 / rate
    return gap + min(gap * _CAUTION[0], _CAUTION[1])


def is_slow(rate: float) -> bool:
    """Whether the gaps are so long that each must be kept at the receiver, and not only on average."""
    return 1000.0 / rate > _FAST_MS


def credit_ms(rate: float, burst: int) -> float:
    """How far back in time a lane may make up for grants that came late, in milliseconds.

    The pace is a virtual scheduling algorithm (ITU-T I.371, the generic cell rate algorithm).
    """
    gap = gap_ms(rate)
    return (burst - 1) * gap + (0.0 if is_slow(rate) else max(gap / 2, _CATCH_UP_MS))


def endpoint_of(lane: str) -> str:
    """The name of the endpoint that a lane belongs to."""
    return lane.split(SEPARATOR, 1)[0]


def settings_of(
    lanes: Iterable[str], *, endpoints: Mapping[str, Endpoint], version: int, lease_margin_s: float
) -> list[LaneSettings]:
    """The settings of `lanes`; those whose endpoint does not exist are left out."""
    found = []
    for lane in lanes:
        endpoint = endpoints.get(endpoint_of(lane))
        if endpoint is not None:
            found.append(_settings(lane, endpoint, version, lease_margin_s))
    return found


def _settings(lane: str, endpoint: Endpoint, version: int, lease_margin_s: float) -> LaneSettings:
    breaker = endpoint.breaker
    return LaneSettings(
        lane,
        version,
        endpoint.rate,
        endpoint.burst,
        endpoint.concurrency,
        lease_s=endpoint.timeout + lease_margin_s,
        hold=endpoint.hold,
        broken_s=breaker.hold if breaker.enabled else 0.0,
        broken_max_s=breaker.max,
        era=_era(endpoint),
    )


def _era(endpoint: Endpoint) -> str:
    """A digest, since a URL may hold a password."""
    return hashlib.sha256(repr((endpoint.since, endpoint.url, endpoint.breaker)).encode()).hexdigest()[:16]
