"""Endpoints held and let go over HTTP, and how their lanes are.

Postgres decides and keeps the record; Redis is told at once, so that it counts within a second everywhere. Should Redis be
away, every process learns of it from Postgres.
"""

import json
from typing import Any, Final

import falcon

from madeira.api import query
from madeira.api.acting import Acting
from madeira.api.admin import bodies
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.api.problems import Problem
from madeira.broker.queues import Queues
from madeira.errors import BrokerUnavailable, IllegalTransition
from madeira.ids import NAME
from madeira.lanes.showing import held, lane
from madeira.routing.config import CALLBACK
from madeira.states import Role
from madeira.store import holding
from madeira.store.database import Database
from madeira.store.holding import Action, Holding

#: The actions, and whether they need a reason.
ACTIONS: Final[dict[Action, bool]] = {"pause": True, "resume": False, "disable": True, "enable": False}


class Hold:
    """``POST /v1/endpoints/{name}/pause`` and the other actions."""

    def __init__(self, *, auth: Authenticator, database: Database, queues: Queues, action: Action) -> None:
        self._auth = auth
        self._acting = Acting(database=database, queues=queues)
        self._action: Action = action

    def on_post(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Hold an endpoint, or let it go."""
        caller = self._auth.person(req.env, Role.OPERATOR)
        query.none(req, in_body=("reason",))
        needed = ACTIONS[self._action]
        why = bodies.why(bodies.document(req.env, optional=not needed).values, needed=needed)
        if name == CALLBACK:
            raise Problem(409, f"the endpoint {CALLBACK} is built in: it cannot be held", name="built-in")
        if not NAME.fullmatch(name):
            raise _unknown(name)
        try:
            changed = self._acting.hold(name, self._action, who=caller.name, why=why)
        except IllegalTransition as e:
            raise Problem(409, str(e), name=e.code) from None
        if changed is None:
            raise _unknown(name)
        resp.data = json.dumps({"endpoint": name, "already": changed.already} | held(changed.now), default=jsonable).encode()


def shown(name: str, *, database: Database, queues: Queues) -> dict[str, Any]:
    """How an endpoint is held and how its lanes are, as members of its document."""
    with database.connection() as connection:
        now = holding.read(connection, name) or Holding()
    try:
        states = queues.lane_states(queues.lanes_of(name))
    except BrokerUnavailable:
        return held(now) | {"lane": None}
    return held(now) | {"lane": lane(now, states)}


def _unknown(name: str) -> Problem:
    return Problem(404, f"there is no endpoint {name[:64]!a}", name="unknown-endpoint")
