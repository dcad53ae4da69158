"""`madeira apply`, `export`, `reencrypt` and `doctor` as programs, on a database that is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.system.harness import KEY

ROOT = Path(__file__).parents[2]

FILE = """
[[source]]
name = "shop"
secrets = ["the-secret-of-the-shop"]

[[endpoint]]
name = "sink"
url = "http://sink.example/"
[endpoint.headers]
Authorization = "env:NOWHERE_SET"

[[route]]
name = "all"
endpoint = "sink"
"""


class Terminal:
    """Runs commands in one environment."""

    def __init__(self, database_url: str, folder: Path) -> None:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("MADEIRA_")}
        self.environ = plain | {
            "MADEIRA_DATABASE_URL": database_url,
            "MADEIRA_SECRET_KEY": KEY,
            "MADEIRA_DATA_DIR": str(folder / "data"),
        }

    def run(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        command = [sys.executable, "-m", "madeira.cli", *arguments]
        done = subprocess.run(
            command, env=self.environ, cwd=ROOT, input=stdin, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def terminal(database_url: str, tmp_path: Path) -> Terminal:
    return Terminal(database_url, tmp_path)


def test_a_file_is_applied_and_written_back(terminal: Terminal, tmp_path: Path, database_url: str) -> None:
    """The difference is printed, a dry run changes nothing, who did it is on record, and an export is taken back."""
    file = tmp_path / "madeira.toml"
    file.write_text(FILE)
    dry = terminal.run("apply", "--dry-run", str(file))
    assert dry.splitlines() == ["+ source shop", "+ endpoint sink", "+ route all", "would be: 3 added"]
    assert "shop" not in terminal.run("export")
    assert terminal.run("apply", "--reason", "the first", str(file)).splitlines()[-1] == "3 added"
    exported = terminal.run("export")
    assert "the-secret-of-the-shop" not in exported
    assert json.loads(terminal.run("apply", "--json", "--prune", "-", stdin=exported))["unchanged"] == [
        "source shop",
        "endpoint sink",
        "route all",
    ]
    file.write_text(FILE.replace("sink.example", "other.example"))
    assert terminal.run("apply", str(file)).splitlines() == ["~ endpoint sink: url", "1 changed, 2 unchanged"]
    with psycopg.connect(database_url) as conn:
        rows = conn.execute("SELECT who, action, what, why FROM audit ORDER BY id").fetchall()
    assert [row[1:] for row in rows] == [
        ("create", "source shop", "the first"),
        ("create", "endpoint sink", "the first"),
        ("create", "route all", "the first"),
        ("update", "endpoint sink", None),
    ]
    assert {row[0].split()[0] for row in rows} == {"cli"}


def test_all_mistakes_of_a_file_are_told_with_their_places(terminal: Terminal) -> None:
    """One line each; nothing is changed; no secret is repeated."""
    text = FILE.replace("http://", "ftp://").replace('endpoint = "sink"', 'endpoint = "snik"').replace("the-", "whsec_%")
    told = terminal.run("apply", "-", stdin=text, code=1)
    assert "nothing was changed" in told
    for place in ("source[shop].secrets[0]: is not base64", "endpoint[sink].url: must be", "route[all]", "did you mean 'sink'"):
        assert place in told
    assert "whsec_%secret" not in told


def test_a_literal_without_a_key_is_refused_with_the_remedy(terminal: Terminal) -> None:
    """Nothing is kept in clear."""
    terminal.environ["MADEIRA_SECRET_KEY"] = ""
    told = terminal.run("apply", "-", stdin=FILE, code=1)
    assert "source[shop].secrets[0]" in told
    assert "madeira keygen" in told
    assert "the-secret-of-the-shop" not in told


def test_doctor_tells_what_cannot_be_used_here(terminal: Terminal) -> None:
    """The variable that is missing, and where; with it all is well."""
    terminal.run("apply", "-", stdin=FILE)
    assert about_configuration(terminal) == [("ok", False), ("error", True)]
    terminal.environ["NOWHERE_SET"] = "x"
    assert about_configuration(terminal) == [("ok", False)]


def about_configuration(terminal: Terminal) -> list[tuple[str, bool]]:
    """What doctor says about the configuration: how bad it is, and whether the missing variable is named."""
    # The servers of the tests do without fsync, which is an error of its own.
    findings = json.loads(terminal.run("doctor", "--json", code=1))
    return [(f["level"], "NOWHERE_SET is not set" in f["text"]) for f in findings if f["what"] == "configuration"]


@pytest.mark.parametrize("what", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_one_line(terminal: Terminal, what: str) -> None:
    """The name and the reason."""
    told = terminal.run("apply", what, code=1)
    assert what in told
    assert len(told.strip().splitlines()) == 1
