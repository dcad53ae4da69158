"""Real servers for the tests: started by the tests, killed and frozen by them, never anybody else's."""

import os
import select
import signal
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from madeira.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey, ServerFailed, _postgres_program

#: Seconds within which Postgres' processes notice that their master is gone.
_GONE_S = 10.0


def with_database(url: str, database: str) -> str:
    """`url` of Postgres, with another database in its path."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{database}"))


class _Stalling(EmbeddedServer):
    """Adds the freeze: the process and all of its children stop, connections stay open."""

    _stalled: tuple[int, ...] = ()

    def stall(self) -> None:
        """SIGSTOP the server and what it has forked."""
        self._stalled = (self.pid, *_children(self.pid))
        for pid in self._stalled:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT what `stall` stopped."""
        for pid in self._stalled:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        self._stalled = ()

    def stop(self) -> None:
        """Stop in order, also out of a freeze."""
        self.resume()
        super().stop()

    def kill(self) -> None:
        """SIGKILL, also out of a freeze; whoever it had forked is gone too when this returns."""
        forked = [os.pidfd_open(pid) for pid in _children(self.pid)]
        super().kill()
        self.resume()
        for fd in forked:
            select.select([fd], [], [], _GONE_S)
            os.close(fd)


class OwnPostgres(_Stalling, EmbeddedPostgres):
    """A Postgres of one test alone; `url` is its database `madeira`."""


class Standby(_Stalling, EmbeddedPostgres):
    """A streaming replica of `primary`, made from a copy of it."""

    def __init__(self, *, folder: Path, primary: EmbeddedPostgres) -> None:
        super().__init__(folder=folder)
        self._primary = primary

    def _load_access(self) -> None:
        super()._load_access()
        self._access["password"] = self._primary._access["password"]

    def _make_data(self) -> None:
        if self.data.exists():
            return
        command = [_postgres_program("pg_basebackup"), "--pgdata", str(self.data), "--dbname", self._primary.url]
        code = self._spawn([*command, "--write-recovery-conf", "--checkpoint=fast"], None).wait()
        if code:
            raise ServerFailed(f"pg_basebackup failed:\n{self._log_tail()}")


class OwnRedis(_Stalling, EmbeddedValkey):
    """A Valkey of one test alone, with its append-only file synced at each write."""

    def __init__(self, *, folder: Path) -> None:
        super().__init__(folder=folder, options={"appendfsync": "always"})


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
