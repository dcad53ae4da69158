"""The last comparisons of Postgres with the broker, for the administrator."""

import json
from typing import Any, Final

import falcon

from madeira.api import query
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.states import Role
from madeira.store import reconcile as store
from madeira.store.database import Database

#: Runs that are shown.
RUNS: Final = 20


class Reconcile:
    """``GET /v1/reconcile``."""

    def __init__(self, *, auth: Authenticator, database: Database) -> None:
        self._auth = auth
        self._database = database

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show the last runs, the latest first."""
        self._auth.person(req.env, Role.VIEWER)
        query.none(req)
        with self._database.connection() as connection:
            runs: list[dict[str, Any]] = store.last_runs(connection, RUNS)
        resp.data = json.dumps({"runs": runs}, default=jsonable).encode()
