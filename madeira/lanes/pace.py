"""From the settings of an endpoint to those of a lane."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from madeira.records import Endpoint

#: Between the name of an endpoint and the host, in the name of a callback lane.
SEPARATOR: Final = "@"

#: Gaps up to this many milliseconds are shorter than the lateness of a busy machine; a lane that is so fast may make up
#: for one gap, or its rate would never be reached.
_CATCH_UP_MS: Final = 100.0


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


def credit_ms(rate: float, burst: int) -> float:
    """How far back in time a lane may make up for grants that came late, in milliseconds.

    The pace is a virtual scheduling algorithm (ITU-T I.371, the generic cell rate algorithm).
    """
    gap = 1000.0 / rate
    return (burst - 1) * gap + (gap if gap <= _CATCH_UP_MS else 0.0)


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
            lease_s = endpoint.timeout + lease_margin_s
            found.append(LaneSettings(lane, version, endpoint.rate, endpoint.burst, endpoint.concurrency, lease_s))
    return found
