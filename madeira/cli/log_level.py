"""`madeira log-level`: from which level on all processes log, while they run."""

from typing import Final

import click

from madeira import settings
from madeira.cli.acting import maybe_reason_option
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.cli.filters import Whole
from madeira.settings import LOG_LEVELS
from madeira.store import configuration

#: Gives each process the level of its environment again.
_OWN: Final = "own"


@click.command("log-level")
@click.argument("level", required=False, type=click.Choice([*LOG_LEVELS, _OWN]))
@click.option("--for", "for_s", type=Whole(1, configuration.LOG_LEVEL_MAX_S), metavar="SECONDS", help="Only for so long.")
@maybe_reason_option
@json_option
def log_level(level: str | None, for_s: int | None, reason: str | None, as_json: bool) -> None:
    """Tell, or change within two seconds, from which LEVEL on all processes log; `own` gives each its own again."""
    if for_s is not None and level in (None, _OWN):
        raise click.UsageError("--for goes with a level: debug, info, warning or error")
    if level is not None and not reason:
        raise click.UsageError("say why with --reason: it stands in the audit")
    values = load()
    settings.require(values, "database_url")
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        if level is not None:
            wanted = None if level == _OWN else level
            configuration.set_log_level(conn, wanted, for_s=for_s, who=person(), why=reason)
        now, until = configuration.log_level(conn)
    if as_json:
        print_json({"level": now, "until": until})
        return
    if now is None:
        click.echo("each process has the level of its environment")
        return
    click.echo(f"{now} until {until.astimezone():%Y-%m-%d %H:%M:%S %z}" if until else now)
