"""How `madeira listen` misbehaves when it is told to: slow, failing, silent, cutting the line, refusing connections.

Which calls are met is counted, not drawn: of a share of 0.25 it is one of every four calls. So what
one has set can be seen at once.
"""

import threading
from dataclasses import dataclass, field
from typing import Literal

#: What is done to a call: answered with a failure, never answered, or cut off without an answer.
Fault = Literal["fail", "hang", "drop"]


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
    _owed: dict[Fault | None, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meet(self) -> Fault | None:
        """What happens to the next call: what is owed most. None when it is answered as ever."""
        with self._lock:
            for outcome, share in self._shares().items():
                self._owed[outcome] = self._owed.get(outcome, 0.0) + share
            met = max(self._owed, key=self._owed.__getitem__)
            self._owed[met] -= 1
            return met

    def _shares(self) -> dict[Fault | None, float]:
        shares: dict[Fault | None, float] = {"fail": self.fail, "hang": self.hang, "drop": self.drop}
        # The first one wins where two are owed the same.
        return {None: 1 - sum(shares.values())} | shares
