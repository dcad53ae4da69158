"""The fields of sources, endpoints and routes as a form: made from the one table that the file and the API go by.

A form is flat: ``url``, ``retry.max``, ``secrets.1``, ``headers.2``. What a browser sends becomes a JSON merge patch, checked
afterwards like any other change. A secret is never in a page, also not one that was typed a moment ago: its field is empty,
and left empty keeps what is there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from madeira.errors import FieldProblem
from madeira.routing.fields import FIELDS, Field, Kind

#: Rows for headers and secrets that are not there yet.
_NEW: Final = ("new1", "new2")

#: Texts that have a line for themselves, and may have several.
_LONG: Final = frozenset({"body", "success", "filter", "ordering", "chain", "key"})

#: Where several lines are usual.
_TALL: Final = frozenset({"body", "chain", "key"})

_NUMBER: Final = re.compile(r"[+-]?[0-9.]{1,30}(?:[eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Control:
    """One thing that can be filled in."""

    #: What the form calls it.
    name: str
    label: str
    #: ``text``, ``choice``, ``area``, ``secret`` (a line that is never shown) or ``secret area``.
    widget: str
    value: str = ""
    #: What it does, as the reference says.
    doc: str = ""
    #: What holds when it is left empty.
    empty: str = ""
    choices: tuple[str, ...] = ()
    is_number: bool = False
    required: bool = False
    #: The name of the box that takes it away; empty when there is none.
    tick: str = ""
    is_ticked: bool = False
    #: What is wrong with it.
    problems: tuple[str, ...] = ()
    #: What somebody else has made of it meanwhile.
    note: str = ""

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown."""
        return self.widget.startswith("secret")


@dataclass(frozen=True, slots=True)
class Group:
    """Fields that belong together; the first has no title."""

    title: str
    doc: str
    controls: tuple[Control, ...]
    #: Whether anything of it is set, or wrong.
    is_open: bool = False


@dataclass(slots=True)
class Asked:
    """What a form asks for."""

    #: By RFC 7396, to what the form was made of.
    patch: dict[str, Any] = field(default_factory=dict)
    #: What is wrong with it before anybody has looked at its values.
    problems: list[FieldProblem] = field(default_factory=list)
    #: The control of a place in the document, where they are called differently.
    places: dict[str, str] = field(default_factory=dict)


# -- from a document to a form ---------------------------------------------------------------------------------------


def values(kind: Kind, document: Mapping[str, Any]) -> dict[str, str]:
    """What the form holds for `document`, as it is shown; secrets are empty."""
    return {control.name: control.value for group in groups(kind, document) for control in group.controls}


def groups(kind: Kind, document: Mapping[str, Any]) -> list[Group]:
    """The form for `document`, as it is shown, without its name."""
    own: list[Control] = []
    others: list[Group] = []
    for one in FIELDS[kind]:
        value = document.get(one.name)
        if one.name == "name":
            continue
        if one.fields:
            inner = [_control(sub, f"{one.name}.{sub.name}", (value or {}).get(sub.name), one) for sub in one.fields]
            inner += [_whole(one)] if value and any(sub.hides for sub in one.fields) else []
            others.append(_group(one, inner, value))
        elif one.hides:
            others.append(_group(one, list(_hidden(one, value)), value))
        else:
            own.append(_control(one, one.name, value, None))
    return [Group("", "", tuple(own), is_open=True), *others]


def _group(of: Field, controls: Sequence[Control], value: Any) -> Group:
    doc = f"{of.doc}. Without it: {of.absent}" if of.absent else of.doc
    return Group(of.name.replace("_", " "), _plain(doc), tuple(controls), is_open=bool(value) or of.required)


def _whole(of: Field) -> Control:
    return Control(f"{of.name}.none", "", "none", tick=f"{of.name}.remove")


def _control(of: Field, name: str, value: Any, table: Field | None) -> Control:
    """The control of a field that holds one value."""
    kind = of.value.schema.get("type")
    choices = tuple(of.value.schema.get("enum", ("yes", "no") if kind == "boolean" else ()))
    unit = f", {of.unit}" if of.unit else ""
    widget = "choice" if choices else "area" if of.name in _LONG else "text"
    if of.hides:
        widget = "secret area"
    return Control(
        name=name,
        label=f"{of.name.replace('_', ' ')}{unit}",
        widget=widget,
        value="" if of.hides else shown(value),
        doc=_plain(of.doc),
        empty=("kept as it is" if value else "") if of.hides else _shown_default(of),
        choices=choices,
        is_number=kind in ("number", "integer"),
        # A table that is not there needs none of its fields.
        required=of.required and table is None,
    )


def _hidden(of: Field, value: Any) -> Iterator[Control]:
    """The controls of a list or table of secrets: those that are there, and some that are not yet."""
    if of.hides == "list":
        for number, text in enumerate(value or [], 1):
            name = f"{of.name}.{number}"
            yield Control(name, f"{number}. {_told(text)}", "secret", empty="kept as it is", tick=f"{name}.remove")
        for new in _NEW:
            yield Control(f"{of.name}.{new}", "one more", "secret")
        return
    for number, (header, text) in enumerate(sorted((value or {}).items()), 1):
        name = f"{of.name}.{number}"
        yield Control(name, f"{header}: {_told(text)}", "secret", empty="kept as it is", tick=f"{name}.remove")
    for new in _NEW:
        yield Control(f"{of.name}.{new}.name", "one more: its name", "text")
        yield Control(f"{of.name}.{new}", "and its value", "secret")


def _told(text: str) -> str:
    return text if text.startswith("env:") else "hidden"


def shown(value: Any) -> str:
    """A value as a form holds it."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return str(int(value)) if value.is_integer() else repr(value)
        case list():
            return ", ".join(map(shown, value))
        case _:
            return str(value)


def _shown_default(of: Field) -> str:
    if of.default is not None:
        return shown(of.default)
    return _plain(of.absent)


def _plain(text: str) -> str:
    """Without the marks of the reference's own notation."""
    return text.replace("`", "")


# -- from a form to a change -----------------------------------------------------------------------------------------


def asked(kind: Kind, form: Mapping[str, str], document: Mapping[str, Any]) -> Asked:
    """What a form for `document`, as it is shown, asks for."""
    found = Asked()
    for one in FIELDS[kind]:
        if one.name == "name":
            continue
        before = document.get(one.name)
        if one.hides == "list":
            found.patch[one.name] = _list(one, form, before or [], found)
        elif one.hides == "table":
            found.patch[one.name] = _table(one, form, before or {}, found)
        elif one.fields:
            found.patch[one.name] = _inner(one, form, before or {})
        else:
            found.patch[one.name] = _one(one, form.get(one.name, ""), before)
    return found


def _inner(of: Field, form: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any] | None:
    if form.get(f"{of.name}.remove"):
        return None
    found = {}
    for sub in of.fields:
        given = form.get(f"{of.name}.{sub.name}", "")
        kept = before.get(sub.name) if sub.hides else None
        found[sub.name] = kept if kept and not given.strip() else _one(sub, given, before.get(sub.name))
    return found if any(value is not None for value in found.values()) else None


def _list(of: Field, form: Mapping[str, str], before: Sequence[str], found: Asked) -> list[str] | None:
    texts: list[str] = []
    for number, text in enumerate(before, 1):
        name = f"{of.name}.{number}"
        if not form.get(f"{name}.remove"):
            found.places[f"{of.name}[{len(texts)}]"] = name
            texts.append(form.get(name, "").strip() or text)
    for new in _NEW:
        given = form.get(f"{of.name}.{new}", "").strip()
        if given:
            found.places[f"{of.name}[{len(texts)}]"] = f"{of.name}.{new}"
            texts.append(given)
    return texts or None


def _table(of: Field, form: Mapping[str, str], before: Mapping[str, str], found: Asked) -> dict[str, str | None] | None:
    table: dict[str, str | None] = {}
    for number, (header, text) in enumerate(sorted(before.items()), 1):
        name = f"{of.name}.{number}"
        found.places[f"{of.name}.{header}"] = name
        table[header] = None if form.get(f"{name}.remove") else form.get(name, "").strip() or text
    for new in _NEW:
        name = f"{of.name}.{new}"
        header, value = form.get(f"{name}.name", "").strip(), form.get(name, "").strip()
        if not header and not value:
            continue
        if not header or table.get(header) is not None:
            detail = "stands there already: type the new value there" if header else "is needed: what is the header called?"
            found.problems.append(FieldProblem(f"{name}.name", detail))
            continue
        found.places[f"{of.name}.{header}"] = name
        table[header] = value
    return table if any(value is not None for value in table.values()) else None


def _one(of: Field, given: str, before: Any) -> Any:
    """The value of a field; None when it is left empty. What cannot be one is left as it is, for the check to tell."""
    text = given.replace("\r\n", "\n")
    if isinstance(before, str) and text == before.replace("\r\n", "\n"):
        return before
    if of.name not in _TALL:
        text = text.strip()
    if not text.strip():
        return None
    match of.value.schema.get("type"):
        case "boolean":
            return {"yes": True, "no": False}.get(text, text)
        case "number" | "integer":
            return number(text)
        case "array":
            return [number(part) for part in re.split(r"[,;\s]+", text) if part]
        case _:
            return text


def number(text: str) -> int | float | str:
    """A number, if `text` is one."""
    if not _NUMBER.fullmatch(text):
        return text
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        return text


# -- a form that comes back -------------------------------------------------------------------------------------------


def filled(
    form: Mapping[str, str],
    empty: Sequence[Group],
    problems: Mapping[str, Sequence[str]] | None = None,
    notes: Mapping[str, str] | None = None,
) -> list[Group]:
    """The groups with what somebody has filled in, and what is wrong with it by control; what is secret has to be typed again."""
    problems, notes = problems or {}, notes or {}
    found = []
    for group in empty:
        controls = tuple(
            replace(
                one,
                value="" if one.is_secret else form.get(one.name, ""),
                is_ticked=bool(one.tick and form.get(one.tick)),
                problems=(*problems.get(one.name, ()), *(_AGAIN if one.is_secret and form.get(one.name) else ())),
                note=notes.get(one.name, ""),
            )
            for one in group.controls
        )
        is_open = group.is_open or any(one.value or one.problems or one.is_ticked for one in controls)
        found.append(replace(group, controls=controls, is_open=is_open))
    return found


_AGAIN: Final = ("what you typed here is not shown and not kept: type it again before you save",)


def by_control(
    found: Sequence[FieldProblem], groups_: Sequence[Group], places: Mapping[str, str]
) -> tuple[dict[str, list[str]], list[FieldProblem]]:
    """What is wrong, by the control beside which it is told, and what belongs beside none."""
    names = {one.name for group in groups_ for one in group.controls} | {"name", "reason"}
    beside: dict[str, list[str]] = {}
    others = []
    for problem in found:
        place = problem.field or ""
        at = places.get(place, place)
        while at not in names and (at.endswith("]") or "." in at):
            at = at.rpartition("[")[0] if at.endswith("]") else at.rpartition(".")[0]
        if at in names:
            detail = problem.detail if at in (place, places.get(place)) else f"{place.removeprefix(at)} {problem.detail}"
            beside.setdefault(at, []).append(detail)
        else:
            others.append(problem)
    return beside, others
