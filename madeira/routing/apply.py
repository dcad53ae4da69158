"""What a file would change: found first, as a whole, then written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from madeira.errors import InUse
from madeira.routing import secrets
from madeira.routing.config import File, Problems, check_references
from madeira.routing.fields import KINDS, Kind
from madeira.routing.prepare import Preparer, changed_fields
from madeira.store import configuration
from madeira.store.configuration import Entry, Snapshot

#: Objects that a message names, at most.
_NAMED: Final = 5


@dataclass(slots=True)
class Difference:
    """What applying a file changed, or would change; objects as ``kind name``."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    #: What is there and not in the file; it stays, unless the file is applied with pruning.
    kept: list[str] = field(default_factory=list)
    #: For what changed, the fields that did.
    fields: dict[str, list[str]] = field(default_factory=dict)
    #: Whether routes stand in another order.
    reordered: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.added or self.changed or self.removed or self.reordered)


class Change:
    """The way from the configuration `before` to what a `file` says."""

    def __init__(self, *, preparer: Preparer, before: Snapshot, file: File, prune: bool) -> None:
        self.difference = Difference()
        self._preparer = preparer
        self._before = before
        self._documents = file.named
        self._nameless = file.nameless
        self._prune = prune
        self._inserts: dict[Kind, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
        self._updates: dict[Kind, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
        self._removed: dict[Kind, list[str]] = {kind: [] for kind in KINDS}

    def find(self, problems: Problems) -> None:
        """Compare; what is wrong with a document is added to `problems`."""
        for kind in KINDS:
            for name, document in self._documents[kind].items():
                self._take(kind, name, document, problems.under(f"{kind}[{name}]."))
            for name in self._before.of(kind):
                if name not in self._documents[kind]:
                    (self.difference.removed if self._prune else self.difference.kept).append(f"{kind} {name}")
                    if self._prune:
                        self._removed[kind].append(name)
        for other in self._nameless:
            self._preparer.draft(other.kind, "", other.document, problems.under(other.place))
        self._check_routes(problems)
        self.difference.reordered = self._moves()

    @property
    def removed_endpoints(self) -> Sequence[str]:
        """The endpoints that go."""
        return self._removed["endpoint"]

    def write(self, conn: psycopg.Connection[Any], who: str, why: str | None) -> None:
        """Carry it out, with the audit and the new version of the whole."""
        if self.difference.is_empty:
            return
        entries: list[Entry] = []
        for kind in KINDS:
            configuration.insert(conn, kind, self._inserts[kind])
            configuration.update(conn, kind, self._updates[kind])
            entries += [entry("create", kind, name, None, spec) for name, spec in self._inserts[kind].items()]
            entries += [
                entry("update", kind, name, self._before.of(kind)[name].spec, spec, self.difference.fields[f"{kind} {name}"])
                for name, spec in self._updates[kind].items()
            ]
        for kind in reversed(KINDS):
            configuration.delete(conn, kind, self._removed[kind])
            entries += [entry("delete", kind, name, self._before.of(kind)[name].spec, None) for name in self._removed[kind]]
        if self.difference.reordered:
            configuration.order(conn, list(self._documents["route"]))
            entries.append(Entry("reorder", "routes", {"routes": len(self._documents["route"])}))
        configuration.record(conn, who, why, entries)
        configuration.raise_version(conn)

    def _take(self, kind: Kind, name: str, document: Mapping[str, Any], problems: Problems) -> None:
        draft = self._preparer.draft(kind, name, document, problems)
        if draft is None:
            return
        stored = self._before.of(kind).get(name)
        label = f"{kind} {name}"
        if stored is None:
            self.difference.added.append(label)
            self._inserts[kind][name] = self._preparer.sealed(kind, draft, {}, problems)
            return
        fields = changed_fields(self._preparer.clear(kind, stored.spec), draft.clear)
        if not fields:
            self.difference.unchanged.append(label)
            return
        self.difference.changed.append(label)
        self.difference.fields[label] = fields
        self._updates[kind][name] = self._preparer.sealed(kind, draft, stored.spec, problems)

    def _check_routes(self, problems: Problems) -> None:
        """See that the routes of the file name what will be there. A route that is not in the file names nothing that
        goes: it goes too.
        """
        present = {
            kind: [n for n in {**self._before.of(kind), **self._documents[kind]} if n not in self._removed[kind]]
            for kind in KINDS
        }
        listed = [(f"route[{name}].", document) for name, document in self._documents["route"].items()]
        nameless = [(other.place, other.document) for other in self._nameless if other.kind == "route"]
        for place, document in [*listed, *nameless]:
            check_references("route", document, present["source"], present["endpoint"], problems.under(place))

    def _moves(self) -> bool:
        """Whether the routes that are there already have another order in the file."""
        place = {name: number for number, name in enumerate(self._before.routes)}
        places = [place[name] if name in place else len(place) for name in self._documents["route"]]
        return places != sorted(places)


def entry(
    action: str,
    kind: Kind,
    name: str,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    fields: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> Entry:
    """The row of the audit for one change: what was, what is, and which fields changed, without any secret."""
    detail: dict[str, Any] = {}
    if before is not None:
        detail["before"] = secrets.hidden(kind, before)
    if after is not None:
        detail["after"] = secrets.hidden(kind, after)
    if fields:
        detail["changed"] = list(fields)
    return Entry(action, f"{kind} {name}", detail | dict(more or {}))


def refuse_busy(busy: Mapping[str, int]) -> None:
    """Refuse to remove endpoints that have unfinished deliveries.

    Raises:
        InUse: there are any.
    """
    if not busy:
        return
    told = ", ".join(f"{name} ({count})" for name, count in list(busy.items())[:_NAMED])
    more = f" and {len(busy) - _NAMED} more" if len(busy) > _NAMED else ""
    raise InUse(
        f"not removed, since deliveries are unfinished: endpoint {told}{more}; wait for their end, or cancel them "
        f"(`madeira cancel --endpoint {next(iter(busy))} --reason WHY`, then again; or "
        f"DELETE /v1/endpoints/{next(iter(busy))}?unfinished=cancel&reason=WHY)"
    )
