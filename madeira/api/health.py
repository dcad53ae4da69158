"""What machines ask: is the process alive, can it do its work.

``/healthz`` depends on nothing: a supervisor must not restart a process because Postgres is away. ``/readyz`` says 503
without Postgres or its tables, since nothing can be accepted then; without Redis it says 200 and ``degraded``, since intake
works. All answer in bounded time, also when a server is frozen and its connections stay open.
"""

import json

import falcon

from madeira.api.problems import RETRY_AFTER_S
from madeira.broker.queues import Queues
from madeira.store.database import Database
from madeira.store.schema import is_misfit


class Alive:
    """``/healthz``."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Answer, which is all that is asked."""
        resp.data = b'{"status": "ok"}'


class Ready:
    """``/readyz``."""

    def __init__(self, *, database: Database, queues: Queues) -> None:
        self._database = database
        self._queues = queues

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Probe both stores."""
        trouble = self._database.trouble()
        postgres = trouble is None
        redis = self._queues.ping()
        status = "unavailable" if not postgres else "ok" if redis else "degraded"
        if not postgres:
            resp.status = falcon.HTTP_503
            resp.set_header("Retry-After", str(RETRY_AFTER_S))
        resp.data = json.dumps({"status": status, "postgres": _told(trouble), "redis": _word(redis)}).encode()


def _told(trouble: str | None) -> str:
    """What strangers may know of Postgres: whether it is there, and what is wrong with the tables."""
    if trouble is not None and is_misfit(trouble):
        return trouble
    return _word(trouble is None)


def _word(up: bool) -> str:
    return "ok" if up else "unavailable"
