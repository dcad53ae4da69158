"""Who did what, when and why: page by page, and as a file."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, Final

import falcon

from madeira.api import query
from madeira.api.answers import jsonable, rfc3339
from madeira.api.batch import NDJSON
from madeira.console import asking
from madeira.console.asking import Asked
from madeira.console.house import House, Page
from madeira.store import audit as store
from madeira.store.database import Database

#: Entries of a page, and of one reading for a file.
PAGE: Final = 30
_READ: Final = 500

#: Entries of a file at most.
MOST: Final = 100_000

_NAMES: Final = {"who": "who", "action": "action", "what": "what", "since": "since", "until": "until"}

_FILTERS: Final = {
    "who": query.text,
    "action": query.text,
    "what": query.text,
    "since": asking.moment,
    "until": asking.moment,
}

_COLUMNS: Final = ("id", "at", "who", "action", "what", "why", "detail")

#: What makes a spreadsheet take a cell for a formula.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def add(app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
    """Add the pages."""
    app.add_route("/console/audit", AuditPage(house))
    app.add_route("/console/audit/file", AuditFile(house))


class AuditPage(Page):
    """``/console/audit``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show a page of it, the latest first."""
        asked = asking.read(req, {**_FILTERS, "before": query.place})
        filters = {name: value for name, value in asked.values.items() if name != "before"}
        with self.house.database.connection() as connection:
            found = store.page(connection, limit=PAGE + 1, before=asked.values.get("before"), **filters)
        following = query.cursor(found[PAGE - 1]["at"], found[PAGE - 1]["id"]) if len(found) > PAGE else None
        self.house.show(
            req,
            resp,
            "audit.html",
            title="Audit",
            asked=asked,
            chips=asked.chips("audit", names=_NAMES),
            entries=found[:PAGE],
            older=asked.address("audit", before=following) if following else None,
            newest=asked.address("audit", before=None),
            files={kind: asked.address("audit", "file", before=None, format=kind) for kind in ("csv", "ndjson")},
        )


class AuditFile(Page):
    """``/console/audit/file``: all that matches, to be kept or counted."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Give the file."""
        asked = asking.read(req, {**_FILTERS, "format": query.choice("csv", "ndjson")})
        kind = asked.values.get("format", "ndjson")
        resp.content_type = "text/csv; charset=utf-8" if kind == "csv" else NDJSON
        resp.set_header("Content-Disposition", f'attachment; filename="madeira-audit.{kind}"')
        entries = _all(self.house.database, asked)
        resp.stream = _csv(entries) if kind == "csv" else _ndjson(entries)


def _all(database: Database, asked: Asked) -> Iterator[dict[str, Any]]:
    """Everything that matches, reading by reading; no connection is held between two."""
    filters = {name: value for name, value in asked.values.items() if name != "format"}
    before = None
    for _ in range(MOST // _READ):
        with database.connection() as connection:
            found = store.page(connection, limit=_READ, before=before, **filters)
        yield from found
        if len(found) < _READ:
            return
        before = (found[-1]["at"], found[-1]["id"])


def _ndjson(entries: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    for entry in entries:
        yield json.dumps(entry, default=jsonable).encode() + b"\n"


def _csv(entries: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    yield _line(_COLUMNS)
    for entry in entries:
        detail = json.dumps(entry["detail"], ensure_ascii=False)
        at = rfc3339(entry["at"])
        yield _line((entry["id"], at, *(_cell(entry[name] or "") for name in ("who", "action", "what", "why")), detail))


def _cell(text: str) -> str:
    """A text that no spreadsheet runs: the names of others stand in it."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _line(values: Any) -> bytes:
    line = io.StringIO()
    csv.writer(line).writerow(values)
    return line.getvalue().encode()
