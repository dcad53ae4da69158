"""Sources, endpoints and routes in Postgres: read as one snapshot, changed one after another.

Every change takes hold of the one row of ``configuration`` first, so that each is checked against what is committed, and
raises its version once. Readers ask for that version only, and read the whole when it rose. Names are compared byte by byte.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import psycopg

from madeira.store import audit
from madeira.store.columns import numbers, texts

#: The kinds of objects; each is the name of its table.
Kind = Literal["source", "endpoint", "route"]

#: The endpoint that has no row.
BUILT_IN: Final = "callback"

#: The version of the whole.
_VERSION: Final = "SELECT version FROM configuration"

#: Seconds that a level of the log may be asked for at most, unless it is until the next change.
LOG_LEVEL_MAX_S: Final = 7 * 86_400

#: The version, and the level of the log that somebody asked for, for as long as it is asked for, and until when.
_LOOK: Final = """
    SELECT version, CASE WHEN holds THEN log_level END, CASE WHEN holds THEN log_level_until END
    FROM configuration, LATERAL (SELECT coalesce(log_level_until, 'infinity') > clock_timestamp() AS holds) l
"""

_SET_LOG_LEVEL: Final = """
    UPDATE configuration
    SET log_level = %(level)s, log_level_until = clock_timestamp() + %(for_s)s::float8 * interval '1 s'
    RETURNING log_level_until
"""

#: Let no other change in before this one has ended.
_LOCK: Final = "SELECT version FROM configuration FOR NO KEY UPDATE"

#: Nor a delivery to an endpoint.
_LOCK_ALL: Final = "SELECT version FROM configuration FOR UPDATE"

#: Let no endpoint go before this transaction has ended. Others may do the same, and what removes nothing may be changed.
_KEEP: Final = "SELECT version FROM configuration FOR KEY SHARE"

#: Those of some endpoints that are there.
_THERE: Final = "SELECT name FROM endpoint WHERE name = ANY(%(names)s::text[])"

#: Tell readers that something changed.
_RAISE: Final = "UPDATE configuration SET version = version + 1, changed_at = clock_timestamp() RETURNING version"

#: Everything, as of one moment: one statement sees one snapshot.
_READ: Final = """
    SELECT 'configuration', '' COLLATE "C", NULL, version, NULL::timestamptz, NULL::timestamptz, 0, 'active', NULL::timestamptz
    FROM configuration
    UNION ALL SELECT 'source', name, spec, version, created_at, updated_at, 0, 'active', NULL FROM source
    UNION ALL SELECT 'endpoint', name, spec, version, created_at, updated_at, 0, state, state_since FROM endpoint
    UNION ALL SELECT 'route', name, spec, version, created_at, updated_at, place, 'active', NULL FROM route
    ORDER BY 7, 2
"""

#: One object.
_ONE: Final = {
    kind: f"SELECT name, spec, version, created_at, updated_at FROM {kind} WHERE name = %(name)s"  # noqa: S608
    for kind in ("source", "endpoint", "route")
}

#: New objects, in the order given.
_INSERT: Final = {
    kind: f"""
        INSERT INTO {kind} (name, spec)
        SELECT name, spec
        FROM unnest(%(names)s::text[], %(specs)s::text[]::jsonb[]) WITH ORDINALITY AS n (name, spec, number)
        ORDER BY number
    """  # noqa: S608
    for kind in ("source", "endpoint", "route")
}

#: New contents of objects that are there.
_UPDATE: Final = {
    kind: f"""
        UPDATE {kind} o
        SET spec = n.spec, version = o.version + 1, updated_at = clock_timestamp()
        FROM unnest(%(names)s::text[], %(specs)s::text[]::jsonb[]) AS n (name, spec)
        WHERE o.name = n.name
    """  # noqa: S608
    for kind in ("source", "endpoint", "route")
}

#: Objects that go.
_DELETE: Final = {
    kind: f"DELETE FROM {kind} WHERE name = ANY(%(names)s::text[])"  # noqa: S608
    for kind in ("source", "endpoint", "route")
}

#: Routes that name an object, a few of them.
_NAMED_BY: Final = {
    kind: f"SELECT name FROM route WHERE spec->>'{kind}' = %(name)s ORDER BY place LIMIT 5"  # noqa: S608
    for kind in ("source", "endpoint")
}

#: The places of routes.
_PLACES: Final = "SELECT name, place FROM route WHERE name = ANY(%(names)s::text[])"

#: Put routes into other places.
_MOVE: Final = """
    UPDATE route r SET place = n.place
    FROM unnest(%(names)s::text[], %(places)s::bigint[]) AS n (name, place)
    WHERE r.name = n.name AND r.place <> n.place
"""

#: Those of some endpoints that have unfinished deliveries. Reads the unfinished ones only, but all of these.
_BUSY: Final = """
    SELECT endpoint, count(*) FROM delivery
    WHERE finished_at IS NULL AND endpoint = ANY(%(names)s::text[])
    GROUP BY endpoint ORDER BY endpoint
"""

#: One row of the audit for each of several changes.
_AUDIT: Final = """
    INSERT INTO audit (who, action, what, why, detail)
    SELECT %(who)s, action, what, %(why)s, detail
    FROM unnest(%(actions)s::text[], %(objects)s::text[], %(details)s::text[]::jsonb[]) WITH ORDINALITY
         AS n (action, what, detail, number)
    ORDER BY number
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object as it is kept; secrets in `spec` are sealed or references."""

    kind: Kind
    name: str
    spec: Mapping[str, Any]
    #: Rises with each change of this object.
    version: int
    created_at: datetime
    updated_at: datetime
    #: Of an endpoint: ``active``, or how somebody holds it; see `madeira.store.holding`. No part of its contents.
    state: str = "active"
    #: When it was last held or let go.
    state_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole configuration of one moment."""

    version: int
    sources: Mapping[str, Stored]
    endpoints: Mapping[str, Stored]
    #: In their order.
    routes: Mapping[str, Stored]

    def of(self, kind: Kind) -> Mapping[str, Stored]:
        """The objects of one kind."""
        return {"source": self.sources, "endpoint": self.endpoints, "route": self.routes}[kind]

    def having(self, stored: Stored) -> "Snapshot":
        """The same with `stored` in its place, or as the last of its kind."""
        found = {**self.of(stored.kind), stored.name: stored}
        match stored.kind:
            case "source":
                return replace(self, sources=found)
            case "endpoint":
                return replace(self, endpoints=found)
            case "route":
                return replace(self, routes=found)


class Entry(NamedTuple):
    """One change for the audit."""

    action: str
    what: str
    detail: Mapping[str, Any]


def look(conn: psycopg.Connection[Any]) -> tuple[int, str | None]:
    """The version, and the level of the log that somebody asked for; None: each process has its own."""
    ((number, level, _),) = conn.execute(_LOOK)
    return number, level


def log_level(conn: psycopg.Connection[Any]) -> tuple[str | None, datetime | None]:
    """The level of the log that somebody asked for, and until when; None, None: each process has its own."""
    ((_, level, until),) = conn.execute(_LOOK)
    return level, until


def set_log_level(
    conn: psycopg.Connection[Any], level: str | None, *, for_s: float | None, who: str, why: str | None
) -> datetime | None:
    """Have all processes log from `level` on, for `for_s` seconds (None: until it is changed); None: each from its own.

    Writes the audit row too. Returns until when it holds.
    """
    until: datetime | None
    with conn.transaction():
        before, _ = log_level(conn)
        ((until,),) = conn.execute(_SET_LOG_LEVEL, {"level": level, "for_s": None if level is None else for_s}).fetchall()
        detail = {"before": before, "after": level, "until": until.isoformat() if until else None}
        audit.record(conn, who, "log-level", "log level", why, detail)
    return until


def version(conn: psycopg.Connection[Any]) -> int:
    """The version of the whole; rises with every change."""
    ((found,),) = conn.execute(_VERSION)
    return int(found)


def read(conn: psycopg.Connection[Any]) -> Snapshot:
    """Everything, as of one moment."""
    number = 0
    found: dict[str, dict[str, Stored]] = {"source": {}, "endpoint": {}, "route": {}}
    for kind, name, spec, at, created_at, updated_at, _, *held in conn.execute(_READ):
        if kind == "configuration":
            number = at
        else:
            found[kind][name] = Stored(kind, name, spec, at, created_at, updated_at, *held)
    return Snapshot(number, found["source"], found["endpoint"], found["route"])


def one(conn: psycopg.Connection[Any], kind: Kind, name: str) -> Stored | None:
    """One object; None when it is not there."""
    row = conn.execute(_ONE[kind], {"name": name}).fetchone()
    return Stored(kind, *row) if row else None


def lock(conn: psycopg.Connection[Any], *, removes: bool = False) -> int:
    """Let no other change in until this transaction ends; the present version.

    A change that `removes` an endpoint waits for what is being routed, and lets nothing be routed until it has ended: else
    a delivery might be born that nobody has counted or cancelled, for an endpoint that nobody knows.
    """
    ((found,),) = conn.execute(_LOCK_ALL if removes else _LOCK)
    return int(found)


def keep_endpoints(conn: psycopg.Connection[Any]) -> None:
    """Let no endpoint go until this transaction ends."""
    conn.execute(_KEEP)


def endpoints_among(conn: psycopg.Connection[Any], names: Iterable[str]) -> set[str]:
    """Those of some endpoints that are there; the built-in one always is."""
    names = list(names)
    return {BUILT_IN} & {*names} | {name for (name,) in conn.execute(_THERE, {"names": texts(names)})}


def missing_among(conn: psycopg.Connection[Any], names: Iterable[str]) -> list[str]:
    """Those of some endpoints that were removed, in the order given: what goes there waits until one of that name is made."""
    names = list(names)
    there = endpoints_among(conn, names)
    return [name for name in names if name not in there]


def raise_version(conn: psycopg.Connection[Any]) -> int:
    """Tell readers that something changed; once per transaction, under `lock`."""
    ((found,),) = conn.execute(_RAISE)
    return int(found)


def insert(conn: psycopg.Connection[Any], kind: Kind, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Add objects, by name; routes come last, in the order given."""
    if specs:
        conn.execute(_INSERT[kind], _named(specs))


def update(conn: psycopg.Connection[Any], kind: Kind, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Give objects new contents, by name."""
    if specs:
        conn.execute(_UPDATE[kind], _named(specs))


def delete(conn: psycopg.Connection[Any], kind: Kind, names: Iterable[str]) -> None:
    """Remove objects."""
    names = list(names)
    if names:
        conn.execute(_DELETE[kind], {"names": texts(names)})


def _named(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {"names": texts(specs), "specs": texts(json.dumps(spec) for spec in specs.values())}


def named_by(conn: psycopg.Connection[Any], kind: Literal["source", "endpoint"], name: str) -> list[str]:
    """Some of the routes that name a source or an endpoint."""
    return [row[0] for row in conn.execute(_NAMED_BY[kind], {"name": name})]


def order(conn: psycopg.Connection[Any], names: Sequence[str]) -> bool:
    """Bring the routes `names` into this order, in the places that they have among all; whether anything moved."""
    places = dict(conn.execute(_PLACES, {"names": texts(names)}).fetchall())
    wanted = dict(zip(names, sorted(places.values()), strict=True))
    if all(places[name] == place for name, place in wanted.items()):
        return False
    conn.execute(_MOVE, {"names": texts(names), "places": numbers(wanted.values())})
    return True


def busy(conn: psycopg.Connection[Any], endpoints: Iterable[str]) -> dict[str, int]:
    """Those of `endpoints` that have unfinished deliveries, with their number."""
    names = list(endpoints)
    return dict(conn.execute(_BUSY, {"names": texts(names)}).fetchall()) if names else {}


def record(conn: psycopg.Connection[Any], who: str, why: str | None, entries: Sequence[Entry]) -> None:
    """Write the audit of several changes, a row each."""
    if not entries:
        return
    params = {
        "who": who,
        "why": why,
        "actions": texts(e.action for e in entries),
        "objects": texts(e.what for e in entries),
        "details": texts(json.dumps(e.detail) for e in entries),
    }
    conn.execute(_AUDIT, params)
