"""The rules as they are now: Postgres, followed while the process runs.

The version of the configuration is asked for every second, and the whole is read, as one snapshot, when it rose. So a change
counts within two seconds in every process, and nobody reads Postgres per message. While Postgres is away the rules from before
hold; a process that has not read any yet has none, and does nothing that needs them. The level of the log that a person asked
for comes by the same way.

An object that cannot be used here (a variable of the environment that is not set, a secret that no key opens) makes nothing
else unusable: it is logged once, and stands in `Rules.unusable`. A source with several secrets goes on with those that can be
used, since any one of them verifies. An endpoint does not: its calls are signed with all of them, and a receiver that knows only
the missing one would refuse for good what can as well wait.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import psycopg

from madeira.errors import StoreError, StoreUnavailable
from madeira.log import get, set_level, tell_left_out
from madeira.records import Endpoint, Route, Source
from madeira.routing.config import CALLBACK, Problems, Record, Rules, callback, record, resolved
from madeira.routing.fields import KINDS, Kind
from madeira.sealing import Sealer
from madeira.store import configuration
from madeira.store.configuration import Snapshot, Stored
from madeira.store.database import BoundedConnection, Database
from madeira.store.schema import is_misfit

#: Seconds between two looks; a change counts within 2 s.
_PERIOD_S: Final = 1.0

log = get(__name__)


class RulesFollower:
    """Holds the current rules; a thread of its own brings them up to date.

    `database` gives it a connection of its own. `sealer` opens secrets. `on_change` is called with the new rules, in the
    follower's thread, after each change and for the first ones. `environ` is where ``env:NAME`` is looked up; the process's
    environment when absent.
    """

    def __init__(
        self,
        *,
        database: Database,
        sealer: Sealer,
        on_change: Callable[[Rules], None] | None = None,
        environ: Mapping[str, str] | None = None,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._database = database
        self._maker = _Maker(sealer, environ)
        self._on_change = on_change
        self._period_s = period_s
        self._current: Rules | None = None
        self._conn: BoundedConnection | None = None
        #: Why the rules could not be read when they were last looked for.
        self._away: str | None = None
        #: The level of the log that the database asks for.
        self._level: str | None = None
        self._first = threading.Event()
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def current(self) -> Rules | None:
        """The rules that hold now; None before they were first read."""
        return self._current

    def need(self) -> Rules:
        """The rules that hold now.

        Raises:
            StoreUnavailable: they were not read yet.
        """
        current = self._current
        if current is None:
            raise StoreUnavailable(self._why_none())
        return current

    @property
    def missing(self) -> str | None:
        """Why there are no rules yet; None when there are."""
        return None if self._current else self._why_none()

    def _why_none(self) -> str:
        why = self._away
        if why and is_misfit(why):
            return why
        return f"sources, endpoints and routes could not be read from Postgres yet{f': {why}' if why else ''}"

    @property
    def version(self) -> int:
        """Rises with every change, and is the same in every process; 0 before the rules were first read."""
        return self._current.version if self._current else 0

    def start(self) -> None:
        """Begin to follow; after a fork, since threads do not survive one."""
        if self._thread is not None:
            return
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rules-follower", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the rules were first read, at most `timeout_s` seconds; whether they were."""
        return self._first.wait(timeout_s)

    def stop(self) -> None:
        """End following; `current` stays as it is."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def reload(self) -> None:
        """Look now. Returns at once; may be called from a signal handler."""
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._look_safely()
                tell_left_out()
                self._wake.wait(self._period_s)
                self._wake.clear()
        finally:
            self._hang_up()

    def _look_safely(self) -> None:
        try:
            self._look()
            if self._away:
                self._away = None
                log.info("rules.followed_again")
        except (StoreError, psycopg.Error) as e:
            self._hang_up()
            self._tell_away(str(e))
        except Exception:
            # Whatever it was: this thread is the only one that brings the rules up to date.
            log.exception("rules.look_failed")

    def _tell_away(self, why: str) -> None:
        """Once; and once more when it turns out that a person has to do something."""
        before, self._away = self._away, why
        if before and is_misfit(before) == is_misfit(why):
            return
        now = "the rules from before hold" if self._current else "there are none yet, and nothing is done that needs them,"
        log.warning("rules.not_followed", error=why, detail=f"{now} until Postgres can be read")

    def _look(self) -> None:
        conn = self._connection()
        version, level = configuration.look(conn)
        if level != self._level:
            self._level = level
            if set_level(level):
                log.warning("log.level_changed", to=level or "that of the environment")
        if self._current is not None and version == self._current.version:
            return
        before = self._current
        self._current = self._maker.rules(configuration.read(conn))
        _tell_unusable(self._current, before.unusable if before else {})
        self._first.set()
        self._tell(self._current)

    def _connection(self) -> BoundedConnection:
        if self._conn is None or self._conn.closed:
            self._conn = self._database.connect()
        return self._conn

    def _hang_up(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _tell(self, rules: Rules) -> None:
        log.info(
            "rules.changed",
            version=rules.version,
            sources=len(rules.sources),
            endpoints=len(rules.endpoints),
            routes=len(rules.routes),
        )
        if self._on_change is None:
            return
        try:
            self._on_change(rules)
        except Exception:
            log.exception("rules.change_not_told")


def rules_of(found: Snapshot, *, sealer: Sealer, environ: Mapping[str, str] | None = None) -> Rules:
    """The rules of what is stored, as this process would go by them."""
    return _Maker(sealer, environ).rules(found)


class _Maker:
    """Makes rules of what is stored; what did not change is not made again."""

    def __init__(self, sealer: Sealer, environ: Mapping[str, str] | None) -> None:
        self._sealer = sealer
        self._environ = environ
        self._made: dict[tuple[Kind, str], tuple[Stored, Record | None, str]] = {}

    def rules(self, found: Snapshot) -> Rules:
        unusable: dict[str, str] = {}
        records: dict[Kind, dict[str, Any]] = {kind: {} for kind in KINDS}
        made: dict[tuple[Kind, str], tuple[Stored, Record | None, str]] = {}
        for kind in KINDS:
            for stored in found.of(kind).values():
                known = self._made.get((kind, stored.name))
                one = known if known is not None and known[0].spec == stored.spec else (stored, *self._make(stored))
                made[kind, stored.name] = one
                if one[1] is not None:
                    records[kind][stored.name] = _held(one[1], stored)
                if one[2]:
                    unusable[f"{kind}/{stored.name}"] = one[2]
        self._made = made
        sources: dict[str, Source] = records["source"]
        endpoints: dict[str, Endpoint] = {CALLBACK: callback(), **records["endpoint"]}
        routes: list[Route] = [route for route in records["route"].values() if route.endpoint in endpoints]
        return Rules(
            sources=MappingProxyType(sources),
            endpoints=MappingProxyType(endpoints),
            routes=tuple(routes),
            version=found.version,
            unusable=MappingProxyType(unusable),
        )

    def _make(self, stored: Stored) -> tuple[Record | None, str]:
        """The record, and why it is unusable; of an unusable endpoint what routing needs, if there is so much, and of a
        source what verifies with those secrets that can be used.
        """
        problems = Problems()
        made = self._resolved(stored, stored.spec, problems)
        if made is not None:
            return made, ""
        reason = "; ".join(f"{p.field}: {p.detail}" for p in problems.found)
        if stored.kind == "source":
            made = self._with_usable_secrets(stored)
            return made, f"{reason} (its other secrets are in use)" if made else reason
        return (_without_secrets(stored) if stored.kind == "endpoint" else None), reason

    def _resolved(self, stored: Stored, spec: Mapping[str, Any], problems: Problems) -> Record | None:
        return resolved(
            stored.kind, stored.name, spec, sealer=self._sealer, environ=self._environ, problems=problems, stored=True
        )

    def _with_usable_secrets(self, stored: Stored) -> Record | None:
        listed = stored.spec.get("secrets")
        if not isinstance(listed, list):
            return None
        usable = [one for one in listed if self._resolved(stored, {**stored.spec, "secrets": [one]}, Problems()) is not None]
        return self._resolved(stored, {**stored.spec, "secrets": usable}, Problems()) if usable else None


def _held(made: Record, stored: Stored) -> Record:
    """The record of an object; that of an endpoint with what says whether, and since when, somebody holds it."""
    if not isinstance(made, Endpoint):
        return made
    since = f"{stored.created_at.timestamp()} {stored.state_since.timestamp() if stored.state_since else ''}"
    if stored.state == "active":
        return replace(made, since=since)
    return replace(made, hold="paused" if stored.state == "paused" else "disabled", since=since)


def _without_secrets(stored: Stored) -> Record | None:
    spec = {key: value for key, value in stored.spec.items() if key not in ("secrets", "headers", "client_certificate")}
    try:
        return record(stored.kind, stored.name, spec)
    except (TypeError, KeyError, ValueError):
        return None


def _tell_unusable(rules: Rules, before: Mapping[str, str]) -> None:
    for what, reason in rules.unusable.items():
        if before.get(what) == reason:
            continue
        if rules.is_partly_usable(what):
            log.warning(
                "rules.partly_unusable", what=what, reason=reason, detail="what is signed with the missing one is told 503"
            )
        else:
            log.error(
                "rules.unusable", what=what, reason=reason, detail="nothing goes there or comes from there until it is mended"
            )
    for what in before.keys() - rules.unusable.keys():
        log.info("rules.usable_again", what=what)
