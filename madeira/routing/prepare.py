"""From a document that somebody hands in to what is kept, and back to what can be compared.

Sealing the same secret twice gives two texts, so two states of an object are compared in clear; and a secret that was sealed
before is kept as it is, so that a change of something else does not rewrite it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from madeira.routing import secrets
from madeira.routing.config import Problems, canonical
from madeira.routing.fields import Kind
from madeira.routing.values import How
from madeira.sealing import Sealer, SealError, is_sealed


class Policy(Protocol):
    """What `madeira.egress.Egress` says about hosts."""

    def refusal_of_host(self, host: str) -> str | None:
        """Why a host is not called; None when it may be."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A document that was checked: in clear, for comparison only."""

    clear: Mapping[str, Any]
    #: For each secret that came sealed, by its clear text, the sealed one.
    known: Mapping[str, str]


class Preparer:
    """Checks, seals, opens and compares documents."""

    def __init__(self, *, sealer: Sealer, egress: Policy) -> None:
        self._sealer = sealer
        self._how = How(refusal_of_host=egress.refusal_of_host)

    def draft(self, kind: Kind, name: str, document: Mapping[str, Any], problems: Problems) -> Draft | None:
        """Check a document; None when something is wrong with it, all of which `problems` has then."""
        before = len(problems.found)
        known: dict[str, str] = {}
        opened = secrets.opened(kind, document, self._sealer, problems.add, known)
        found = canonical(kind, name, opened, self._how, problems)
        if len(problems.found) == before:
            return Draft(found, known)
        self._check_sealable(kind, opened, known, problems)
        return None

    def _check_sealable(self, kind: Kind, opened: Mapping[str, Any], known: Mapping[str, str], problems: Problems) -> None:
        """Tell what `sealed` would tell of a document that never gets there, for something else is wrong with it."""
        told = {p.field for p in problems.found}
        unsealable = Problems(problems.prefix)
        secrets.sealed(kind, opened, self._sealer, unsealable.add, known)
        problems.found += [p for p in unsealable.found if p.field not in told]

    def sealed(self, kind: Kind, draft: Draft, before: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
        """What is kept of a draft; a secret that is sealed in `before`, what was kept until now, stays so."""
        known = dict(draft.known)
        self.clear(kind, before, known)
        return secrets.sealed(kind, draft.clear, self._sealer, problems.add, known)

    def clear(self, kind: Kind, spec: Mapping[str, Any], known: dict[str, str] | None = None) -> dict[str, Any]:
        """What is kept, in clear; a secret that no key opens stays sealed, and so is like no other."""
        return secrets.opened(kind, spec, self._sealer, lambda _place, _detail: None, {} if known is None else known)

    def anew(self, kind: Kind, spec: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
        """What is kept, with everything sealed anew that the first key has not sealed.

        Raises:
            SealError: there is no key.
        """

        def change(place: secrets.Place, text: str) -> str:
            if not is_sealed(text) or self._sealer.is_sealed_by_first(text):
                return text
            try:
                clear = self._sealer.open(text)
            except SealError as e:
                problems.add(str(place), str(e))
                return text
            return self._sealer.seal(clear)

        return secrets.changed(kind, spec, change)


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The fields in which two states in clear differ, those of tables as ``retry.max``."""
    return sorted(_changed(before, after, ""))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], at: str) -> Iterator[str]:
    for name in before.keys() | after.keys():
        one, other = before.get(name), after.get(name)
        if one == other and (name in before) == (name in after):
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _changed(one, other, f"{at}{name}.")
        else:
            yield f"{at}{name}"


def merged(document: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`document` after a JSON merge patch (RFC 7396): a field that is null goes, tables are merged, all else is replaced."""
    found = dict(document)
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict):
            inner = found.get(name)
            found[name] = merged(inner if isinstance(inner, dict) else {}, value)
        else:
            found[name] = value
    return found
