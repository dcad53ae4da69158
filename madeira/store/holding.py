"""Endpoints that somebody holds: paused for a while, or disabled until they are mended.

A change is made in one transaction with its row in the audit, and raises the configuration's version, by which every process
learns of it. What waits is not touched: it stays in its place, and nothing of it is counted.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import psycopg

from madeira.errors import IllegalTransition
from madeira.store import configuration, notices
from madeira.store.configuration import Entry
from madeira.store.notices import Kind

#: What can be done with an endpoint.
Action = Literal["pause", "resume", "disable", "enable"]

#: From which states an action leads to which; every other state refuses it.
MOVES: Final[dict[Action, tuple[frozenset[str], str]]] = {
    "pause": (frozenset({"active", "paused"}), "paused"),
    "resume": (frozenset({"active", "paused"}), "active"),
    "disable": (frozenset({"active", "paused", "disabled"}), "disabled"),
    "enable": (frozenset({"active", "disabled"}), "active"),
}

#: What to do instead where an action is refused.
_INSTEAD: Final = {"paused": "resume it instead", "disabled": "enable it first"}

#: How an endpoint is held.
_READ: Final = "SELECT state, state_reason, state_since, state_by FROM endpoint WHERE name = %(name)s"

#: Hold it, or let it go.
_CHANGE: Final = """
    UPDATE endpoint
    SET state = %(state)s, state_reason = %(reason)s, state_by = %(who)s,
        state_since = CASE WHEN state = %(state)s THEN state_since ELSE clock_timestamp() END
    WHERE name = %(name)s
    RETURNING state, state_reason, state_since, state_by
"""

#: Where Postgres' clock was some seconds ago.
_AGO: Final = "SELECT clock_timestamp() - %(seconds)s * interval '1 s'"

#: Whether an endpoint is what it was at some time: not made or let go since, and not changed either.
_SAME: Final = """
    SELECT state, created_at < %(began)s AND coalesce(state_since < %(began)s, true),
           version = 1 OR updated_at < %(began)s - %(lag_s)s * interval '1 s'
    FROM endpoint WHERE name = %(name)s
"""

#: Seconds after a change of its settings for which a process may still call what there was before.
_LAG_S: Final = 2.0

#: How all of them are held.
_ALL: Final = "SELECT name, state, state_reason, state_since, state_by FROM endpoint"


@dataclass(frozen=True, slots=True)
class Holding:
    """How an endpoint is held."""

    #: ``active``, ``paused`` or ``disabled``.
    state: str = "active"
    reason: str | None = None
    #: Since when it is in this state; None when it never was in another.
    since: datetime | None = None
    #: Who said so last: another reason for the same state has another author, and leaves it its age.
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """What an action did."""

    before: Holding
    now: Holding
    #: Version of the configuration since; None when nothing had to be changed.
    version: int | None

    @property
    def already(self) -> bool:
        """Whether it was in this state before; only the reason, then, can be another."""
        return self.before.state == self.now.state


@dataclass(frozen=True, slots=True)
class Gone:
    """What came of an endpoint whose receiver said that it is gone."""

    state: str
    #: Version of the configuration in which it is so.
    version: int
    #: Whether it is disabled for this.
    now: bool = False
    #: Seconds after which every process calls what there is now; 0 when it does already.
    wait_s: float = 0.0


def read(conn: psycopg.Connection[Any], name: str) -> Holding | None:
    """How an endpoint is held; None when there is none of this name."""
    row = conn.execute(_READ, {"name": name}).fetchone()
    return Holding(*row) if row else None


def states(conn: psycopg.Connection[Any]) -> dict[str, str]:
    """The state of each endpoint."""
    return {name: one.state for name, one in everyone(conn).items()}


def everyone(conn: psycopg.Connection[Any]) -> dict[str, Holding]:
    """How each endpoint is held."""
    return {name: Holding(*how) for name, *how in conn.execute(_ALL)}


def change(conn: psycopg.Connection[Any], name: str, action: Action, *, who: str, why: str | None) -> Changed | None:
    """Hold an endpoint, or let it go; None when there is none of this name. Doing it twice leaves one trace.

    Raises:
        IllegalTransition: its state does not allow it; its `code` is ``paused`` or ``disabled``.
    """
    with conn.transaction():
        configuration.lock(conn)
        before = read(conn, name)
        if before is None:
            return None
        allowed, after = MOVES[action]
        if before.state not in allowed:
            raise IllegalTransition(f"the endpoint {name} is {before.state}: {_INSTEAD[before.state]}", code=before.state)
        if before.state == after and (after == "active" or before.reason == why):
            return Changed(before, before, None)
        params = {"name": name, "state": after, "reason": None if after == "active" else why, "who": who}
        row = conn.execute(_CHANGE, params).fetchone()
        assert row is not None
        now = Holding(*row)
        configuration.record(conn, who, why, [Entry(action, f"endpoint {name}", {"before": _told(before), "after": _told(now)})])
        if after == "disabled" and before.state != after:
            notices.write(conn, Kind.ENDPOINT_DISABLED, name, {"reason": why, "by": who})
        return Changed(before, now, configuration.raise_version(conn))


def gone(conn: psycopg.Connection[Any], name: str, *, who: str, why: str, called_s: float) -> Gone | None:
    """Disable an endpoint whose receiver said that it is gone; None when there is none of this name.

    Only one that is active, and was neither let go nor changed since the call began, `called_s` seconds ago: what a person has
    decided meanwhile is newer than the answer. By Postgres' clock, as all times in the row are.
    """
    began = conn.execute(_AGO, {"seconds": called_s}).fetchone()
    assert began is not None
    with conn.transaction():
        version = configuration.lock(conn)
        found = conn.execute(_SAME, {"name": name, "began": began[0], "lag_s": _LAG_S}).fetchone()
        if found is None:
            return None
        state, still, unchanged = found
        if state != "active" or not (still and unchanged):
            return Gone(state, version, wait_s=0.0 if unchanged else _LAG_S)
        changed = change(conn, name, "disable", who=who, why=why)
        assert changed is not None
        assert changed.version is not None
        return Gone(changed.now.state, changed.version, now=True)


def _told(holding: Holding) -> dict[str, str | None]:
    return {"state": holding.state, "reason": holding.reason}
