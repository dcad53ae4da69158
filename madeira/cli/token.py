"""`madeira token`: makes, lists and revokes the tokens of people and programs, straight in Postgres.

So a first token can be made where no API runs yet, and where the last administrator's token was lost.
"""

import re
from typing import Any, Final

import click

from madeira.cli import tables
from madeira.cli.acting import maybe_reason_option
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.ids import NAME
from madeira.states import Role
from madeira.store import tokens as store

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_LIFE: Final = re.compile(r"([0-9]{1,9})([smhdw])", re.ASCII)


class _Life(click.ParamType[float]):
    """A length of time, such as 30d."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        found = _LIFE.fullmatch(str(value))
        seconds = int(found[1]) * _UNITS[found[2]] if found else 0
        if not 1 <= seconds <= store.MAX_EXPIRES_S:
            self.fail(f"{value!r} is no time such as 12h, 30d or 8w (at most a hundred years)", param, ctx)
        return seconds


@click.group()
def token() -> None:
    """Make, list and revoke API tokens."""


@token.command()
@click.argument("name")
@click.option("--role", required=True, type=click.Choice([str(r) for r in Role]), help="What it may do.")
@click.option("--expires", type=_Life(), metavar="TIME", help="How long it holds: 12h, 30d, 8w. Absent: until it is revoked.")
@maybe_reason_option
@json_option
def create(name: str, role: str, expires: float | None, reason: str | None, as_json: bool) -> None:
    """Make a token and print it, which happens only this once.

    Standard output holds the token and nothing else: TOKEN=$(madeira token create ci --role operator)
    """
    if not NAME.fullmatch(name):
        raise click.BadParameter("of 1 to 64 letters, digits, '.', '_' and '-'", param_hint="NAME")
    values = load()
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        text, made = store.create(conn, name=name, role=Role(role), expires_s=expires, who=person(), why=reason or None)
    if as_json:
        print_json({"token": text} | made)
        return
    click.echo(text)
    until = f"until {made['expires_at'].astimezone():%Y-%m-%d %H:%M}" if made["expires_at"] else "until it is revoked"
    click.echo(f"token {name} ({role}) holds {until}; it is not shown again", err=True)


@token.command()
@click.argument("name")
@maybe_reason_option
@json_option
def revoke(name: str, reason: str | None, as_json: bool) -> None:
    """End a token; it holds for at most two seconds more."""
    values = load()
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        ended = store.revoke(conn, name=name, who=person(), why=reason or None)
    if as_json:
        print_json(ended)
    else:
        click.echo(f"token {name} is revoked")


@token.command("list")
@json_option
def list_tokens(as_json: bool) -> None:
    """List the tokens that are not revoked."""
    values = load()
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        found = store.listed(conn)
    if as_json:
        print_json(found)
        return
    table = tables.table(("name", "role", "made by", "made", "holds", "last used"))
    for row in found:
        made, used = _moment(row["created_at"]), _moment(row["last_used_at"])
        table.add_row(row["name"], row["role"], row["created_by"], made, _life(row), used)
    tables.console().print(table)


def _life(row: dict[str, Any]) -> str:
    """How long a token holds, or since when it does not any more."""
    if row["expires_at"] is None:
        return "until revoked"
    return f"{'expired' if row['expired'] else 'until'} {_moment(row['expires_at'])}"


def _moment(value: Any) -> str:
    return f"{value.astimezone():%Y-%m-%d %H:%M}" if value else "never"
