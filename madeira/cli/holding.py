"""`madeira endpoints pause`, `resume`, `disable`, `enable`, and `lanes`: who is held, and what waits.

Straight in Postgres, as the API does it, so that a receiver can be spared also where no API runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.text import Text

from madeira.broker.queues import Queues
from madeira.cli import tables
from madeira.cli.acting import ask, maybe_reason_option, reason_option, refusals, so_already, tell
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.cli.listen import one_line
from madeira.lanes import LaneState
from madeira.lanes.pace import SEPARATOR, endpoint_of
from madeira.lanes.showing import held, lane
from madeira.lanes.state import hold_of
from madeira.routing.config import CALLBACK
from madeira.store import holding
from madeira.store.holding import Action, Holding


@click.command()
@json_option
def lanes(as_json: bool) -> None:
    """Tell of each endpoint whether it is held, how its lane is and why, and how much waits.

    Where the address comes with the event each host has a lane of its own; those in which something waits are told too.
    """
    values = load()
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        known = holding.everyone(conn)
    found = ask(values, lambda queues: _lanes(queues, known), "the lanes are not known")
    rows = found if found is not None else [_row(name, now) for name, now in sorted(known.items())]
    if as_json:
        print_json(rows)
        return
    table = tables.table(("endpoint", "state", "lane", "waiting", "under way", "until", "why"))
    for row in rows:
        until = "" if row.get("until_s") is None else f"{row['until_s']:.0f} s"
        plain = (row["endpoint"], row["state"], *(str(row.get(k, "?")) for k in ("lane", "waiting", "under_way")), until)
        table.add_row(*map(Text, plain), Text(one_line(row["reason"] or "")))
    tables.console().print(table)


def _lanes(queues: Queues, known: Mapping[str, Holding]) -> list[dict[str, Any]]:
    """A row per endpoint, and one per lane of a host."""
    hosts = {lane: known.get(endpoint_of(lane), Holding()) for lane in queues.lanes() if lane not in known and SEPARATOR in lane}
    rows = [_row(name, now, queues.lane_states(queues.lanes_of(name))) for name, now in sorted(known.items())]
    return rows + [_row(name, now, queues.lane_states([name])) for name, now in sorted(hosts.items())]


def _row(name: str, now: Holding, states: Sequence[LaneState] | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"endpoint": name, "state": now.state, "reason": now.reason, "since": now.since, "by": now.by}
    if states is None:
        return row
    shown = lane(now, states)
    row |= {"lane": shown["state"], "reason": shown["reason"], "until_s": shown["until_s"]}
    return row | {"waiting": sum(shown["waiting"].values()), "under_way": shown["under_way"]}


@click.command()
@click.argument("name")
@reason_option
@json_option
def pause(name: str, reason: str, as_json: bool) -> None:
    """Hold an endpoint: what waits for it stays in its place."""
    _change(name, "pause", reason, as_json)


@click.command()
@click.argument("name")
@maybe_reason_option
@json_option
def resume(name: str, reason: str | None, as_json: bool) -> None:
    """Let a paused endpoint go on."""
    _change(name, "resume", reason, as_json)


@click.command()
@click.argument("name")
@reason_option
@json_option
def disable(name: str, reason: str, as_json: bool) -> None:
    """Hold an endpoint that is not to be called until it is mended."""
    _change(name, "disable", reason, as_json)


@click.command()
@click.argument("name")
@maybe_reason_option
@json_option
def enable(name: str, reason: str | None, as_json: bool) -> None:
    """Let a disabled endpoint go on."""
    _change(name, "enable", reason, as_json)


def _change(name: str, action: Action, reason: str | None, as_json: bool) -> None:
    values = load()
    configure_log(values)
    with database(values) as db, refusals(), db.connection() as conn:
        changed = holding.change(conn, name, action, who=person(), why=reason or None)
    if changed is None and name == CALLBACK:
        raise click.ClickException(f"the endpoint {CALLBACK} is built in: it cannot be held [built-in]")
    if changed is None:
        raise click.ClickException(f"there is no endpoint {name!r}")
    now, version = changed.now, changed.version
    if version is not None:
        tell(values, lambda queues: queues.hold(name, version, hold_of(now.state)))
    if as_json:
        print_json({"endpoint": name, "already": changed.already, "changed": version is not None} | held(now))
    elif changed.already:
        reason = "; the reason is new" if version is not None else ""
        click.echo(f"endpoint {name} is {now.state}{so_already(changed.before.since, changed.before.by)}{reason}")
    else:
        click.echo(f"endpoint {name} is {now.state}")


#: Commands of `madeira endpoints`.
COMMANDS = (lanes, pause, resume, disable, enable)
