"""The command `madeira` itself: what all commands share, and how errors reach a person."""

from typing import Any

import click

from madeira import __version__
from madeira.cli.doctor import doctor
from madeira.cli.events import events, trace
from madeira.cli.listen import listen
from madeira.cli.operate import migrate, reconcile
from madeira.cli.send import send
from madeira.cli.up import up
from madeira.errors import MadeiraError


class _Commands(click.Group):
    """Tells an error that we raised on purpose in one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MadeiraError as e:
            raise click.ClickException(str(e)) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="madeira")
def main() -> None:
    """Event delivery that loses nothing.

    `madeira up` starts everything. The other commands find a running `up` by its data folder (MADEIRA_DATA_DIR), or use the
    servers that MADEIRA_DATABASE_URL and MADEIRA_REDIS_URL name.
    """


for command in (up, migrate, send, listen, events, trace, reconcile, doctor):
    main.add_command(command)
