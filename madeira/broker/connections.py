"""Connections to Redis: none that waits for ever, none that re-sends by itself, and none that has died while it lay idle.

A network may forget a connection on which nothing is said, and tells neither end. Keepalives find that out, but the client takes
what the kernel then says ("timed out") for "nothing to be read" and hands the dead connection out; so here the kernel is asked
first. Without, each such connection would cost one call: events accepted after a quiet hour would wait for reconcile.
"""

import select
import socket
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

#: Of a connection that lies idle: seconds until it is asked whether it lives, between two questions, and how many go unanswered.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class _Watched:
    """Adds a look at the socket before a connection is handed out: the pool makes one anew that says it is dead."""

    def can_read(self, timeout: float = 0) -> bool:
        """Whether there is something to be read.

        Raises:
            redis.ConnectionError: the connection has died.
        """
        sock: socket.socket | None = self._sock  # type: ignore[attr-defined]
        if sock is not None:
            poll = select.poll()
            poll.register(sock, select.POLLERR | select.POLLHUP)
            if poll.poll(0):
                raise redis.ConnectionError("the connection died while it lay idle")
        return bool(super().can_read(timeout))  # type: ignore[misc]


class _Plain(_Watched, redis.Connection):
    pass


class _Secured(_Watched, redis.SSLConnection):
    pass


def connect(url: str, *, timeout_s: float, connections: int, connect_timeout_s: float | None = None) -> redis.Redis:
    """A Redis client that never re-sends on its own and never waits longer than `timeout_s` for an answer.

    When all `connections` are in use, a caller waits for one, at most as long again.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s if connect_timeout_s is None else connect_timeout_s,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        retry_on_error=[],
        health_check_interval=0,
        protocol=2,
        **_over_a_network(url),
    )
    return redis.Redis(connection_pool=pool)


def _over_a_network(url: str) -> dict[str, Any]:
    """What a connection over TCP needs besides; a socket in the file system knows when its other end is gone."""
    if url.startswith("unix:"):
        return {}
    kind = _Secured if url.startswith("rediss:") else _Plain
    return {"connection_class": kind, "socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
