"""A PgBouncer of the tests, in transaction mode: the strictest thing that may stand between Madeira and Postgres.

Every transaction may meet another session of the server; what a session was told before (settings, prepared statements, locks,
LISTEN, temporary tables) may be gone, or belong to somebody else.
"""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

import psycopg

from madeira.embedded import free_port

#: What has to be there: Debian's package ``pgbouncer`` puts it into /usr/sbin, which is not in everybody's path.
PROGRAM: Final = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")

#: Sessions of the server per database: few, so that clients do share them.
SESSIONS: Final = 6


class Pooler:
    """Between clients and the server at `url`, for every database there.

    `drops` says what becomes of the startup parameter ``options``: dropped without a word, as is often configured, or refused.
    """

    def __init__(self, *, url: str, folder: Path, drops: bool = True, sessions: int = SESSIONS) -> None:
        if PROGRAM is None:
            raise RuntimeError("the program pgbouncer is missing; on Debian: apt-get install pgbouncer")
        server = urlsplit(url)
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        secret = f" password={unquote(server.password)}" if server.password else ""
        # As the role should have it; the plans of empty tables would be those of the first day.
        told = " connect_query='SET enable_seqscan = off; SET jit = off'"
        lines = [
            "[databases]",
            f"* = host={server.hostname} port={server.port or 5432} user={unquote(server.username or '')}{secret}{told}",
            "[pgbouncer]",
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =",
            f"auth_type = any\nadmin_users = {unquote(server.username or '')}",
            "pool_mode = transaction\nserver_reset_query =\nmax_client_conn = 500",
            f"default_pool_size = {sessions}\nignore_startup_parameters = extra_float_digits{',options' if drops else ''}",
            # So that a database can be dropped right after its test.
            "server_idle_timeout = 1\nquery_wait_timeout = 20\nlog_connections = 0\nlog_disconnections = 0",
        ]
        config = folder / "pgbouncer.ini"
        config.write_text("\n".join(lines) + "\n")
        config.chmod(0o644)
        self._log = (folder / "pgbouncer.log").open("ab")
        # It refuses to run as root; whoever is root runs it as nobody.
        as_user = ["-u", "nobody"] if Path("/proc/self").stat().st_uid == 0 else []
        self._process = subprocess.Popen([PROGRAM, *as_user, str(config)], stdout=self._log, stderr=self._log)
        self.url = self.through(url)
        self._wait(folder)

    def through(self, url: str) -> str:
        """The way to the database of `url` that leads through here."""
        parts = urlsplit(url)
        user = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{self.port}"))

    def leave(self, url: str) -> None:
        """Let go of the database of `url`, with whoever is still connected to it, so that it can be emptied or dropped."""
        name = urlsplit(url).path[1:]
        with psycopg.connect(urlunsplit(urlsplit(self.url)._replace(path="/pgbouncer")), autocommit=True) as console:
            # It closes what it has when it is told to, and knows of no database that nobody has asked it for.
            known = {row[0] for row in console.execute("SHOW DATABASES")}
            if name in known:
                console.execute(f"KILL {name}".encode())
                console.execute(f"RESUME {name}".encode())

    def stop(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _wait(self, folder: Path) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "pgbouncer.log").read_text()) from None
                time.sleep(0.05)
