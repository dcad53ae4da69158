import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from madeira.cli.running import is_ours, members
from madeira.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey, ServerFailed, free_port
from tests.system.harness import wait_until

CLASSES: tuple[type[EmbeddedServer], ...] = (EmbeddedPostgres, EmbeddedValkey)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is closed to others, as a home is: as root, the servers run as somebody else."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    return closed


@pytest.fixture(params=CLASSES, ids=lambda c: c.name)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[EmbeddedServer]:
    server: EmbeddedServer = request.param(folder=folder / "server")
    yield server
    server.stop()


def put(server: EmbeddedServer, value: int) -> None:
    if isinstance(server, EmbeddedPostgres):
        with psycopg.connect(server.url) as conn:
            conn.execute("CREATE TABLE IF NOT EXISTS kept (value int)")
            conn.execute("INSERT INTO kept VALUES (%s)", [value])
    else:
        with redis.Redis.from_url(server.url) as client:
            client.rpush("kept", value)


def kept(server: EmbeddedServer) -> list[int]:
    if isinstance(server, EmbeddedPostgres):
        with psycopg.connect(server.url) as conn:
            return [row[0] for row in conn.execute("SELECT value FROM kept ORDER BY value")]
    with redis.Redis.from_url(server.url) as client:
        return [int(value) for value in client.lrange("kept", 0, -1)]


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not members(pid), what=f"the end of process {pid}")


def test_data_and_url_survive_a_stop(server: EmbeddedServer) -> None:
    """What was written is there after a restart, under the same URL."""
    server.start()
    url = server.url
    put(server, 1)
    server.stop()
    again = type(server)(folder=server.folder)
    again.start()
    try:
        assert again.url == url
        assert kept(again) == [1]
    finally:
        again.stop()


def test_a_killed_server_starts_again(server: EmbeddedServer) -> None:
    """After kill -9 the server comes up on what was committed, whatever pid file and sessions it has left."""
    server.start()
    put(server, 1)
    if isinstance(server, EmbeddedValkey):
        with redis.Redis.from_url(server.url) as client:
            # Its file is synced once a second; what was written before this answer is in the kernel's hands.
            client.ping()
    server.kill()
    server.start()
    assert kept(server) == [1]


@pytest.mark.long
def test_a_pid_file_that_names_somebody_else_is_no_obstacle(server: EmbeddedServer) -> None:
    """After a restart of the machine the number in a pid file may be any other program's, even one of this user."""
    server.start()
    pid_file = server._pid_file()
    server.kill()
    lines = [str(os.getpid()), *pid_file.read_text().splitlines()[1:]] if pid_file.exists() else [str(os.getpid())]
    pid_file.write_text("\n".join(lines) + "\n")
    server.start()
    put(server, 1)
    assert kept(server) == [1]


def test_a_leftover_server_on_the_same_data_is_ended(server: EmbeddedServer) -> None:
    """Two servers never work on one data folder: the one that nobody looks after ends first."""
    left = type(server)(folder=server.folder)
    left.start()
    put(left, 1)
    server.start()
    assert left.process is not None
    left.process.wait(20)
    assert kept(server) == [1]


def test_a_server_ends_with_its_parent(server: EmbeddedServer) -> None:
    """When the process that started it is killed, the server shuts down in order by itself."""
    program = (
        "import sys, time, pathlib; from madeira.embedded import *; "
        f"s = {type(server).__name__}(folder=pathlib.Path(sys.argv[1])); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(server.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert members(pid)
        parent.send_signal(signal.SIGKILL)
    wait_until_gone(pid)


def test_nobody_enters_without_the_password(server: EmbeddedServer) -> None:
    """The port is open to every user of the machine, the server is not."""
    server.start()
    url = server.url.replace(server._access["password"], "guess")  # type: ignore[arg-type]
    if isinstance(server, EmbeddedPostgres):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(url)
    else:
        with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_the_password_is_in_no_command_line(server: EmbeddedServer) -> None:
    """What every user of the machine can read tells no secret."""
    server.start()
    password = str(server._access["password"]).encode()
    for pid in members(server.pid):
        assert password not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_server_that_cannot_start_says_why(server: EmbeddedServer) -> None:
    """The error holds the end of the server's own log."""
    server.options["port"] = "1x"
    with pytest.raises(ServerFailed, match="1x"):
        server.start()


def test_a_taken_port_is_not_chosen() -> None:
    """The port of last time is used again unless somebody listens there now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = int(listening.getsockname()[1])
        assert free_port(taken) != taken


def test_a_port_is_none_that_an_outgoing_connection_may_get() -> None:
    """The kernel gives the ports of its range to whoever connects; a server that restarts must find its own again."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(10_000 <= free_port() < first for _ in range(50))


@pytest.mark.long
def test_a_port_that_is_taken_just_before_the_start_is_replaced(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing holds a port between the look and the start."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = int(listening.getsockname()[1])
        looks = iter([taken])
        monkeypatch.setattr("madeira.embedded.free_port", lambda preferred=None: next(looks, None) or free_port(preferred))
        server.start()
        assert server.port != taken


def test_only_our_programs_count_as_ours() -> None:
    """A process with another program is not one that `up` may end."""
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            assert not is_ours(other.pid)
        finally:
            other.kill()
