"""`madeira endpoints pause`, `resume`, `disable`, `enable`, and `lanes`: who is held, and what waits.

Straight in Postgres, as the API does it, so that a receiver can be spared also where no API runs.
"""

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from madeira.broker.queues import Queues
from madeira.cli.acting import REDIS_S, maybe_reason_option, reason_option, refusals, tell
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.errors import BrokerUnavailable
from madeira.lanes import LaneState
from madeira.lanes.state import STATES, hold_of
from madeira.settings import Settings
from madeira.store import holding
from madeira.store.holding import Action


@click.command()
@json_option
def lanes(as_json: bool) -> None:
    """Tell of each endpoint whether it is held, how its lane is, and how much waits."""
    values = load()
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        states = holding.states(conn)
    found = _lanes(values, sorted(states))
    rows = [{"endpoint": name, "state": states[name]} | found.get(name, {}) for name in sorted(states)]
    if as_json:
        print_json(rows)
        return
    table = Table(box=None)
    for column in ("endpoint", "state", "lane", "waiting", "under way"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["endpoint"], row["state"], *(str(row.get(k, "?")) for k in ("lane", "waiting", "under_way")))
    Console().print(table)


def _lanes(values: Settings, names: list[str]) -> dict[str, dict[str, Any]]:
    """How the lanes of endpoints are; nothing where Redis cannot tell."""
    if not values.redis_url:
        return {}
    queues = Queues(redis_url=values.redis_url, namespace=values.namespace, timeout_s=REDIS_S)
    try:
        return {name: _lane(queues.lane_states(queues.lanes_of(name))) for name in names}
    except BrokerUnavailable as e:
        click.echo(f"the lanes are not known: {e}", err=True)
        return {}
    finally:
        queues.close()


def _lane(states: list[LaneState]) -> dict[str, Any]:
    worst = min(states, key=lambda s: STATES.index(s.name))
    waiting = sum(s.fresh + s.retry + s.replay for s in states)
    return {"lane": worst.name, "waiting": waiting, "under_way": sum(s.under_way for s in states)}


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
    if changed is None:
        raise click.ClickException(f"there is no endpoint {name} that could be held")
    now, version = changed.now, changed.version
    if version is not None:
        tell(values, lambda queues: queues.hold(name, version, hold_of(now.state)))
    if as_json:
        print_json({"endpoint": name, "state": now.state, "reason": now.reason, "by": now.by, "changed": version is not None})
    else:
        click.echo(f"endpoint {name} is {now.state}" + ("" if version is not None else " already"))


#: Commands of `madeira endpoints`.
COMMANDS = (lanes, pause, resume, disable, enable)
