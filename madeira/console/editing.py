"""Sources, endpoints and routes made, changed and removed by forms, with the checks, the roles and the record of the API.

A form names the version that it was made of. When somebody else has saved another one meanwhile nothing is saved: the page
tells who changed what, brings what one had not touched to what stands there now, and keeps what one has typed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import falcon

from madeira import digits
from madeira.api import query
from madeira.api.admin import objects as api
from madeira.api.problems import Problem, forbidden
from madeira.console import asking, changes, fields, forms, trying, words
from madeira.console.fields import Control, Group
from madeira.console.house import House, Page, acting, session_of
from madeira.errors import AlreadyThere, ConfigurationInvalid, FieldProblem, InUse, NotThere, Stale
from madeira.routing.config import CALLBACK
from madeira.routing.fields import FIELDS, Kind
from madeira.routing.manage import Shown
from madeira.routing.prepare import merged
from madeira.states import Role
from madeira.store import configuration
from madeira.store import endpoints as counts

#: Names that a list to choose from holds; with more of them one types.
_CHOICES: Final = 300


class _Forms:
    """The forms of one kind."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind

    def add(self, app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
        """Add the pages."""
        # No name begins with a dash.
        app.add_route(f"/console/{self._kind}s/-/new", NewPage(house, self._kind))
        app.add_route(f"/console/{self._kind}s/{{name}}/edit", EditPage(house, self._kind))
        app.add_route(f"/console/{self._kind}s/{{name}}/remove", RemovePage(house, self._kind))


endpoints: Final = _Forms("endpoint")
routes: Final = _Forms("route")
sources: Final = _Forms("source")


@dataclass(frozen=True, slots=True)
class _Filled:
    """A form that somebody has sent, and what came of it."""

    form: Mapping[str, str]
    status: int = 200
    problems: Sequence[FieldProblem] = ()
    #: See `madeira.console.fields.Asked`.
    places: Mapping[str, str] | None = None
    #: What a dry run gave; None when there was none.
    trial: Mapping[str, Any] | None = None
    #: What others have changed meanwhile; None when nobody has.
    stale: Sequence[Mapping[str, Any]] | None = None
    notes: Mapping[str, str] | None = None


class _FormPage(Page):
    """What the forms of a kind share."""

    def __init__(self, house: House, kind: Kind) -> None:
        super().__init__(house)
        self._kind: Kind = kind

    def show(
        self, req: falcon.Request, resp: falcon.Response, *, shown: Shown | None, title: str, action: str, filled: _Filled | None
    ) -> None:
        """Answer with the form of `shown`, or of a new object; as somebody has `filled` it in, if somebody has."""
        kind, house = self._kind, self.house
        document = shown.document if shown else {}
        given = filled or _Filled(fields.values(kind, document))
        found = self._chosen(fields.groups(kind, document))
        beside, others = fields.by_control(given.problems, found, given.places or {})
        name = given.form.get("name", "")
        chosen = given.form.get("try.event", "")
        events = trying.events(house, kind, shown.name if shown else "", document, chosen) if kind != "source" else []
        trial_form = {**trying.ANSWER, "try.event": _key(events[0]) if events else "", **_trial_fields(given.form)}
        trial = given.trial
        if filled is None and shown is not None and kind != "source":
            trial = trying.tried(house, house.rules.read(), kind, shown.name, trial_form)
        resp.status = given.status
        house.show(
            req,
            resp,
            "edit.html",
            title=title,
            kind=kind,
            shown=shown,
            action=action,
            back=words.address(f"{kind}s", shown.name) if shown else f"/console/{kind}s",
            groups=fields.filled(given.form, found, beside, given.notes),
            name_control=replace(_NAME, value=name, doc=_name_doc(kind), problems=tuple(beside.get("name", ()))),
            reason=given.form.get("reason", ""),
            reason_problems=beside.get("reason", ()),
            wrong=sum(map(len, beside.values())),
            others=others,
            tries=given.form.get("do") == "try",
            stale=given.stale,
            trial=trial,
            trying=trial_form,
            events=events,
            entries=changes.history(house, f"{kind} {shown.name}") if shown else [],
        )

    def _chosen(self, groups: Sequence[Group]) -> list[Group]:
        """With the names of what is there where one is asked for, so that none has to be typed."""
        if self._kind != "route":
            return list(groups)
        names = {
            "endpoint": [CALLBACK, *(one.name for one in self.house.configurator.list("endpoint"))],
            "source": [one.name for one in self.house.configurator.list("source")],
        }

        def chosen(one: Control) -> Control:
            there = names.get(one.name, [])
            if not there or len(there) > _CHOICES:
                return one
            # What the route names stands there, also when it is gone.
            gone = [one.value] if one.value and one.value not in there else []
            return replace(one, widget="choice", choices=(*gone, *there))

        return [replace(group, controls=tuple(map(chosen, group.controls))) for group in groups]

    def existing(self, name: str) -> Shown:
        """The object `name`.

        Raises:
            Problem: 404, or 409 for what is built in.
        """
        if self._kind == "endpoint" and name == CALLBACK:
            raise Problem(409, f"the endpoint {CALLBACK} is built in: it cannot be changed or removed", name="built-in")
        try:
            return self.house.configurator.get(self._kind, api.known(self._kind, name))
        except NotThere as e:
            raise Problem(404, f"{e}; it may have been removed, which the audit tells") from None


class NewPage(_FormPage):
    """``/console/routes/-/new`` and so on."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show an empty form; for a route the query may say where it leads."""
        _see_that_he_may(req)
        asked = asking.read(req, {"endpoint": query.text} if self._kind == "route" else {})
        self._page(req, resp, _Filled({"endpoint": asked.values["endpoint"]}) if asked.values else None)

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Make it, or try it."""
        session, form = acting(req, Role.ADMIN, limit=forms.LARGE)
        kind, configurator = self._kind, self.house.configurator
        asked = fields.asked(kind, form, {})
        name = form.get("name", "").strip() or None
        try:
            why = _reason(form)
            if form.get("do") == "try" or asked.problems:
                found = configurator.imagined(kind, name, asked.patch, is_new=True, told=asked.problems)
                trial = trying.tried(self.house, self.house.rules.of(found), kind, str(name), form)
                self._page(req, resp, _Filled(form, trial=trial))
                return
            made = configurator.create(kind, name, merged({}, asked.patch), who=session.who, why=why)
        except ConfigurationInvalid as e:
            self._page(req, resp, _Filled(form, 422, e.problems, asked.places))
        except AlreadyThere as e:
            self._page(req, resp, _Filled(form, 409, [FieldProblem("name", str(e))], asked.places))
        else:
            text = f"The {kind} {made.name} is made; every process goes by it within two seconds."
            self.acted(req, resp, words.address(f"{kind}s", made.name), text, what=f"{kind} {made.name}")

    def _page(self, req: falcon.Request, resp: falcon.Response, filled: _Filled | None) -> None:
        action = words.address(f"{self._kind}s", "-", "new")
        self.show(req, resp, shown=None, title=f"New {self._kind}", action=action, filled=filled)


class EditPage(_FormPage):
    """``/console/routes/{name}/edit`` and so on."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Show it as a form."""
        _see_that_he_may(req)
        asking.read(req, {})
        self._page(req, resp, self.existing(name), None)

    def on_post(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Change it, or try the change."""
        session, form = acting(req, Role.ADMIN, limit=forms.LARGE)
        kind, configurator = self._kind, self.house.configurator
        shown = self.existing(name)
        asked = fields.asked(kind, form, shown.document)
        try:
            why = _reason(form)
            expected = _expected(form, shown)
            if form.get("do") == "try":
                found = configurator.imagined(kind, name, asked.patch, is_new=False, told=asked.problems)
                trial = trying.tried(self.house, self.house.rules.of(found), kind, name, form)
                self._page(req, resp, shown, _Filled(form, trial=trial))
                return
            saved = configurator.update(kind, name, asked.patch, expected=expected, who=session.who, why=why, told=asked.problems)
        except ConfigurationInvalid as e:
            self._page(req, resp, shown, _Filled(form, 422, e.problems, asked.places))
        except NotThere as e:
            raise Problem(404, f"{e}; it may have been removed, which the audit tells") from None
        except Stale:
            self._stale(req, resp, name, form)
        else:
            unchanged = saved.version == shown.version
            text = "Nothing was changed: it was so before." if unchanged else "every process goes by it within two seconds."
            told = text if unchanged else f"The {kind} {name} is saved as version {saved.version}; {text}"
            self.acted(req, resp, words.address(f"{kind}s", name), told, what=f"{kind} {name}")

    def _stale(self, req: falcon.Request, resp: falcon.Response, name: str, form: Mapping[str, str]) -> None:
        shown = self.existing(name)
        count = shown.version - int(form["version"]) if _is_same(form, shown) else -1
        entries = changes.since(self.house, f"{self._kind} {name}", count)
        based, notes = _rebased(self._kind, form, entries, shown)
        self._page(req, resp, shown, _Filled(based, 412, stale=entries, notes=notes))

    def _page(self, req: falcon.Request, resp: falcon.Response, shown: Shown, filled: _Filled | None) -> None:
        kind, name = self._kind, shown.name
        action = words.address(f"{kind}s", name, "edit")
        self.show(req, resp, shown=shown, title=f"Change the {kind} {name}", action=action, filled=filled)


class RemovePage(_FormPage):
    """``/console/routes/{name}/remove`` and so on."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Say what it would mean."""
        _see_that_he_may(req)
        asking.read(req, {})
        self._page(req, resp, self.existing(name), {})

    def on_post(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Remove it."""
        session, form = acting(req, Role.ADMIN)
        kind, shown = self._kind, self.existing(name)
        cancels = kind == "endpoint" and form.get("unfinished") == "cancel"
        why = forms.reason(form, required=cancels)
        try:
            expected = _expected(form, shown)
            removed = self.house.configurator.delete(
                kind, name, expected=expected, who=session.who, why=why, unfinished="cancel" if cancels else "refuse"
            )
        except NotThere as e:
            raise Problem(404, f"{e}; it may have been removed, which the audit tells") from None
        except (InUse, Stale) as e:
            resp.status = 409 if isinstance(e, InUse) else 412
            self._page(req, resp, self.existing(name), form, refusal=str(e))
            return
        api.forget(self.house.queues, removed)
        told = f" {words.plural(len(removed.cancelled), 'delivery was', 'deliveries were')} cancelled." if cancels else ""
        more = f" {words.plural(removed.requested, 'is', 'are')} called now and ends with its call." if removed.requested else ""
        self.acted(req, resp, f"/console/{kind}s", f"The {kind} {name} is removed.{told}{more}", what=f"{kind} {name}")

    def _page(
        self,
        req: falcon.Request,
        resp: falcon.Response,
        shown: Shown,
        form: Mapping[str, str],
        *,
        refusal: str = "",
    ) -> None:
        kind, name = self._kind, shown.name
        with self.house.database.connection() as connection:
            named = configuration.named_by(connection, kind, name) if kind != "route" else []
            unfinished = counts.unfinished(connection, name) if kind == "endpoint" else 0
        title = f"Remove the {kind} {name}?"
        told = {"kind": kind, "shown": shown, "routes": named, "unfinished": unfinished, "form": form, "refusal": refusal}
        self.house.show(req, resp, "remove.html", title=title, **told)


_NAME: Final = Control("name", "name", "text", required=True)


def _name_doc(kind: Kind) -> str:
    return FIELDS[kind][0].doc.replace("`", "")


def _see_that_he_may(req: falcon.Request) -> None:
    session = session_of(req)
    if not session.may(Role.ADMIN):
        raise forbidden(session.role, Role.ADMIN)


def _reason(form: Mapping[str, str]) -> str | None:
    """Why somebody does it, if he says so.

    Raises:
        ConfigurationInvalid: it cannot be one.
    """
    try:
        return forms.reason(form, required=False)
    except Problem as e:
        raise ConfigurationInvalid(tuple(FieldProblem(error.field, error.detail) for error in e.errors)) from None


def _is_same(form: Mapping[str, str], shown: Shown) -> bool:
    """Whether a form was made of this object, and not of one of the same name before."""
    return form.get("made") == shown.created_at.isoformat()


def _expected(form: Mapping[str, str], shown: Shown) -> int:
    """The version that a form was made of.

    Raises:
        Problem: 400, it names none.
        Stale: it is not the present one.
    """
    given = digits.plain(form.get("version", ""), 17)
    if given is None:
        raise Problem(400, "the form does not say of which version it was made: go back and load the page again")
    if not _is_same(form, shown) or given != shown.version:
        raise Stale(f"the {shown.kind} {shown.name!r} has been changed since this page was loaded; look at it again")
    return given


def _rebased(
    kind: Kind, form: Mapping[str, str], entries: Sequence[Mapping[str, Any]], shown: Shown
) -> tuple[dict[str, str], dict[str, str]]:
    """A form on top of what others have made of its object: the fields, and what to say beside those that both have changed."""
    found, notes = dict(form), {}
    before = entries[-1]["detail"].get("before") if entries else None
    was = fields.values(kind, before if isinstance(before, Mapping) else {})
    now = fields.values(kind, shown.document)
    changed = {str(name).partition(".")[0] for entry in entries for name in entry["detail"].get("changed", ())}
    for name, value in now.items():
        given = form.get(name, "").replace("\r\n", "\n")
        if given == was.get(name, ""):
            found[name] = value
        elif value != was.get(name, "") and value != given:
            notes[name] = f"somebody else has put here: {value or 'nothing'}"
    for one in FIELDS[kind]:
        if one.hides and one.name in changed:
            # What was typed beside one secret must not come to stand beside another.
            for name in [name for name in found if name.startswith(f"{one.name}.") and ".new" not in name]:
                del found[name]
    return found, notes


def _trial_fields(form: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in form.items() if name.startswith("try.")}


def _key(event: Mapping[str, Any]) -> str:
    return f"{event['source']}/{event['event_id']}"
