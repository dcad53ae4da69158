"""`madeira events list`: which events there are, newest first, and with ``--follow`` those that come."""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from madeira.cli import tables
from madeira.cli.common import configure_log, database, json_option, load, plain
from madeira.cli.filters import MOMENT, Whole
from madeira.cli.listen import one_line
from madeira.cli.tables import STATUS_COLORS
from madeira.states import EventStatus
from madeira.store import listing, timeline
from madeira.store.database import Database
from madeira.store.listing import Wanted

#: Seconds between two looks for new events.
LOOK_S: Final = 0.5

#: How far each look goes back: events become visible in another order than that of their acceptance.
OVERLAP: Final = timedelta(seconds=15)


@click.command("list")
@click.option("--status", type=click.Choice([status.value for status in EventStatus]), help="Only events in this state.")
@click.option("--type", "event_type", help="Only this type, or with a star at its end all that begin so.")
@click.option("--source", help="Only events of this source.")
@click.option("--endpoint", help="Only events that go to this endpoint.")
@click.option("--trace", "trace_id", help="Only events of this trace.")
@click.option("--since", type=MOMENT, help="Accepted at this time or later (local, unless it names its zone).")
@click.option("--until", type=MOMENT, help="Accepted before this time.")
@click.option("--limit", type=Whole(1, 100_000), default=50, show_default=True, help="How many at most.")
@click.option("--follow", is_flag=True, help="Go on with those that come, until interrupted.")
@json_option
def list_events(limit: int, follow: bool, as_json: bool, **asked: Any) -> None:
    """List events, the newest first; with --follow those that come, the earliest first.

    With --json one event a line.
    """
    values = load()
    configure_log(values)
    wanted = Wanted(**(asked | {"status": EventStatus(asked["status"]) if asked["status"] else None}))
    show = _print_json if as_json else _Lines().show
    event = None
    with database(values) as db:
        for event in _coming(db, wanted) if follow else _newest(db, wanted, limit):
            show(event)
    if event is None and not as_json:
        click.echo("no events", err=True)


def _newest(db: Database, wanted: Wanted, limit: int) -> Iterator[Mapping[str, Any]]:
    return tables.rows(db, lambda conn, n, before: listing.page(conn, wanted, limit=n, before=before), limit)


def _coming(db: Database, wanted: Wanted) -> Iterator[Mapping[str, Any]]:
    """Events as they come. One that was told is not told again, whatever becomes of it."""
    with db.connection() as conn:
        began = wanted.since or timeline.now(conn)
    told: dict[int, datetime] = {}
    horizon = began
    while True:
        since = max(began, horizon - OVERLAP)
        recent = Wanted(**{name: getattr(wanted, name) for name in _NARROWED}, since=since)
        new = [event for event in _newest(db, recent, 1_000_000) if event["seq"] not in told]
        for event in reversed(new):
            told[event["seq"]] = event["created_at"]
            horizon = max(horizon, event["created_at"])
            yield event
        told = {seq: at for seq, at in told.items() if at >= horizon - OVERLAP}
        time.sleep(LOOK_S)


_NARROWED: Final = ("status", "event_type", "source", "endpoint", "trace_id")


def _print_json(event: Mapping[str, Any]) -> None:
    click.echo(json.dumps(event, default=plain))


class _Lines:
    """Prints an event a line."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def show(self, event: Mapping[str, Any]) -> None:
        accepted = event["created_at"].astimezone().isoformat(sep=" ", timespec="milliseconds")
        line = Text.assemble((accepted, "dim"), "  ", (f"{event['status']:<10}", STATUS_COLORS.get(event["status"], "")))
        line.append(f"  {event['source']}  {event['event_type']}  ")
        line.append(one_line(event["event_id"]), "bold")
        if event["reason"]:
            line.append(f"  {event['reason']}")
        for delivery in event["deliveries"]:
            status = delivery["status"]
            line.append(f"  {delivery['endpoint']}: ", "dim").append(status, STATUS_COLORS.get(status, ""))
        self._console.print(line, soft_wrap=True)
