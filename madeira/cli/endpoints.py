"""`madeira endpoints`: lists and shows endpoints, and calls one for a test."""

import json
from typing import Any

import click
from rich.text import Text

from madeira.cli import tables
from madeira.cli.acting import ask, maybe_reason_option
from madeira.cli.common import configurator, configure_log, database, json_option, load, person, print_json
from madeira.cli.listen import one_line
from madeira.delivery.client import Caller
from madeira.egress import Egress
from madeira.lanes.showing import held, lane
from madeira.records import CALLBACK_URL
from madeira.routing.config import CALLBACK, callback
from madeira.routing.manage import Shown
from madeira.sealing import Sealer
from madeira.store import endpoints as store
from madeira.store import holding
from madeira.store.holding import Holding
from madeira.strict_json import NotStrictJson, parse
from madeira.trial import EVENT_TYPE, PAYLOAD, Trial, Trials


@click.group()
def endpoints() -> None:
    """Look at endpoints, and try them."""


@endpoints.command("list")
@json_option
def list_endpoints(as_json: bool) -> None:
    """List the endpoints."""
    with configurator(load()) as found:
        listed = found.list("endpoint")
    if as_json:
        print_json([_document(one) for one in listed])
        return
    table = tables.table(("name", "method", "url", "rate", "concurrency", "timeout"))
    defaults = callback()
    for one in listed:
        d = one.document
        limits = (d.get("rate", "not limited"), d.get("concurrency", defaults.concurrency), d.get("timeout", defaults.timeout))
        table.add_row(one.name, d.get("method", defaults.method), Text(one_line(d["url"])), *(str(limit) for limit in limits))
    tables.console().print(table)


@endpoints.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show an endpoint, without its secrets, how many of its deliveries are unfinished, who holds it, and how its lane is."""
    values = load()
    with configurator(values) as found:
        document: dict[str, Any] = (
            {"name": name, "url": CALLBACK_URL} if name == CALLBACK else _document(found.get("endpoint", name))
        )
    with database(values) as db, db.connection() as conn:
        document["unfinished"] = store.unfinished(conn, name)
        now = holding.read(conn, name) or Holding()
    states = ask(values, lambda queues: queues.lane_states(queues.lanes_of(name)), "how its lane is, is not known")
    document |= held(now) | {"lane": None if states is None else lane(now, states)}
    if as_json:
        print_json(document)
        return
    for field, value in document.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        tables.console().print(Text.assemble((f"{field:<18}", "dim"), one_line(text)), soft_wrap=True)


@endpoints.command()
@click.argument("name")
@click.option("--type", "event_type", default=EVENT_TYPE, show_default=True, help="Type of the event that is sent.")
@click.option("--payload", default=PAYLOAD, show_default=True, help="Its payload, as JSON.")
@click.option("--target-uri", help="The address to call, for an endpoint that calls the one of the event.")
@maybe_reason_option
@json_option
def test(name: str, event_type: str, payload: str, target_uri: str | None, reason: str | None, as_json: bool) -> None:
    """Call an endpoint once, and tell what came of it.

    The call is marked by the header X-Madeira-Test; no event is stored. The command fails when the endpoint did.
    """
    try:
        parse(payload.encode("utf-8", "surrogateescape"))
    except NotStrictJson as e:
        raise click.BadParameter(f"not strict JSON: {e}", param_hint="--payload") from None
    if name == CALLBACK and target_uri is None:
        raise click.UsageError(f"the endpoint {CALLBACK} calls the address that comes with the event: give --target-uri")
    values = load()
    configure_log(values)
    egress = Egress(allow=values.egress_allow, deny=values.egress_deny)
    with database(values) as db, Caller(max_connections=1, egress=egress) as caller:
        trials = Trials(database=db, sealer=Sealer(values.secret_key), caller=caller)
        tried = trials.call(
            name, Trial(event_type, payload, target_uri=target_uri), who=person(), why=reason or None, anywhere=True
        )
    told = tried.shown()
    if as_json:
        print_json({"endpoint": name} | told)
    else:
        _print(told)
    if told["verdict"]["outcome"] != "succeeded":
        raise click.exceptions.Exit(1)


def _print(told: dict[str, Any]) -> None:
    if told["request"]:
        print_request(told["request"])
    if told["answer"]:
        answer = told["answer"]
        click.echo(f"\nanswer {answer['status']} after {told['duration_s']:.3f} s, {answer['length']} bytes")
        if answer["excerpt"]:
            click.echo(f"  {one_line(answer['excerpt'])}")
    verdict = told["verdict"]
    reason = ": ".join(one_line(part) for part in (verdict["error_code"], verdict["reason"]) if part)
    click.echo(f"\n{verdict['outcome']}{f' ({reason})' if reason else ''}")


def print_request(request: dict[str, Any], indent: str = "") -> None:
    """Print a request as it is shown."""
    click.echo(f"{indent}{request['method']} {one_line(request['url'])}")
    for name, value in request["headers"]:
        click.echo(f"{indent}  {name}: {one_line(value)}")
    click.echo(f"{indent}  {one_line(request['body'])}")


def _document(found: Shown) -> dict[str, Any]:
    return {"name": found.name, **found.document, "version": found.version, "updated_at": found.updated_at}
