"""`madeira trace` and `madeira events`: what Postgres knows about events, for a person or a program."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import click
import psycopg
from rich.console import Console
from rich.table import Table
from rich.text import Text

from madeira.broker import places
from madeira.broker.queues import Queues
from madeira.cli import tables
from madeira.cli.acting import ask
from madeira.cli.common import configure_log, database, json_option, load, print_json
from madeira.cli.listen import one_line
from madeira.cli.listing import list_events
from madeira.retry import names_its_class
from madeira.settings import Settings
from madeira.states import EventStatus
from madeira.store import story, tombstones

#: Characters of a payload and of an answer that are shown.
_SHOWN: Final = 300

#: What keeps a delivery from being called, in words.
_LIMITS: Final[dict[str, str]] = {
    "disabled": "its endpoint is disabled",
    "paused": "its endpoint is paused",
    "breaker": "the breaker of its lane is open",
    "retry_after": "the receiver asked to be left alone (Retry-After)",
    "rate": "the rate of its endpoint",
    "cap": "the calls at a time of its endpoint",
}


@click.command()
@click.argument("identifier", metavar="ID")
@json_option
def trace(identifier: str, as_json: bool) -> None:
    """Tell one event's whole story; ID is a trace id or an event id."""
    values = load()
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        found = story.find_trace(conn, identifier)
        _add_places(values, conn, found)
        gone = tombstones.find_trace(conn, identifier)
    if not found and not gone:
        raise click.ClickException(f"no event has the trace id or the event id {identifier!r}")
    if as_json:
        print_json(found + gone)
        return
    for event in found:
        _print(event)
    for event in gone:
        click.echo(_gone(event))


@click.group()
def events() -> None:
    """Look at events."""


events.add_command(list_events)


@events.command()
@click.argument("event_id", metavar="ID")
@click.option("--source", help="Source of the event; needed when two sources used the same id.")
@json_option
def show(event_id: str, source: str | None, as_json: bool) -> None:
    """Show one event with its deliveries and their attempts."""
    values = load()
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        candidates = [e for e in story.find_trace(conn, event_id) if e["event_id"] == event_id]
        _add_places(values, conn, candidates)
        gone = [e for e in tombstones.find_trace(conn, event_id) if e["event_id"] == event_id and source in (None, e["source"])]
    found = [e for e in candidates if source in (None, e["source"])]
    if not found and gone:
        raise click.ClickException(_gone(gone[0]))
    if not found:
        raise click.ClickException(f"there is no event {event_id!r}{f' of {source!r}' if source else ''}")
    if len(found) > 1:
        raise click.UsageError(
            f"several sources have an event {event_id}; give --source: {', '.join(e['source'] for e in found)}"
        )
    if as_json:
        print_json(found[0])
    else:
        _print(found[0])


def _add_places(values: Settings, conn: psycopg.Connection[Any], found: Sequence[dict[str, Any]]) -> None:
    """Say where waits what is unfinished, as the API does."""
    unfinished = [(e, places.in_order(conn, e)) for e in found if e["status"] in (EventStatus.PENDING, EventStatus.DELIVERING)]

    def add(queues: Queues) -> None:
        for event, waits in unfinished:
            places.add(event, waits, queues)

    if unfinished:
        ask(values, add, "what is waited for is not known")


def _print(event: Mapping[str, Any]) -> None:
    console = tables.console()
    head = Text.assemble(("event ", "dim"), (one_line(event["event_id"]), "bold"), "  ", _status(event["status"]))
    console.print(head, soft_wrap=True)
    facts = {
        "source": event["source"],
        "type": event["event_type"],
        "trace": event["trace_id"],
        "accepted": _time(event["created_at"]),
        "due": _time(event["deliver_at"]),
        "routed": _time(event["routed_at"]),
        "reason": event["reason"],
        "erased": _erased(event),
        "target": event["target_uri"],
        "payload": event["payload"][:_SHOWN],
    }
    for name, value in facts.items():
        if value is not None:
            console.print(Text.assemble((f"  {name:<9}", "dim"), one_line(str(value))), soft_wrap=True)
    for delivery in event["deliveries"]:
        _print_delivery(console, delivery)
    if not event["deliveries"]:
        console.print(Text("  no delivery yet" if event["status"] == "pending" else "  no delivery", "dim"))


def _print_delivery(console: Console, delivery: Mapping[str, Any]) -> None:
    line = Text.assemble(("  delivery ", "dim"), f"{delivery['id']} to ", (delivery["endpoint"], "bold"), "  ")
    line.append(_status(delivery["status"]))
    if delivery["status"] == "pending":
        waits = _waits(delivery.get("waits", {}))
        line.append(f"  waits: {waits}" if waits else f"  next attempt {_time(delivery['next_attempt_at'])}")
    if delivery["status"] == "delivering":
        line.append(f"  claimed until {_time(delivery['lease_until'])}")
    if delivery["failure_class"] and not names_its_class(delivery):
        line.append(f"  ({delivery['failure_class']})")
    if delivery["last_error"] and delivery["status"] != "succeeded":
        line.append(f"  {one_line(delivery['last_error'])}")
    console.print(line, soft_wrap=True)
    if delivery["attempts"]:
        console.print(_attempts(delivery["attempts"]))


def _gone(event: Mapping[str, Any]) -> str:
    return (
        f"event {one_line(event['event_id'])} of {one_line(event['source'])} was accepted {_time(event['created_at'])}, was "
        f"{event['status']} {_time(event['ended_at'])}, and was removed because of its age {_time(event['removed_at'])}"
    )


def _erased(event: Mapping[str, Any]) -> str | None:
    why = " (because of its age)" if event["erased_by"] == "retention" else ""
    return f"{_time(event['erased_at'])}{why}" if event["erased_at"] else None


def _waits(place: Mapping[str, Any]) -> str | None:
    """What a delivery waits for other than its time."""
    where, why = place.get("where"), _LIMITS.get(place.get("for", ""))
    if where == "ordering":
        behind = place["behind"]
        why = f"in its order, event {one_line(behind['event_id'])} of {one_line(behind['source'])} comes first"
    elif where == "waiting" and why is None:
        why = "for its turn"
    if why is None:
        return None
    until = f", until {_time(place['until'])}" if "until" in place else ""
    return f"{why}{until}, {place['ahead']} before it"


def _attempts(attempts: list[Mapping[str, Any]]) -> Table:
    table = tables.table(("     #", "started", "took", "outcome", "status", "error", "answer"))
    for a in attempts:
        took = "" if a["duration_s"] is None else f"{a['duration_s']:.3f} s"
        answer = bytes(a["excerpt"] or b"").decode("utf-8", "replace")[:80] or a["reason"] or ""
        cells = (f"{a['attempt']:>6}", _clock(a["started_at"]), took, a["outcome"], a["status_code"] or "", a["error_code"] or "")
        table.add_row(*(Text(str(c)) for c in cells), Text(one_line(answer)))
    return table


def _status(status: str) -> Text:
    return Text(status, tables.STATUS_COLORS.get(status, ""))


def _clock(value: datetime) -> str:
    return value.astimezone().time().isoformat(timespec="milliseconds")


def _time(value: datetime | None) -> str | None:
    return value.astimezone().isoformat(sep=" ", timespec="milliseconds") if value else None
