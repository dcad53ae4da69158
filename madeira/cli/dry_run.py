"""`madeira dry-run`: what would become of an event, by the rules as they are now; nothing is stored or sent."""

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from madeira.cli.apply import read
from madeira.cli.common import configure_log, database, json_option, load, print_json
from madeira.cli.endpoints import print_request
from madeira.cli.filters import File, Whole
from madeira.cli.listen import one_line
from madeira.dry_run import Response, document, no_source
from madeira.dry_run import dry_run as run
from madeira.egress import Egress
from madeira.errors import SettingsError
from madeira.ids import uuid7
from madeira.records import NewEvent
from madeira.routing.follow import rules_of
from madeira.sealing import Sealer
from madeira.store import configuration
from madeira.strict_json import Document, NotStrictJson, parse

#: Fields of an event that are texts, and may be left out.
_TEXTS: Final = ("event_id", "routing_key", "target_uri", "trace_id")

_FIELDS: Final = frozenset({"event_type", "payload", "parameters", "deliver_at", "source", *_TEXTS})


@click.command("dry-run")
@click.argument("file", type=File())
@click.option("--source", required=True, help="Source that would post it.")
@click.option("--response-status", type=Whole(100, 999), help="An answer of the receivers, to be judged: its status.")
@click.option(
    "--response-header", "headers", multiple=True, metavar="NAME: VALUE", help="A header of that answer; may be repeated."
)
@click.option("--response-body", default="", help="The body of that answer.")
@json_option
def dry_run(
    file: Path, source: str, response_status: int | None, headers: tuple[str, ...], response_body: str, as_json: bool
) -> None:
    """Tell which routes an event would take and why not the others, and the requests that would go out.

    FILE holds the event as JSON, as it would be posted; - reads standard input.
    """
    values = load()
    configure_log(values)
    if response_status is None and (headers or response_body):
        raise click.UsageError("--response-header and --response-body need --response-status: without it no answer is judged")
    response = Response(response_status, dict(map(_header, headers)), response_body) if response_status else None
    event = _event(read(file), source, str(file))
    egress = Egress(allow=values.egress_allow, deny=values.egress_deny)
    with database(values) as db, db.connection() as conn:
        rules = rules_of(configuration.read(conn), sealer=Sealer(values.secret_key))
    if reason := no_source(rules, source):
        raise SettingsError(one_line(reason))
    found = document(run(rules, event, egress=egress, now=datetime.now(UTC), response=response))
    if as_json:
        print_json(found)
    else:
        _print(found)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise click.BadParameter(f"{text!r} is not NAME: VALUE", param_hint="--response-header")
    return name.strip(), value.strip()


def _event(text: str, source: str, where: str) -> NewEvent:
    """The event in a file. Its fields are checked more strictly when it is really posted.

    Raises:
        SettingsError: it is none.
    """
    try:
        found = parse(text.encode())
    except NotStrictJson as e:
        raise SettingsError(f"{where}: the event is not strict JSON: {e}") from None
    if found is None:
        raise SettingsError(f"{where}: an event is a JSON object")
    problems = list(_problems(found))
    if problems:
        raise SettingsError(f"{where}: {'; '.join(problems)}")
    values = found.values
    return NewEvent(
        source=source,
        event_id=values.get("event_id") or uuid7(),
        event_type=values["event_type"],
        payload=found.texts["payload"],
        body_sha256=b"",
        trace_id=values.get("trace_id") or uuid.uuid4().hex,
        routing_key=values.get("routing_key"),
        target_uri=values.get("target_uri"),
        parameters=found.texts.get("parameters"),
    )


def _problems(found: Document) -> Iterator[str]:
    values = found.values
    for name in sorted(values.keys() - _FIELDS):
        yield f"{name[:64]!a} is not a field of an event; known are {', '.join(sorted(_FIELDS))}"
    if not isinstance(values.get("event_type"), str):
        yield "event_type is required, and must be a text"
    if "payload" not in values:
        yield "payload is required"
    for name in _TEXTS:
        if not isinstance(values.get(name, ""), str):
            yield f"{name} must be a text"
    if not isinstance(values.get("parameters", {}), dict):
        yield "parameters must be an object"


def _print(found: dict[str, Any]) -> None:
    for route in found["routes"]:
        answer = "matches" if route["matches"] else "FAILS" if route["failed"] else "no"
        reason = f": {one_line(route['reason'])}" if route["reason"] else ""
        click.echo(f"route {route['name']} to {route['endpoint']}: {answer}{reason}")
    click.echo(f"the event would be {found['status']}")
    for delivery in found["deliveries"]:
        click.echo(f"\ndelivery to {delivery['endpoint']} (lane {delivery['lane']})")
        for told in ("note", "error"):
            if delivery[told]:
                click.echo(f"  {one_line(delivery[told])}")
        if delivery["request"]:
            print_request(delivery["request"], "  ")
        if delivery["verdict"]:
            _print_verdict(delivery["verdict"])


def _print_verdict(verdict: dict[str, Any]) -> None:
    reason = f" ({one_line(verdict['reason'])})" if verdict["reason"] else ""
    follows = f", tried again after {verdict['retry_in_s']:g} s" if verdict["retry_in_s"] is not None else ""
    click.echo(f"  verdict {verdict['outcome']}{reason}: {verdict['status']}{follows}")
