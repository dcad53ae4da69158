"""Looks whether Redis may throw away what it was given, and says so as loudly as a log can.

Under memory pressure a server with any policy but ``noeviction`` drops keys of its own choice: queued work, markers,
places in lanes. Reconcile brings the work back, late; but nobody should have to find out why.
"""

from typing import Any, Final

import redis

from madeira.log import get

log = get(__name__)

#: The only policy under which Redis keeps what it accepted.
SAFE: Final = "noeviction"


def warn_of_eviction(client: redis.Redis) -> None:
    """Log an error when the server evicts; says nothing when the server is away or does not tell its policy."""
    try:
        memory: Any = client.info("memory")
    except redis.RedisError:
        return
    policy = memory.get("maxmemory_policy", SAFE)
    if policy != SAFE:
        log.error(
            "redis.evicts",
            policy=policy,
            detail="under memory pressure this Redis THROWS QUEUED WORK AWAY",
            remedy=f"set maxmemory-policy to {SAFE}",
        )
