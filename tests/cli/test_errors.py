"""What a person sees who asks for something impossible: one line and an exit code, never a traceback."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import psycopg
import pytest
import redis
from click.testing import CliRunner

from madeira import binding
from madeira.cli.main import main
from madeira.embedded import free_port
from madeira.errors import SettingsError
from tests import terminal
from tests.servers import with_database
from tests.terminal import MADEIRA, ROOT


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment without a Madeira in it."""
    return terminal.environ(MADEIRA_DATA_DIR=str(tmp_path / "data"))


def run(environ: dict[str, str], *arguments: str | bytes) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([*MADEIRA, *arguments], env=environ, cwd=ROOT, input=b"{}", capture_output=True, timeout=60)


def complaint(environ: dict[str, str], *arguments: str | bytes) -> str:
    done = run(environ, *arguments)
    told = (done.stdout + done.stderr).decode()
    assert done.returncode in (1, 2), told
    assert "Traceback" not in told
    return told.splitlines()[-1]


def test_listen_on_a_taken_port(environ: dict[str, str]) -> None:
    """The remedy is told."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = complaint(environ, "listen", "--port", str(taken.getsockname()[1]))
    assert "choose another --port" in told


@pytest.mark.long
@pytest.mark.parametrize("secret", ["whsec_@@", "whsec_", b"whsec_\xff", b"\xff"])
def test_listen_with_an_impossible_secret(environ: dict[str, str], secret: str | bytes) -> None:
    """Refused before anything is received."""
    assert "must go on in base64" in complaint(environ, "listen", "--port", "0", "--secret", secret)


def test_listen_with_a_variable_that_is_not_set(environ: dict[str, str]) -> None:
    """A reference is looked up, and no secret by itself."""
    assert "NOWHERE_SET is not set" in complaint(environ, "listen", "--port", "0", "--secret", "env:NOWHERE_SET")


@pytest.mark.long
@pytest.mark.parametrize("command", [["trace"], ["events", "show", "--source", "s"]])
def test_an_argument_that_is_no_text(environ: dict[str, str], database_url: str, command: list[str]) -> None:
    """Bytes that are not UTF-8 cannot be in the tables."""
    environ["MADEIRA_DATABASE_URL"] = database_url
    assert "an argument holds a character" in complaint(environ, *command, b"\xff")


@pytest.mark.long
def test_send_with_impossible_names(environ: dict[str, str]) -> None:
    """Neither source nor secret can be any text; the secret is not told."""
    assert "--source" in complaint(environ, "send", "--source", "d\xe9", "--secret", "x")
    url = f"http://127.0.0.1:{free_port(0)}"
    told = complaint(environ, "send", "--url", url, "--source", "s", "--secret", b"t0p\xff")
    assert "an argument holds a character" in told
    assert "t0p" not in told


@pytest.mark.parametrize(("config", "told"), [(True, "did you mean 'shop'?; give its --secret"), (False, "(MADEIRA_CONFIG)")])
def test_send_as_a_source_whose_secret_is_not_known(environ: dict[str, str], tmp_path: Path, config: bool, told: str) -> None:
    """With the file that was looked at, or that there is none."""
    file = tmp_path / "madeira.toml"
    file.write_text('[[source]]\nname = "shop"\nsecrets = ["env:SHOP"]\n')
    more = {"MADEIRA_CONFIG": str(file), "SHOP": "a-secret-of-it"} if config else {}
    assert told in complaint(environ | more, "send", "--source", "shopp", '{"event_type": "a", "payload": 1}')


def test_up_with_an_impossible_folder(environ: dict[str, str], tmp_path: Path) -> None:
    """The line names the setting."""
    (tmp_path / "file").write_text("")
    environ["MADEIRA_DATA_DIR"] = str(tmp_path / "file" / "data")
    assert "MADEIRA_DATA_DIR" in complaint(environ, "up")


def test_an_output_that_knows_ascii_only(environ: dict[str, str]) -> None:
    """What it cannot show is escaped, as JSON escapes it."""
    environ |= {"PYTHONIOENCODING": "ascii", "MADEIRA_CONFIG": "/nowhere/d\xe9"}
    done = run(environ, "doctor", "--json")
    assert b"Traceback" not in done.stderr
    assert "there is no file /nowhere/d\xe9" in json.loads(done.stdout)[-1]["text"]


def test_an_input_that_was_closed_is_an_empty_one(environ: dict[str, str]) -> None:
    """No traceback of whoever wants to read it."""
    told = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *MADEIRA, "dry-run", "-", "--source", "s"],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 1
    assert told.stderr.startswith("Error: -: the event is not strict JSON")
    assert len(told.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", ["1", "2"])
def test_an_output_that_was_closed(environ: dict[str, str], closed: str) -> None:
    """Nobody hears the answer; the exit code is what it would be."""
    told = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *MADEIRA, "doctor", "--json"],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (told.returncode, told.stderr) == (1, b"")


def test_doctor_says_no_where_there_is_nothing_to_look_at(environ: dict[str, str]) -> None:
    """Whoever asks it whether a deployment is ready forgot its settings; each that is missing is named."""
    done = run(environ, "doctor", "--json")
    found = [one for one in json.loads(done.stdout) if one["level"] == "error"]
    assert done.returncode == 1
    assert [one["text"].split()[0] for one in found] == ["MADEIRA_DATABASE_URL", "MADEIRA_REDIS_URL"]


@pytest.mark.parametrize("host", ["256.1.1.1", "192.0.2.1", "a..b"])
def test_a_wrong_host_is_not_blamed_on_the_port(host: str) -> None:
    """Another port would not help."""
    with pytest.raises(SettingsError, match="set MADEIRA_HOST"):
        binding.require(host, free_port(0), "MADEIRA_PORT")


def test_a_machine_without_ipv6_is_told_to_have_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a socket can be had there."""

    def none(family: int) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(binding.socket, "socket", none)
    with pytest.raises(SettingsError, match=r"cannot listen on ::1 .*set MADEIRA_HOST"):
        binding.require("::1", 8000, "MADEIRA_PORT")


def test_a_port_in_use_is_waited_for_as_long_as_it_may_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed server leaves has it for a moment; one that stays is told with its own setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match="set MADEIRA_PORT"):
            binding.require("127.0.0.1", port, "MADEIRA_PORT", patience_s=0.2)
        monkeypatch.setattr(binding.time, "sleep", lambda _: taken.close())
        binding.require("127.0.0.1", port, "MADEIRA_PORT", patience_s=60)


@pytest.mark.parametrize("named", ["MADEIRA_HOST", "--bind"])
def test_gunicorn_says_in_one_line_that_it_cannot_listen(environ: dict[str, str], named: str) -> None:
    """Instead of trying five times, in words that name no setting, with a warning of Python's in between."""
    environ |= {"MADEIRA_DATABASE_URL": "postgresql://127.0.0.1:1/d"}
    environ["MADEIRA_REDIS_URL"] = "redis://127.0.0.1:1/0"
    command = [sys.executable, "-m", "gunicorn", "-c", str(ROOT / "deploy" / "gunicorn.conf.py"), "madeira.api:app"]
    if named == "--bind":
        command += ["--bind", "192.0.2.1:8000"]
    else:
        environ["MADEIRA_HOST"] = "192.0.2.1"
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    first, told = (done.stdout + done.stderr).splitlines()
    assert "Starting gunicorn" in first
    assert told.startswith("madeira: cannot listen on 192.0.2.1 port 8000: ")
    assert told.endswith(f"set {named} to another one")
    assert done.returncode == 1


@pytest.mark.long
@pytest.mark.parametrize("command", [["apply", "-"], ["endpoints", "list"], ["events", "list"], ["reconcile"], ["migrate"]])
def test_postgres_that_cannot_be_used_is_one_line_with_the_cause(
    environ: dict[str, str], postgres_url: str, command: list[str]
) -> None:
    """A database that is not there, and nobody who listens; nothing of the pool's own log before it."""
    environ["MADEIRA_REDIS_URL"] = "redis://127.0.0.1:1/0"
    for url, cause in (
        (with_database(postgres_url, "nodb"), 'database "nodb" does not exist'),
        ("postgresql://nobody:p4ss@127.0.0.1:1/none", "Connection refused"),
    ):
        done = run(environ | {"MADEIRA_DATABASE_URL": url}, *command)
        told = done.stderr.decode()
        assert (done.returncode, done.stdout) == (1, b"")
        assert cause in told
        assert len(told.splitlines()) == 1, told
        assert "p4ss" not in told


@pytest.mark.new_database
def test_migrate_on_tables_that_a_later_version_has_shortened(environ: dict[str, str], database_url: str) -> None:
    """There is nothing to apply, and yet no process of this version would work: a deployment must not go on."""
    with psycopg.connect(database_url, autocommit=True) as c:
        c.execute("INSERT INTO schema_migration (name) VALUES ('9998_more.sql')")
    assert run(environ | {"MADEIRA_DATABASE_URL": database_url}, "migrate").stdout == b"the tables are up to date\n"
    with psycopg.connect(database_url, autocommit=True) as c:
        c.execute("INSERT INTO schema_migration (name) VALUES ('9999_fewer.after_9998.sql')")
    done = run(environ | {"MADEIRA_DATABASE_URL": database_url}, "migrate", "--json")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"of a later version (9999_fewer.after_9998.sql)" in done.stderr


@pytest.mark.long
def test_an_error_leaves_the_output_of_json_empty(environ: dict[str, str], database_url: str) -> None:
    """Text on standard error, and an exit code; a program that reads the answer finds none."""
    environ["MADEIRA_DATABASE_URL"] = database_url
    commands = [["trace", "x"], ["events", "show", "x"], ["endpoints", "show", "x"], ["dry-run", "-", "--source", "x"]]
    commands += [["cancel", "x", "--source", "x", "--reason", "x"], ["replay", "x", "--source", "x", "--reason", "x"]]
    for command in commands:
        done = run(environ, *command, "--json")
        assert (done.returncode, done.stdout) == (1, b""), command
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError('no good: "postgresql://u:p@ss@h/d"\nsecond line'),
        redis.ConnectionError("no good: redis://:p@ss@h/0\nsecond line"),
        OSError("no good: http://u:p@ss@h/\nsecond line"),
    ],
)
def test_errors_of_drivers_are_one_line_without_a_password(error: Exception) -> None:
    """Whatever a driver raises, the terminal shows no more than one line of it."""

    @click.command()
    def fail() -> None:
        raise error

    done = CliRunner().invoke(type(main)("group", commands=[fail]), ["fail"])
    assert done.exit_code == 1
    assert len(done.output.splitlines()) == 1
    assert "second line" in done.output
    assert "ss@" not in done.output


#: Interrupts itself as soon as it is about to import what its first argument names; then it says that it goes on.
INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
# As Python has it, unless whoever started us ignores interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
import madeira.cli
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.parametrize(("where", "ended"), [("madeira.cli.main", (-signal.SIGINT, "")), ("nowhere", (0, "True\n"))])
def test_who_interrupts_a_command_that_just_begins_is_not_shown_where_it_was(where: str, ended: tuple[int, str]) -> None:
    """And afterwards an interrupt is what the command makes of it."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, where], capture_output=True, text=True, timeout=60, check=False)
    assert ((done.returncode, done.stdout), done.stderr) == (ended, "")
