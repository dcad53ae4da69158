"""The command `madeira` itself: what all commands share, and how errors reach a person."""

import os
import re
import sys
from typing import Any, Final

import click
import httpx
import psycopg
import redis

from madeira import __version__
from madeira.cli.apply import apply, export
from madeira.cli.cancel import cancel
from madeira.cli.completion import completion
from madeira.cli.dead import dead
from madeira.cli.doctor import doctor
from madeira.cli.dry_run import dry_run
from madeira.cli.endpoints import endpoints
from madeira.cli.events import events, trace
from madeira.cli.holding import COMMANDS as HOLDING
from madeira.cli.jobs import jobs
from madeira.cli.keygen import keygen, reencrypt
from madeira.cli.listen import listen
from madeira.cli.log_level import log_level
from madeira.cli.operate import migrate, reconcile, retention
from madeira.cli.replay import replay, reroute
from madeira.cli.send import send
from madeira.cli.token import token
from madeira.cli.up import up
from madeira.errors import MadeiraError

#: User and password of a URL, greedily: a password may hold what should have been escaped.
_CREDENTIALS: Final = re.compile(r"://\S*@")


class _Commands(click.Group):
    """Tells whatever can be wrong outside of our code in one line, without a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run; what a terminal or file cannot show gets its escape; what was closed is empty, or swallows what it gets."""
        # Python has None for a stream that was closed before the start, and the next file or socket would get its number.
        sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
        sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure and getattr(stream, "errors", None) == "strict":
                reconfigure(errors="backslashreplace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Whoever read us has seen enough; click ends in silence.
            raise
        except (MadeiraError, OSError, UnicodeError, httpx.InvalidURL, psycopg.Error, redis.RedisError) as e:
            raise click.ClickException(_one_line(e)) from None


def _one_line(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        # Its own text repeats a part of what may be a secret.
        return f"an argument holds a character that cannot be used there ({error.encoding}: {error.reason})"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    return _CREDENTIALS.sub("://***@", text)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="madeira")
def main() -> None:
    """Event delivery that loses nothing.

    `madeira up` starts everything. The other commands find a running `up` by its data folder (MADEIRA_DATA_DIR), or use the
    servers that MADEIRA_DATABASE_URL and MADEIRA_REDIS_URL name.

    Exit codes: 0 done; 1 not done, or what was looked at is not as it should be; 2 the command was not understood.
    """


for command in HOLDING:
    endpoints.add_command(command)

for command in (
    up,
    migrate,
    apply,
    export,
    keygen,
    reencrypt,
    send,
    listen,
    events,
    trace,
    dead,
    replay,
    reroute,
    cancel,
    jobs,
    reconcile,
    retention,
    log_level,
    token,
    endpoints,
    dry_run,
    doctor,
    completion,
):
    main.add_command(command)
