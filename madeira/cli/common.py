"""What several commands need: the settings, with a running `up` taken into account, and ways to print."""

import getpass
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from shutil import which
from typing import Any
from uuid import UUID

import click

from madeira import log, settings
from madeira.cli.running import DataFolder
from madeira.egress import Egress
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.settings import Settings
from madeira.store.database import Database

#: The option of every command whose answer a program may read.
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def load() -> Settings:
    """The settings of this process; what they leave open comes from a `madeira up` that runs on the same data folder."""
    values = settings.load()
    values = replace(values, data_dir=values.data_dir.resolve())
    note = DataFolder(values.data_dir).running()
    if note is None:
        return values
    return replace(
        values,
        database_url=values.database_url or note.database_url,
        redis_url=values.redis_url or note.redis_url,
        config=values.config or (Path(note.config) if note.config else None),
        secret_key=values.secret_key or DataFolder(values.data_dir).secret_key(),
        egress_allow=values.egress_allow if settings.is_set("MADEIRA_EGRESS_ALLOW") else tuple(note.egress_allow),
        egress_deny=values.egress_deny if settings.is_set("MADEIRA_EGRESS_DENY") else tuple(note.egress_deny),
    )


def program() -> str:
    """How somebody types this program: as it was, where the shell does not find it by its name."""
    called = Path(sys.argv[0])
    if called.name != "madeira" or which("madeira"):
        return "madeira"
    return str(called.relative_to(Path.cwd())) if called.is_relative_to(Path.cwd()) else str(called)


def api_url(values: Settings) -> str:
    """Where the API listens."""
    note = DataFolder(values.data_dir).running()
    if note is not None:
        return note.api_url
    return url_of(values.host, values.port)


def url_of(host: str, port: int) -> str:
    """The URL by which this machine reaches an address that a server listens on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configure_log(values: Settings) -> None:
    """Warnings and errors only, for people: a command's answer is its output."""
    log.configure(replace(values, log_format="text", log_level="warning"), "cli")


@contextmanager
def database(values: Settings) -> Iterator[Database]:
    """Connections for one command."""
    settings.require(values, "database_url")
    # What the pool would say is in the error that the command ends with.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    found = Database(url=values.database_url, application="madeira-cli", pool_max=2)
    found.open()
    try:
        yield found
    finally:
        found.close()


def person() -> str:
    """Who runs this command, as the audit calls it."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user whom no file names.
        name = f"uid {os.getuid()}"
    return f"cli {name}"


@contextmanager
def configurator(values: Settings) -> Iterator[Configurator]:
    """What reads and changes the configuration, for one command."""
    with database(values) as found:
        yield make_configurator(values, found)


def make_configurator(values: Settings, database: Database) -> Configurator:
    """The same on a database that is open."""
    egress = Egress(allow=values.egress_allow, deny=values.egress_deny)
    return Configurator(database=database, sealer=Sealer(values.secret_key), egress=egress)


def print_json(value: Any) -> None:
    """Print `value` for a program, times in RFC 3339 and bytes as text."""
    escape = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    json.dump(value, sys.stdout, default=plain, ensure_ascii=escape, indent=2)
    click.echo()


def plain(value: Any) -> Any:
    """What JSON has no type for."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, UUID | Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be printed as JSON")
