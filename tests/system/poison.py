"""Given to a worker beside ``madeira.actors``: routing an event of the type below takes the whole process down.

It stands for what nobody can catch: a crash in a C extension, an exhausted memory, a stack that overflows.
"""

import os
import signal
from typing import Final

import actors.route
from madeira.egress import Egress
from madeira.records import PlannedDelivery, RoutableEvent
from madeira.routing.config import Rules

#: What kills the process that routes it.
POISON: Final = "poison.routing"

_match = actors.route.match


def _match_or_die(rules: Rules, event: RoutableEvent, *, egress: Egress) -> list[PlannedDelivery]:
    if event.event_type == POISON:
        os.kill(os.getpid(), signal.SIGKILL)
    return _match(rules, event, egress=egress)


actors.route.match = _match_or_die
