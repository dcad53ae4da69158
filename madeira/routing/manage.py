"""Changes of sources, endpoints and routes: one way for the file, the API and the terminal.

A change is checked as a whole, against what is committed, in one transaction that lets no other change in; it raises the
configuration's version, by which every process learns of it, and leaves one row in the audit for each object that it
changed. What would change nothing is not written and leaves no trace.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

import psycopg

from madeira.errors import AlreadyThere, ConfigurationInvalid, FieldProblem, InUse, NotThere, Stale
from madeira.records import DeliveryRef
from madeira.routing import keys, secrets, values
from madeira.routing.apply import Change, Difference, entry, refuse_busy
from madeira.routing.config import CALLBACK, Problems, check_references, tables
from madeira.routing.export import toml
from madeira.routing.fields import KINDS, Kind
from madeira.routing.prepare import Policy, Preparer, changed_fields, merged
from madeira.sealing import Sealer
from madeira.store import cancelling, configuration
from madeira.store.configuration import Entry, Snapshot, Stored
from madeira.store.database import Database

#: Deliveries that one page of a cancel ends.
_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Shown:
    """One object as it may be shown."""

    kind: Kind
    name: str
    #: Its fields without the name; secrets are references or ``hidden``.
    document: Mapping[str, Any]
    #: Rises with each change of this object; a change names the one that it was made to.
    version: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Removed:
    """What removing an object did."""

    #: Deliveries that ended by it; the broker may forget them.
    cancelled: Sequence[DeliveryRef] = ()
    #: Deliveries that are being called now and were asked to end.
    requested: int = 0


class Configurator:
    """Reads and changes the configuration in `database`.

    `sealer` seals and opens secrets; `egress` says which hosts a saved URL may name. Every method may raise
    `StoreUnavailable`.
    """

    def __init__(self, *, database: Database, sealer: Sealer, egress: Policy) -> None:
        self._database = database
        self._sealer = sealer
        self._preparer = Preparer(sealer=sealer, egress=egress)

    # -- reading ------------------------------------------------------------------------------------------------

    def list(self, kind: Kind) -> Sequence[Shown]:
        """All objects of a kind: routes in their order, others by name."""
        with self._database.connection() as conn:
            return [_shown(stored) for stored in configuration.read(conn).of(kind).values()]

    def get(self, kind: Kind, name: str) -> Shown:
        """One object.

        Raises:
            NotThere: there is none of this name.
        """
        with self._database.connection() as conn:
            return _shown(_existing(conn, kind, name))

    def export(self) -> str:
        """The whole as a TOML file, which `apply` takes back; secrets are sealed or references."""
        with self._database.connection() as conn:
            found = configuration.read(conn)
        return toml({kind: [(s.name, s.spec) for s in found.of(kind).values()] for kind in KINDS})

    # -- changing one object ------------------------------------------------------------------------------------

    def create(self, kind: Kind, name: object, document: Mapping[str, Any], *, who: str, why: str | None = None) -> Shown:
        """Make a new object; routes come last. `name` is as it was given, and checked like all else; None: it was not.

        Raises:
            AlreadyThere: the name is taken.
            ConfigurationInvalid: the document is not as it must be.
        """
        problems = Problems()
        name = _checked_name(name, problems)
        with self._changing() as conn:
            spec, _ = self._checked(conn, kind, name, document, {}, problems)
            if configuration.one(conn, kind, name) is not None:
                raise AlreadyThere(f"there is {_a(kind)} {name!r} already; change that one, or choose another name")
            configuration.insert(conn, kind, {name: spec})
            return _done(conn, who, why, entry("create", kind, name, None, spec), kind, name)

    def update(
        self,
        kind: Kind,
        name: str,
        patch: Mapping[str, Any],
        *,
        expected: int | None,
        who: str,
        why: str | None = None,
        told: Sequence[FieldProblem] = (),
    ) -> Shown:
        """Change an object by a JSON merge patch (RFC 7396); ``hidden`` in it keeps the secret of that place.

        `expected` is the version that the change was made to; None: whatever it is now. `told` is what the caller has found
        wrong already: nothing is changed then, and it is told with all else.

        Raises:
            NotThere: there is none of this name.
            Stale: it has another version by now.
            ConfigurationInvalid: what comes out is not as it must be.
        """
        problems = Problems(found=list(told))
        with self._changing() as conn:
            before = _expected(conn, kind, name, expected)
            document = secrets.kept(kind, merged(before.spec, patch), before.spec, problems.add)
            if "name" in patch:
                document["name"] = patch["name"]
            spec, clear = self._checked(conn, kind, name, document, before.spec, problems)
            fields = changed_fields(self._preparer.clear(kind, before.spec), clear)
            if not fields:
                return _shown(before)
            configuration.update(conn, kind, {name: spec})
            return _done(conn, who, why, entry("update", kind, name, before.spec, spec, fields), kind, name)

    def imagined(
        self,
        kind: Kind,
        name: object,
        patch: Mapping[str, Any],
        *,
        is_new: bool,
        told: Sequence[FieldProblem] = (),
    ) -> Snapshot:
        """The configuration as `create` or `update` would leave it; nothing is written.

        Raises:
            NotThere: there is none of this name, and it is not new.
            AlreadyThere: the name is taken, and it is new.
            ConfigurationInvalid: what comes out is not as it must be.
        """
        problems = Problems(found=list(told))
        known = _checked_name(name, problems)
        with self._database.connection() as conn:
            now = configuration.read(conn)
            before = now.of(kind).get(known)
            if before is None and not is_new:
                raise NotThere(f"there is no {kind} {known!r}")
            if before is not None and is_new:
                raise AlreadyThere(f"there is {_a(kind)} {known!r} already; change that one, or choose another name")
            old = before.spec if before else {}
            document = secrets.kept(kind, merged(old, patch), old, problems.add)
            spec, _ = self._checked(conn, kind, known, document, old, problems)
        at = datetime.now(UTC)
        return now.having(replace(before, spec=spec) if before else Stored(kind, known, spec, 1, at, at))

    def delete(
        self,
        kind: Kind,
        name: str,
        *,
        expected: int | None,
        who: str,
        why: str | None = None,
        unfinished: Literal["refuse", "cancel"] = "refuse",
    ) -> Removed:
        """Remove an object; `unfinished` says what becomes of an endpoint's unfinished deliveries.

        They are cancelled page by page, each page a transaction, before the endpoint goes. What is being called ends with
        its call. What is routed meanwhile comes before the removal and is cancelled too, or after it and goes nowhere.

        Raises:
            NotThere: there is none of this name.
            Stale: it has another version by now.
            InUse: a route names it, or it has unfinished deliveries and they are not to be cancelled.
        """
        cancelled: Sequence[DeliveryRef] = ()
        requested = 0
        cancels = kind == "endpoint" and unfinished == "cancel"
        if cancels:
            with self._database.connection() as conn:
                _removable(conn, kind, name, expected)
            cancelled = _cancel_pages(self._database.connection, name, who, why)
        with self._changing(removes=kind == "endpoint") as conn:
            before = _removable(conn, kind, name, expected)
            if cancels:
                # What came meanwhile.
                cancelled = [*cancelled, *_cancel_pages(lambda: nullcontext(conn), name, who, why)]
                requested = configuration.busy(conn, [name]).get(name, 0)
            elif kind == "endpoint":
                refuse_busy(configuration.busy(conn, [name]))
            configuration.delete(conn, kind, [name])
            told = {"cancelled": len(cancelled), "requested": requested} if cancels else {}
            configuration.record(conn, who, why, [entry("delete", kind, name, before.spec, None, more=told)])
            configuration.raise_version(conn)
        return Removed(cancelled, requested)

    # -- changing all of them -----------------------------------------------------------------------------------

    def apply(
        self,
        text: str,
        *,
        prune: bool = False,
        dry_run: bool = False,
        replace_secrets: bool = False,
        who: str,
        why: str | None = None,
    ) -> Difference:
        """Bring the configuration to what the TOML `text` says, in one transaction; what it does not name stays, unless
        `prune`. With `dry_run` nothing is changed, and everything is checked. `replace_secrets` lets secrets be sealed with
        the key of this process although it does not open what is stored.

        Raises:
            ConfigurationInvalid: everything that is wrong with the file.
            InUse: an endpoint that would be removed has unfinished deliveries.
        """
        problems = Problems()
        file = tables(text, problems)
        with self._changing(removes=prune) as conn:
            change = Change(
                preparer=self._preparer,
                sealer=None if replace_secrets else self._sealer,
                before=configuration.read(conn),
                file=file,
                prune=prune,
            )
            change.find(problems)
            problems.refuse()
            refuse_busy(configuration.busy(conn, change.removed_endpoints))
            if not dry_run:
                change.write(conn, who, why)
        return change.difference

    def reencrypt(self, *, who: str, why: str | None = None) -> tuple[Sequence[str], Sequence[FieldProblem]]:
        """Seal everything anew that the first key has not sealed; the objects changed, and what no key opens.

        Raises:
            SealError: there is no key.
        """
        problems = Problems()
        done: list[str] = []
        with self._changing() as conn:
            found = configuration.read(conn)
            for kind in KINDS:
                specs = {
                    s.name: spec
                    for s in found.of(kind).values()
                    if (spec := self._preparer.anew(kind, s.spec, problems.under(f"{kind}[{s.name}]."))) != s.spec
                }
                configuration.update(conn, kind, specs)
                configuration.record(conn, who, why, [Entry("reencrypt", f"{kind} {name}", {}) for name in specs])
                done += [f"{kind} {name}" for name in specs]
            if done:
                configuration.raise_version(conn)
        return done, problems.found

    # -- what changes share -------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, *, removes: bool = False) -> Iterator[psycopg.Connection[Any]]:
        with self._database.connection() as conn:
            configuration.lock(conn, removes=removes)
            yield conn

    def _checked(
        self,
        conn: psycopg.Connection[Any],
        kind: Kind,
        name: str,
        document: Mapping[str, Any],
        before: Mapping[str, Any],
        problems: Problems,
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """What is kept of a document, and the same in clear.

        Raises:
            ConfigurationInvalid: everything that is wrong.
        """
        draft = self._preparer.draft(kind, name, document, problems)
        if kind == "route":
            now = configuration.read(conn)
            check_references(kind, document, now.sources, now.endpoints, problems)
        if draft is None:
            raise ConfigurationInvalid(tuple(problems.found))
        spec = self._preparer.sealed(kind, draft, before, problems)
        anew = keys.sealed_anew(kind, spec, document, before)
        if anew:
            keys.refuse_foreign(anew, configuration.read(conn), self._sealer, problems)
        problems.refuse()
        return spec, draft.clear


def _cancel_pages(
    connection: Callable[[], AbstractContextManager[psycopg.Connection[Any]]], endpoint: str, who: str, why: str | None
) -> list[DeliveryRef]:
    """Cancel what is unfinished of an endpoint, each page on a `connection`; what ended by it."""
    cancelled: list[DeliveryRef] = []
    after_id: int | None = 0
    while after_id is not None:
        with connection() as conn:
            page = cancelling.cancel_endpoint(conn, endpoint, after_id, _PAGE, who, why)
        cancelled += page.cancelled
        after_id = page.after_id
    return cancelled


def _checked_name(name: object, problems: Problems) -> str:
    """`name`, if it can be one; else "", which nothing is called, and the reason is told."""
    if name is None:
        problems.add("name", "is required, and must be a text")
        return ""
    try:
        return str(values.name().check(name, values.How()))
    except values.Wrong as e:
        problems.add("name", str(e))
        return ""


def _a(kind: Kind) -> str:
    return f"an {kind}" if kind == "endpoint" else f"a {kind}"


def _existing(conn: psycopg.Connection[Any], kind: Kind, name: str) -> Stored:
    found = configuration.one(conn, kind, name)
    if found is None:
        raise NotThere(f"there is no {kind} {name!r}")
    return found


def _expected(conn: psycopg.Connection[Any], kind: Kind, name: str, expected: int | None) -> Stored:
    if kind == "endpoint" and name == CALLBACK:
        problem = FieldProblem("name", f"the endpoint {CALLBACK} is built in: it cannot be changed or removed")
        raise ConfigurationInvalid((problem,))
    found = _existing(conn, kind, name)
    if expected is not None and found.version != expected:
        raise Stale(
            f"the {kind} {name!r} has version {found.version} by now, not {expected}; read it again and repeat the change"
        )
    return found


def _removable(conn: psycopg.Connection[Any], kind: Kind, name: str, expected: int | None) -> Stored:
    found = _expected(conn, kind, name, expected)
    routes = configuration.named_by(conn, kind, name) if kind != "route" else []
    if routes:
        raise InUse(f"the {kind} {name!r} is named by routes ({', '.join(routes)}); change or remove these first")
    return found


def _done(conn: psycopg.Connection[Any], who: str, why: str | None, note: Entry, kind: Kind, name: str) -> Shown:
    configuration.record(conn, who, why, [note])
    configuration.raise_version(conn)
    return _shown(_existing(conn, kind, name))


def _shown(stored: Stored) -> Shown:
    document = secrets.hidden(stored.kind, stored.spec)
    return Shown(stored.kind, stored.name, document, stored.version, stored.created_at, stored.updated_at)
