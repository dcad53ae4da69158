"""How `madeira listen` misbehaves when it is told to: slow, failing, silent, cutting the line, refusing connections.

Which calls are met is counted, not drawn: of a share of 0.25 it is every fourth call. So what one has set can be seen at once.
"""

import threading
from dataclasses import dataclass, field
from typing import Final, Literal

#: What is done to a call: answered with a failure, never answered, or cut off without an answer.
Fault = Literal["fail", "hang", "drop"]

#: The order in which faults are asked; a call is met by one of them.
_ORDER: Final[tuple[Fault, ...]] = ("drop", "hang", "fail")


@dataclass(slots=True)
class Faults:
    """What goes wrong; shares are from 0 to 1, of all calls."""

    fail: float = 0.0
    hang: float = 0.0
    drop: float = 0.0
    #: Seconds before an answer.
    slow_s: float = 0.0
    #: Seconds for which connections are refused at first.
    refuse_s: float = 0.0
    _owed: dict[Fault, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meet(self) -> Fault | None:
        """What happens to the next call; None when it is answered as ever."""
        with self._lock:
            met: Fault | None = None
            for fault in _ORDER:
                # A little more than owed: a tenth ten times is not quite one.
                owed = self._owed.get(fault, 0.0) + self._share(fault)
                if met is None and owed >= 1 - 1e-9:
                    met, owed = fault, owed - 1
                self._owed[fault] = owed
            return met

    def _share(self, fault: Fault) -> float:
        match fault:
            case "fail":
                return self.fail
            case "hang":
                return self.hang
            case "drop":
                return self.drop
