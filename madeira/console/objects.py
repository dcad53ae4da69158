"""Routes and sources: the rules as they are, each with who changed it and why."""

from typing import Final

import falcon

from madeira.api import query
from madeira.api.problems import Problem
from madeira.console import asking, changes, words
from madeira.console.house import House, Page
from madeira.errors import NotThere
from madeira.ids import NAME
from madeira.routing.fields import Kind

#: Objects of a page.
PAGE: Final = 60


class _Objects:
    """The pages of one kind."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind

    def add(self, app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
        """Add the pages."""
        app.add_route(f"/console/{self._kind}s", ObjectsPage(house, self._kind))
        app.add_route(f"/console/{self._kind}s/{{name}}", ObjectPage(house, self._kind))


routes: Final = _Objects("route")
sources: Final = _Objects("source")


class ObjectsPage(Page):
    """``/console/routes``, ``/console/sources``."""

    def __init__(self, house: House, kind: Kind) -> None:
        super().__init__(house)
        self._kind: Kind = kind

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show them all: routes in their order, sources by name."""
        after = asking.read(req, {"after": query.text}).values.get("after")
        found = list(self.house.configurator.list(self._kind))
        # One that has been removed meanwhile leads to the beginning.
        names = [one.name for one in found]
        begin = names.index(after) + 1 if after in names else 0
        page = found[begin : begin + PAGE]
        further = words.address(f"{self._kind}s", after=page[-1].name) if begin + PAGE < len(found) else None
        title = f"{self._kind.title()}s"
        self.house.show(
            req, resp, f"{self._kind}s.html", title=title, objects=page, begin=begin, count=len(found), further=further
        )


class ObjectPage(Page):
    """``/console/routes/{name}``, ``/console/sources/{name}``."""

    def __init__(self, house: House, kind: Kind) -> None:
        super().__init__(house)
        self._kind: Kind = kind

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Show one."""
        asking.read(req, {})
        missing = Problem(404, f"there is no {self._kind} {name[:64]!a}; it may have been removed, which the audit tells")
        if not NAME.fullmatch(name):
            raise missing
        try:
            found = self.house.configurator.get(self._kind, name)
        except NotThere:
            raise missing from None
        entries = changes.history(self.house, f"{self._kind} {name}")
        title = f"{self._kind.title()} {name}"
        self.house.show(req, resp, "object.html", title=title, kind=self._kind, object=found, entries=entries)
