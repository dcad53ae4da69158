"""`madeira dead`: what was given up and waits for a person, as a list, in groups, or one with all that was tried."""

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import click
from rich.text import Text

from madeira.cli import tables
from madeira.cli.common import configure_log, database, json_option, load, plain, print_json
from madeira.cli.filters import CLASS, MOMENT, Checked, Whole
from madeira.cli.listen import one_line
from madeira.states import FailureClass
from madeira.store import dead_letters
from madeira.store.database import Database
from madeira.store.dead_letters import Groups
from madeira.store.selection import Selection

#: Characters of an answer that are shown.
_SHOWN: Final = 2000


@click.command()
@click.argument("delivery", metavar="[ID]", required=False, type=Whole(0, 2**63 - 1))
@click.option("--groups", is_flag=True, help="Count them by endpoint and error instead.")
@click.option("--endpoint", type=Checked("endpoint"), help="Only on their way to this endpoint.")
@click.option("--source", type=Checked("source"), help="Only of events of this source.")
@click.option(
    "--type", "event_type", type=Checked("event_type"), help="Only of this type; with a star at its end, that begin so."
)
@click.option("--class", "failure_class", type=CLASS, help="Only of this class.")
@click.option("--error", type=Checked("error"), help="Only with this code of the last failure: http_503, dns, ...")
@click.option("--since", type=MOMENT, help="Died at this time or later (local, unless it names its zone).")
@click.option("--until", type=MOMENT, help="Died before this time.")
@click.option("--text", type=Checked("text"), help="With this in the words of the last failure or in the event's id.")
@click.option("--limit", type=Whole(1, 100_000), default=50, show_default=True, help="How many at most.")
@json_option
def dead(delivery: int | None, groups: bool, limit: int, as_json: bool, **asked: Any) -> None:
    """List dead letters, the latest first; ID (of a delivery) shows one with its attempts.

    On a terminal as a table, else a line each with tabs between: when it died, delivery, source, event, endpoint, error,
    attempts, and what it says; with --groups count, endpoint, error, first and last time of death, and what one says. With
    --json one object a line.
    """
    values = load()
    configure_log(values)
    with database(values) as db:
        if delivery is not None:
            _see_that_it_is_alone(groups, asked)
            _show(db, delivery, as_json)
            return
        wanted = _selection(asked)
        if groups:
            with db.connection() as conn:
                found = dead_letters.groups(conn, wanted, limit=limit)
            _print_groups(found, as_json)
        else:
            latest = tables.rows(db, lambda conn, n, after: dead_letters.page(conn, wanted, limit=n, after=after), limit)
            _print_list(latest, as_json)


def _see_that_it_is_alone(groups: bool, asked: Mapping[str, Any]) -> None:
    if groups or any(value is not None for value in asked.values()):
        raise click.UsageError("an ID shows one dead letter: give it without --groups and without filters")


def _selection(asked: Mapping[str, Any]) -> Selection:
    failure_class = FailureClass(asked["failure_class"]) if asked["failure_class"] else None
    return Selection(**{**asked, "failure_class": failure_class})


# -- lists -----------------------------------------------------------------------------------------------------------

_LIST: Final = ("died", "delivery", "source", "event", "endpoint", "error", "attempts", "last failure")
_GROUPS: Final = ("count", "endpoint", "error", "first died", "last died", "one of them says")


def _print_list(found: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        for one in found:
            click.echo(json.dumps(one, default=plain))
        return
    rows = (
        (
            _time(one["died_at"]),
            str(one["id"]),
            one["source"],
            one["event_id"],
            one["endpoint"],
            one["error_code"] or one["failure_class"],
            str(one["attempt"]),
            _said(one),
        )
        for one in found
    )
    if not _print_rows(_LIST, rows):
        click.echo("no dead letters", err=True)


def _print_groups(found: Groups, as_json: bool) -> None:
    if as_json:
        for group in found.groups:
            click.echo(json.dumps(group, default=plain))
    else:
        rows = (
            (
                str(group["count"]),
                group["endpoint"],
                group["error_code"] or group["failure_class"] or "",
                _time(group["first_died_at"]),
                _time(group["last_died_at"]),
                _said(group),
            )
            for group in found.groups
        )
        if not _print_rows(_GROUPS, rows):
            click.echo("no dead letters", err=True)
    if not found.complete:
        click.echo(f"counted are those among the latest {found.among} only; narrow it by a filter", err=True)


def _said(one: Mapping[str, Any]) -> str:
    """The last failure, without the code that stands in a column of its own."""
    return str(one["last_error"] or "").removeprefix(f"{one['error_code']}: ")


def _print_rows(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> bool:
    """Print a table on a terminal, else plain lines, each as soon as it is there; whether there are any."""
    if not sys.stdout.isatty():
        some = False
        for row in rows:
            some = True
            click.echo("\t".join(one_line(cell) for cell in row))
        return some
    table = tables.table(columns, right=("count", "attempts"))
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    if table.row_count:
        tables.console().print(table)
    return table.row_count > 0


# -- one of them -----------------------------------------------------------------------------------------------------


def _show(db: Database, delivery: int, as_json: bool) -> None:
    with db.connection() as conn:
        found = dead_letters.find(conn, delivery)
    if found is None:
        raise click.ClickException(f"there is no dead letter {delivery}: no such delivery, or it is not dead (any more)")
    if as_json:
        for attempt in found["attempts"]:
            attempt["sha256"] = attempt["sha256"].hex() if attempt["sha256"] else None
        print_json(found)
        return
    facts = {
        "delivery": f"{found['id']} to {found['endpoint']}",
        "event": f"{found['event_id']} of {found['source']}, {found['event_type']}",
        "trace": found["trace_id"],
        "accepted": _time(found["accepted_at"]),
        "failed": f"first {_time(found['first_failed_at'])}, last {_time(found['last_failed_at'])}",
        "died": f"{_time(found['died_at'])} ({found['failure_class']})",
        "error": found["last_error"] or found["error_code"] or "-",
    }
    for name, value in facts.items():
        _line(name, value)
    if found["erased_at"]:
        _line("erased", f"{_time(found['erased_at'])}: it cannot be sent again")
    for attempt in found["attempts"]:
        _print_attempt(attempt)


def _print_attempt(attempt: Mapping[str, Any]) -> None:
    took = "" if attempt["duration_s"] is None else f", {attempt['duration_s']:.3f} s"
    said = attempt["error_code"] or attempt["outcome"]
    click.echo()
    _line(f"attempt {attempt['attempt']}", f"{_time(attempt['started_at'])}{took}: {said} {attempt['reason'] or ''}")
    exchange = attempt["exchange"]
    if exchange:
        request = exchange["request"]
        _line("  sent", f"{request['method']} {attempt['url']}")
        for name, value in request["headers"]:
            _line("", f"{name}: {value}")
        _line("", f"(body of {request['body_length']} bytes, sha256 {request['body_sha256']})")
    elif attempt["url"]:
        _line("  called", attempt["url"])
    if attempt["status_code"] is not None:
        _line("  received", str(attempt["status_code"]))
    for name, value in ((exchange or {}).get("answer") or {}).get("headers", ()):
        _line("", f"{name}: {value}")
    if attempt["excerpt"]:
        _line("", bytes(attempt["excerpt"]).decode("utf-8", "replace")[:_SHOWN])


def _line(name: str, value: str) -> None:
    click.echo(click.style(f"{name:<11}", dim=True) + one_line(value))


def _time(value: datetime) -> str:
    return value.astimezone().isoformat(sep=" ", timespec="seconds")
