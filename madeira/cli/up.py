"""`madeira up`: one Madeira in one go, with embedded servers where no others are named."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from shutil import which
from typing import Final

import click

from madeira import binding, settings
from madeira.cli import common, demo
from madeira.cli.apply import read, told
from madeira.cli.common import json_option, url_of
from madeira.cli.filters import Number
from madeira.cli.output import Output
from madeira.cli.running import DataFolder, Note
from madeira.cli.supervisor import Program, Server, Supervisor
from madeira.embedded import EmbeddedPostgres, EmbeddedValkey, free_port
from madeira.errors import ConfigurationInvalid, SettingsError
from madeira.settings import Settings
from madeira.store.migrate import migrate

#: Seconds that API and workers get to finish what they have in hand.
_STOP_S: Final = 40.0

#: The last second that has a date (in the year 9999), as Unix time.
_LAST_S: Final = 253_402_300_799


@click.command()
@click.option("--demo", "with_demo", is_flag=True, help="Add a sample receiver and sample events, and show what happens.")
@json_option
@click.option("--started-at", type=Number(0, _LAST_S), hidden=True, help="Unix time at which the person began to wait.")
def up(with_demo: bool, as_json: bool, started_at: float | None) -> None:
    """Start everything, and stop it at Ctrl-C.

    Postgres and Valkey are started from Python packages unless MADEIRA_DATABASE_URL and MADEIRA_REDIS_URL name servers;
    then come the migrations, the file of MADEIRA_CONFIG, the API, the workers and the scheduler. What ends unexpectedly is
    started again. SIGHUP starts the processes of the API and the workers anew, one after another. With --json each line of
    output is an object: who says it (`from`), and what (`text`).
    """
    values = settings.load()
    values = replace(values, data_dir=values.data_dir.resolve())
    if not settings.is_set("MADEIRA_LOG_FORMAT"):
        values = replace(values, log_format="text")
    if with_demo:
        demo.check(values)
        if not settings.is_set("MADEIRA_LOG_LEVEL"):
            values = replace(values, log_level="warning")
    _Up(values, demo_started_at=(started_at or time.time()) if with_demo else None, as_json=as_json).run()


class _Up:
    def __init__(self, values: Settings, *, demo_started_at: float | None, as_json: bool = False) -> None:
        self._values = values
        self._demo_started_at = demo_started_at
        self._output = Output(as_json=as_json)
        self._folder = DataFolder(values.data_dir)
        self._embedded = not values.database_url
        self._show: demo.Show | None = None
        self._supervisor = Supervisor(self._output, note_sessions=self._note)

    def run(self) -> None:
        self._folder.lock()
        try:
            self._end_leftovers()
            binding.require(self._values.host, self._values.port, "MADEIRA_PORT")
            for name in ("metrics_port", "scheduler_metrics_port"):
                if port := getattr(self._values, name):
                    binding.require(self._values.host, port, f"MADEIRA_{name.upper()}")
            self._supervisor.handle_signals()
            try:
                self._start()
                self._supervisor.run()
            finally:
                if self._show:
                    self._show.stop()
                self._supervisor.stop()
        finally:
            self._folder.unlock()

    def _end_leftovers(self) -> None:
        count = self._folder.end_leftovers()
        if count:
            self._output.line("up", f"an earlier `madeira up` was killed; {count} processes that it had left are ended")

    def _start(self) -> None:
        self._start_servers()
        applied = migrate(self._values.database_url)
        self._output.line("up", f"migrations applied: {', '.join(applied)}" if applied else "the tables are up to date")
        self._find_key()
        if self._demo_started_at is not None:
            self._start_receiver()
        self._apply()
        self._start_madeira()
        self._output.line("up", f"the API listens on {self._url}; stop with Ctrl-C")
        self._tell_of_the_console()
        if self._demo_started_at is not None:
            self._show = demo.Show(self._values, self._url, self._output, self._demo_started_at)
            self._show.start()

    def _tell_of_the_console(self) -> None:
        """Where to look, and how to get in."""
        if not self._values.secret_key:
            text = f"the console at {self._url}/console needs MADEIRA_SECRET_KEY: `madeira keygen` makes one"
            self._output.line("up", text)
            return
        self._output.line("up", f"the console is at {self._url}/console", bold=True)
        own = "with the token in MADEIRA_ADMIN_TOKEN, or " if self._values.admin_token else ""
        where = f"MADEIRA_DATA_DIR={shlex.quote(str(self._values.data_dir))} " if settings.is_set("MADEIRA_DATA_DIR") else ""
        self._output.line("up", f"sign in {own}with one that `{where}{common.program()} token create me --role admin` prints")

    def _start_servers(self) -> None:
        if not self._values.database_url:
            postgres = EmbeddedPostgres(folder=self._values.data_dir / "postgres")
            self._supervisor.start(Server(postgres))
            self._values = replace(self._values, database_url=postgres.url)
            self._output.line("up", f"embedded Postgres runs on port {postgres.port}; its data is in {postgres.folder}")
        if not self._values.redis_url:
            valkey = EmbeddedValkey(folder=self._values.data_dir / "valkey")
            self._supervisor.start(Server(valkey))
            self._values = replace(self._values, redis_url=valkey.url)
            self._output.line("up", f"embedded Valkey runs on port {valkey.port}; its data is in {valkey.folder}")

    def _find_key(self) -> None:
        """Beside an embedded Postgres a key for secrets is made and kept, where none is set."""
        kept = self._folder.secret_key()
        if self._values.secret_key:
            if kept and not set(kept) <= set(self._values.secret_key):
                text = f"secrets sealed with the key in {self._folder.path} open only if MADEIRA_SECRET_KEY holds that key too"
                self._output.line("up", text, bold=True)
            return
        if not kept and self._embedded:
            file = self._folder.make_secret_key()
            self._output.line("up", f"a key for secrets was made and is in {file}; whoever keeps a copy of the data keeps it too")
            kept = self._folder.secret_key()
        self._values = replace(self._values, secret_key=kept)

    def _apply(self) -> None:
        """Apply the file here, so that a mistake stops the start with one line, before anything works by it."""
        if self._values.config is None:
            return
        with common.configurator(self._values) as configurator:
            try:
                difference = configurator.apply(read(self._values.config), who="madeira up")
            except ConfigurationInvalid as e:
                raise SettingsError(f"{self._values.config}: {e}") from None
        *_, summary = told(difference)
        self._output.line("up", f"{self._values.config.name} is applied: {summary}")

    def _start_receiver(self) -> None:
        port = free_port(demo.RECEIVER_PORT)
        self._values = replace(
            self._values,
            config=demo.write_config(self._values.data_dir, port),
            egress_allow=(*self._values.egress_allow, "127.0.0.1"),
        )
        command = [sys.executable, "-m", "madeira.cli", "listen", "--sample"]
        command += ["--port", str(port), "--secret", demo.RECEIVER_SECRET]
        self._supervisor.start(self._program("receiver", command, stop_s=5.0))

    def _start_madeira(self) -> None:
        values = self._values
        self._supervisor.start(
            self._program("api", [*_script("gunicorn"), "-c", _gunicorn_conf(), "madeira.api:app"], reload_signal=signal.SIGHUP)
        )
        workers = [*_script("dramatiq"), "madeira.actors", "-p", str(values.processes), "-t", str(values.threads)]
        workers += ["--skip-logging", "--worker-shutdown-timeout", str(int(1000 * (_STOP_S - 5)))]
        self._supervisor.start(self._program("workers", workers, reload_signal=signal.SIGHUP))
        self._supervisor.start(self._program("scheduler", [*_script("periodiq"), "madeira.actors"], stop_s=5.0))

    def _program(
        self, name: str, command: Sequence[str], *, stop_s: float = _STOP_S, reload_signal: int | None = None
    ) -> Program:
        return Program(
            name=name,
            command=command,
            environ=self._environ(),
            cwd=self._values.data_dir,
            output=self._output,
            stop_s=stop_s,
            reload_signal=reload_signal,
        )

    def _environ(self) -> Mapping[str, str]:
        values = self._values
        return settings.environment(
            MADEIRA_DATABASE_URL=values.database_url,
            MADEIRA_REDIS_URL=values.redis_url,
            MADEIRA_DATA_DIR=str(values.data_dir),
            # Applied already; a process that is started again must not stop over a file that has gone.
            MADEIRA_CONFIG=None,
            MADEIRA_SECRET_KEY=",".join(values.secret_key) or None,
            MADEIRA_EGRESS_ALLOW=",".join(values.egress_allow) or None,
            MADEIRA_LOG_FORMAT=values.log_format,
            MADEIRA_LOG_LEVEL=values.log_level,
            PROMETHEUS_MULTIPROC_DIR=None,
            PYTHONUNBUFFERED="1",
        )

    @property
    def _url(self) -> str:
        return url_of(self._values.host, self._values.port)

    def _note(self, sessions: Sequence[int]) -> None:
        values = self._values
        self._folder.write(
            Note(
                pid=os.getpid(),
                database_url=values.database_url,
                redis_url=values.redis_url,
                api_url=self._url,
                config=str(values.config) if values.config else None,
                sessions=sessions,
                egress_allow=values.egress_allow,
                egress_deny=values.egress_deny,
            )
        )


def _script(name: str) -> list[str]:
    """The console script of an installed package, of the same Python as ours where there is one."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else which(name)
    if not found:
        raise SettingsError(f"the program {name} is not installed; install Madeira with its dependencies")
    return [found]


def _gunicorn_conf() -> str:
    """The one of the checkout, or the one that was installed with the package."""
    beside = Path(__file__).resolve().parents[2] / "deploy" / "gunicorn.conf.py"
    if beside.is_file():
        return str(beside)
    for file in metadata.files("madeira") or ():
        if file.name == beside.name:
            return str(Path(str(file.locate())).resolve())
    raise SettingsError("the installed package lacks gunicorn.conf.py; install it again")
