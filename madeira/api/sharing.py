"""How the processes of the API share the connections: evenly.

They wait at one socket, and the kernel wakes all of them for each connection; the first one takes it. In a burst that is nearly
always the same one, whose clients then keep their connections, and the other processors stay idle. So each process tells the
others in memory that they share how many it has, and one that is ahead leaves the next ones to them for a moment.
"""

import mmap
import struct
import time
from typing import Final

#: Connections that a process may have more than the one with the fewest before it leaves some to it.
_AHEAD: Final = 1

#: Seconds for which a process leaves connections to others.
_LEAVES_S: Final = 0.01

#: Connections that a process takes at most before it leaves some again, when nobody takes those it leaves.
_TAKES_MAX: Final = 1024

#: More places than processes that run at once; those that share one know a little less of each other.
_PLACES: Final = 256


class Shares:
    """How many connections each process has; made before the fork."""

    def __init__(self) -> None:
        self._counts = memoryview(mmap.mmap(-1, _PLACES * struct.calcsize("i"))).cast("i")

    def tell(self, process: int, connections: int) -> None:
        """Let the others know how many `process`, which is a number of its own, has."""
        self._counts[process % _PLACES] = connections + 1

    def end(self, process: int) -> None:
        """Have `process` be nobody any more whom connections are left to."""
        self._counts[process % _PLACES] = 0

    def is_ahead(self, connections: int) -> bool:
        """Whether a process with so many has more than its share."""
        return connections + 1 > min(filter(None, self._counts), default=connections + 1) + _AHEAD


class Turn:
    """When one process leaves connections to the others.

    Those may stand still. So it takes one that nobody else took, and each time that is so again twice as many in a row.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._leaves_until = time.monotonic()
        self._takes = 0
        self._takes_next = 1

    def leaves(self, connections: int) -> bool:
        """Whether this process, which has so many, leaves what there is to others; then it does for a moment."""
        if not self._shares.is_ahead(connections):
            self._takes, self._takes_next = 0, 1
            return False
        if self._takes:
            self._takes -= 1
            return False
        self._leaves_until = time.monotonic() + _LEAVES_S
        self._takes, self._takes_next = self._takes_next, min(self._takes_next * 2, _TAKES_MAX)
        return True

    def left_s(self) -> float:
        """Seconds that the moment still takes; 0 or less when it is over."""
        return self._leaves_until - time.monotonic()
