"""How the processes of the API share the connections: evenly.

They wait at one socket, and the kernel wakes all of them for each connection; the first one takes it. In a burst that is nearly
always the same one, whose clients then keep their connections, and the other processors stay idle. So each process tells the
others in memory that they share how many it has, and one that is ahead leaves the next ones to them for a moment.
"""

import mmap
import struct
import time
from typing import Final

#: Connections that a process may have more than another one before it leaves some to it.
_AHEAD: Final = 2

#: Seconds within which a process that leaves connections to others sees them at work.
_LEAVES_S: Final = 0.2

#: More places than processes that run at once; those that share one know a little less of each other.
_PLACES: Final = 64

#: Where the numbers of looks begin anew.
_LOOKS_MAX: Final = 2**31


class Shares:
    """How many connections each process has, and how often it has looked for more; made before the fork."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 2 * _PLACES * struct.calcsize("i"))).cast("i")
        self._counts = memory[:_PLACES]
        self._looks = memory[_PLACES:]

    def tell(self, process: int, connections: int) -> None:
        """Let the others know how many `process`, which is a number of its own, has, and that it looks for more."""
        place = process % _PLACES
        self._counts[place] = connections + 1
        self._looks[place] = (self._looks[place] + 1) % _LOOKS_MAX

    def end(self, process: int) -> None:
        """Have `process` be nobody any more whom connections are left to."""
        self._counts[process % _PLACES] = 0

    def behind(self, connections: int) -> set[tuple[int, int]]:
        """Whom a process with so many leaves the next ones to: each one's place and number of looks."""
        most = connections + 1 - _AHEAD
        return {(place, self._looks[place]) for place, count in enumerate(self._counts) if 0 < count <= most}

    def has_not_looked(self, place: int, look: int) -> bool:
        """Whether the one at `place` has not looked again since its `look`."""
        return self._looks[place] == look


class Turn:
    """When one process leaves connections to the others; not to those that stand still."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        #: When the moment began in which this process leaves connections to others; None while it does not.
        self._since: float | None = None
        #: For how many seconds each has been left connections without a look at them; as of `Shares.behind`.
        self._waited_for: dict[tuple[int, int], float] = {}

    def leaves(self, connections: int) -> bool:
        """Whether this process, which has so many, leaves what there is to others; then it does for a moment."""
        self._since = time.monotonic() if self._awaited(connections) else None
        return self._since is not None

    def left_s(self, connections: int) -> float:
        """Seconds that the moment still takes; 0 when it is over, as it is once nobody has fewer any more."""
        if self._since is None:
            return 0.0
        awaited = self._awaited(connections)
        now = time.monotonic()
        for one in awaited:
            self._waited_for[one] = self._waited_for.get(one, 0.0) + now - self._since
        self._since = now if awaited else None
        return _LEAVES_S - max(self._waited_for[one] for one in awaited) if awaited else 0.0

    def _awaited(self, connections: int) -> set[tuple[int, int]]:
        behind = self._shares.behind(connections)
        self._waited_for = {one: waited_s for one, waited_s in self._waited_for.items() if self._shares.has_not_looked(*one)}
        return {one for one in behind if self._waited_for.get(one, 0.0) < _LEAVES_S}
