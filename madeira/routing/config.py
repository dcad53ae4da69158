"""Sources, endpoints and routes: from a document, as a file or a client writes it, to the frozen records that everything else
works with.

There is one way for all: the document is checked field by field against the table in `madeira.routing.fields`, everything that
is wrong is told at once, and what comes out is its canonical form, which is kept in Postgres. Records are made from that
when the rules are read. An error names the object, the field, and what would be right; values of secrets and headers are
never told.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from madeira.errors import ConfigurationInvalid, FieldProblem, SettingsError
from madeira.records import CALLBACK_URL, OWN_SOURCE, Breaker, ClientCertificate, Endpoint, RetryPolicy, Route, Source
from madeira.routing import secrets
from madeira.routing.checks import as_table, check_pair
from madeira.routing.fields import FIELDS, KINDS, READ_ONLY, Field, Kind
from madeira.routing.values import ENV_PREFIX, How, Wrong, name, printable
from madeira.sealing import Sealer
from madeira.settings import refusal_of_reference, secret_reference

#: Name of the endpoint that is always there: it calls the address that came with the event.
CALLBACK: Final = "callback"

Record = Source | Endpoint | Route


@dataclass(frozen=True, eq=False)
class Rules:
    """All sources, endpoints and routes of one moment. Compared by identity: another moment has other rules."""

    sources: Mapping[str, Source]
    #: The built-in `CALLBACK` included. Those that are unusable are here too, without what makes them so: events are
    #: routed to them and wait. What calls must ask `endpoint`.
    endpoints: Mapping[str, Endpoint]
    #: In their order.
    routes: tuple[Route, ...]
    #: Rises with every change.
    version: int = 0
    #: What cannot be used in this process, as ``endpoint/ledger``, and why. A source that is among `sources` too verifies
    #: with some of its secrets, and not with others.
    unusable: Mapping[str, str] = field(default_factory=dict)

    def endpoint(self, name: str) -> Endpoint | None:
        """The endpoint `name`, if it can be called."""
        return None if f"endpoint/{name}" in self.unusable else self.endpoints.get(name)

    @property
    def names_a_source(self) -> bool:
        """Whether there is a source, usable or not."""
        return bool(self.sources) or any(what.startswith("source/") for what in self.unusable)

    def is_partly_usable(self, what: str) -> bool:
        """Whether `what`, one of `unusable`, is a source of which some secrets can be used."""
        kind, _, name = what.partition("/")
        return kind == "source" and name in self.sources


@dataclass(slots=True)
class Problems:
    """Collects what is wrong, under a common place."""

    prefix: str = ""
    found: list[FieldProblem] = field(default_factory=list)

    def add(self, place: str, detail: str) -> None:
        """Note that `detail` is wrong at `place`."""
        self.found.append(FieldProblem(f"{self.prefix}{place}" if place else self.prefix.removesuffix("."), detail))

    def under(self, prefix: str) -> "Problems":
        """The same collection, for what is below `prefix`."""
        return Problems(prefix, self.found)

    def refuse(self) -> None:
        """Raise what was found, if anything."""
        if self.found:
            raise ConfigurationInvalid(tuple(self.found))


def no_rules() -> Rules:
    """What holds without any configuration: no source, and the built-in endpoint only."""
    return Rules(MappingProxyType({}), MappingProxyType({CALLBACK: callback()}), ())


def callback() -> Endpoint:
    """The built-in endpoint."""
    return Endpoint(name=CALLBACK, url=CALLBACK_URL)


# -- from a document to its canonical form ---------------------------------------------------------------------------


def canonical(kind: Kind, of: str, document: Mapping[str, Any], how: How, problems: Problems) -> dict[str, Any]:
    """The canonical form of `document`, without its name, which must be `of` where it stands there.

    Of a place that `problems` has already nothing more is told: what stands there is not what was meant.
    """
    before = len(problems.found)
    told = {p.field for p in problems.found}
    found = _canonical(kind, of, document, how, problems)
    problems.found[before:] = [p for p in problems.found[before:] if p.field not in told]
    return found


def _canonical(kind: Kind, of: str, document: Mapping[str, Any], how: How, problems: Problems) -> dict[str, Any]:
    if kind == "endpoint" and of == CALLBACK:
        problems.add(
            "name", f"the endpoint {CALLBACK} is built in and cannot be changed; make another one with url = {CALLBACK_URL!r}"
        )
    if kind == "source" and of == OWN_SOURCE:
        problems.add("name", f"the source {OWN_SOURCE} is built in: in its events Madeira tells of itself; take another name")
    if document.get("name", of) != of:
        problems.add("name", "an object keeps its name; make a new one instead")
    plain = {key: value for key, value in document.items() if key != "name"}
    for key in READ_ONLY[kind].keys() & plain.keys():
        problems.add(key, READ_ONLY[kind][key])
        del plain[key]
    found = _table(FIELDS[kind][1:], plain, how, problems, "")
    _check_together(kind, found, problems)
    return found


def _table(fields: tuple[Field, ...], table: Mapping[str, Any], how: How, problems: Problems, at: str) -> dict[str, Any]:
    known = [one.name for one in fields]
    for key in table:
        if key not in known:
            problems.add(f"{at}{printable(key)}", f"unknown field{did_you_mean(key, known)}")
    found: dict[str, Any] = {}
    for one in fields:
        if one.name in table:
            _one(one, table[one.name], how, problems, at, found)
        elif one.required:
            problems.add(f"{at}{one.name}", "is missing")
    return found


def _one(one: Field, value: Any, how: How, problems: Problems, at: str, found: dict[str, Any]) -> None:
    place = f"{at}{one.name}"
    try:
        if one.fields:
            found[one.name] = _table(one.fields, as_table(value), how, problems, f"{place}.")
        else:
            found[one.name] = one.value.check(value, how)
    except Wrong as e:
        for below, detail in e.problems:
            problems.add(f"{place}{below}", detail)


def _check_together(kind: Kind, found: Mapping[str, Any], problems: Problems) -> None:
    """What can only be seen from several fields."""
    if kind != "endpoint":
        return
    retry = found.get("retry", {})
    both = sorted(retry.keys() & {"initial", "factor", "max"})
    if "delays" in retry and both:
        problems.add("retry.delays", f"is an explicit list and cannot stand beside {', '.join(both)}")
    policy = _retry(retry)
    if "delays" not in retry and policy.initial > policy.max:
        problems.add("retry.initial", f"initial = {policy.initial:g} is more than max = {policy.max:g}")
    if not any(p.field.startswith(f"{problems.prefix}breaker") for p in problems.found):
        breaker = Breaker(**found.get("breaker", {}))
        if breaker.hold > breaker.max:
            problems.add("breaker.hold", f"hold = {breaker.hold:g} is more than max = {breaker.max:g}")
    certificate = found.get("client_certificate", {})
    if certificate.keys() == {"chain", "key"} and not any(
        p.field.startswith(f"{problems.prefix}client_cert") for p in problems.found
    ):
        try:
            check_pair(certificate)
        except Wrong as e:
            for below, detail in e.problems:
                problems.add(f"client_certificate{below}", detail)


def check_references(
    kind: Kind, document: Mapping[str, Any], sources: Iterable[str], endpoints: Iterable[str], problems: Problems
) -> None:
    """See that what a document names is there; only routes name anything. `endpoints` is without the built-in one."""
    if kind != "route":
        return
    for one, known in (("endpoint", {*endpoints, CALLBACK}), ("source", {*sources, OWN_SOURCE})):
        named = document.get(one)
        if (
            isinstance(named, str)
            and named not in known
            and not any(p.field == f"{problems.prefix}{one}" for p in problems.found)
        ):
            problems.add(one, f"there is no {one} {named!r}{did_you_mean(named, known)}")


def did_you_mean(one: str, known: Iterable[str]) -> str:
    """A hint at the nearest of `known`; at all of them when none is near and there are few."""
    known = sorted(known)
    near = difflib.get_close_matches(str(one), known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known are {', '.join(known)}" if 0 < len(known) <= 20 else ""


# -- from the canonical form to a record -----------------------------------------------------------------------------


def record(kind: Kind, of: str, spec: Mapping[str, Any]) -> Record:
    """The record of a canonical form whose secrets are the secrets themselves."""
    if kind == "source":
        return Source(**{**spec, "name": of, "secrets": tuple(spec["secrets"])})
    if kind == "route":
        return Route(**{**spec, "name": of})
    values = dict(spec)
    certificate = values.pop("client_certificate", None)
    return Endpoint(
        **{
            **values,
            "name": of,
            "headers": MappingProxyType(dict(values.get("headers", {}))),
            "secrets": tuple(values.get("secrets", ())),
            "retry": _retry(values.get("retry", {})),
            "client_certificate": ClientCertificate(**certificate) if certificate else None,
            "breaker": Breaker(**values.get("breaker", {})),
        }
    )


def _retry(table: Mapping[str, Any]) -> RetryPolicy:
    return RetryPolicy(**{**table, "delays": tuple(table.get("delays", ()))})


def resolved(
    kind: Kind,
    of: str,
    spec: Mapping[str, Any],
    *,
    sealer: Sealer,
    environ: Mapping[str, str] | None,
    problems: Problems,
    stored: bool = False,
) -> Record | None:
    """The record of an object, with its secrets opened and looked up; None, and what is wrong, when that is impossible.

    `environ` is where ``env:NAME`` is looked up; the process's environment when absent. `stored` says that `spec` is from the
    database.
    """
    before = len(problems.found)
    opened = secrets.opened(kind, spec, sealer, problems.add, {})

    def look_up(place: secrets.Place, text: str) -> str:
        if not text.startswith(ENV_PREFIX):
            return text
        variable = text.removeprefix(ENV_PREFIX)
        try:
            return secret_reference(text, str(place), environ)
        except SettingsError:
            # What was saved before such names were refused may be there still.
            refusal = refusal_of_reference(variable)
            problems.add(str(place), refusal or f"the environment variable {variable} is not set in this process")
            return text

    found = canonical(kind, of, secrets.changed(kind, opened, look_up), How(resolved=True, stored=stored), problems)
    return record(kind, of, found) if len(problems.found) == before else None


# -- from a file to documents ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Nameless:
    """A document of a file that cannot be known by its name; it is checked only, so that all its mistakes are told."""

    kind: Kind
    #: Where it stands, as ``endpoint number 2.``
    place: str
    #: Without its name.
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class File:
    """What a TOML file holds."""

    #: The documents by kind and name, in their order.
    named: Mapping[Kind, dict[str, dict[str, Any]]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    #: Those with a name that is missing, impossible or taken.
    nameless: list[Nameless] = field(default_factory=list)


def tables(text: str, problems: Problems) -> File:
    """The documents of a TOML file; what is wrong with their names is told."""
    found = File()
    document = _toml(text, problems)
    for one in document:
        if one not in KINDS:
            problems.add(printable(one), f"unknown field{did_you_mean(one, KINDS)}")
    for kind in KINDS:
        listed = document.get(kind, [])
        if not isinstance(listed, list) or not all(isinstance(t, dict) for t in listed):
            problems.add(kind, f"write [[{kind}]] with double brackets: there can be several")
            continue
        for number, table in enumerate(listed, 1):
            place = f"{kind} number {number}."
            of = _name(table, problems.under(place))
            if of in found.named[kind]:
                problems.add(f"{kind}[{of}].name", f"there are two of this name; the other is {kind} number {number}")
                of = None
            if of is None:
                found.nameless.append(Nameless(kind, place, {key: value for key, value in table.items() if key != "name"}))
            else:
                found.named[kind][of] = table
    return found


def _name(table: Mapping[str, Any], problems: Problems) -> str | None:
    if "name" not in table:
        problems.add("name", "is missing")
        return None
    try:
        return str(name().check(table["name"], How()))
    except Wrong as e:
        problems.add("name", str(e))
        return None


def _toml(text: str, problems: Problems) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        problems.add("", f"not valid TOML: {e}")
    except RecursionError:
        problems.add("", "not usable TOML: values are nested too deeply")
    except ValueError as e:
        # A number with too many digits, for one, is no error of syntax to the parser.
        problems.add("", f"not usable TOML: {e}")
    return {}


def parse_toml(text: str, *, where: str, environ: Mapping[str, str] | None = None, sealer: Sealer | None = None) -> Rules:
    """The rules of a file's `text`, with their secrets looked up and opened, without any database.

    `where` names the file in errors; `environ` is where ``env:NAME`` is looked up.

    Raises:
        SettingsError: what is wrong, and where.
    """
    problems = Problems()
    file = tables(text, problems)
    documents, opens = file.named, sealer or Sealer(())
    found: dict[Kind, dict[str, Any]] = {kind: {} for kind in KINDS}
    for other in file.nameless:
        below = problems.under(other.place)
        resolved(other.kind, "", other.document, sealer=opens, environ=environ, problems=below)
        check_references(other.kind, other.document, documents["source"], documents["endpoint"], below)
    for kind in KINDS:
        for of, document in documents[kind].items():
            below = problems.under(f"{kind}[{of}].")
            made = resolved(kind, of, document, sealer=opens, environ=environ, problems=below)
            check_references(kind, document, documents["source"], documents["endpoint"], below)
            if made is not None:
                found[kind][of] = made
    if problems.found:
        raise SettingsError(f"{where}: {ConfigurationInvalid(tuple(problems.found))}")
    endpoints = {CALLBACK: callback(), **found["endpoint"]}
    return Rules(MappingProxyType(found["source"]), MappingProxyType(endpoints), tuple(found["route"].values()))
