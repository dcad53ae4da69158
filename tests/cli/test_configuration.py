"""`madeira apply`, `export`, `reencrypt` and `doctor` as programs, on a database that is named."""

import json
from pathlib import Path

import psycopg
import pytest

from madeira import sealing
from madeira.records import PlannedDelivery
from madeira.store import events, routing
from tests.store import making
from tests.system.harness import KEY
from tests.terminal import environ, run

pytestmark = pytest.mark.long


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
        self.environ = environ(MADEIRA_DATABASE_URL=database_url, MADEIRA_SECRET_KEY=KEY, MADEIRA_DATA_DIR=str(folder / "data"))

    def run(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        done = run(self.environ, *arguments, given=stdin, code=code)
        return done.stdout + done.stderr


@pytest.fixture
def terminal(database_url: str, tmp_path: Path) -> Terminal:
    return Terminal(database_url, tmp_path)


def test_a_file_is_applied_and_written_back(terminal: Terminal, tmp_path: Path, database_url: str) -> None:
    """The difference is printed, a dry run changes nothing, who did it is on record, and an export is taken back."""
    terminal.environ["NOWHERE_SET"] = "x"
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


def test_what_no_key_opens_is_not_nothing_to_do(terminal: Terminal) -> None:
    """The exit code and the words say that something is left; with the right key there is nothing to do."""
    terminal.run("apply", "-", stdin=FILE)
    assert terminal.run("reencrypt") == "nothing to do\n"
    key, terminal.environ["MADEIRA_SECRET_KEY"] = terminal.environ["MADEIRA_SECRET_KEY"], sealing.generate()
    told = terminal.run("reencrypt", code=1)
    assert "nothing to do" not in told
    assert "source[shop].secrets[0]" in told
    assert "1 of the secrets are left as they are" in told
    terminal.environ["MADEIRA_SECRET_KEY"] += f",{key}"
    assert terminal.run("reencrypt").splitlines()[-1] == "1 sealed anew"


def test_pruning_what_is_unfinished_names_the_commands_that_help(terminal: Terminal, database_url: str) -> None:
    """As they are written there they do."""
    terminal.run("apply", "-", stdin=FILE)
    with psycopg.connect(database_url) as conn:
        [accepted] = events.insert(conn, [making.new_event()])
        routing.route(conn, [(accepted.seq, [PlannedDelivery("sink", "sink", ("all",))])])
    rest = FILE[: FILE.index("[[endpoint]]")]
    told = terminal.run("apply", "--prune", "-", stdin=rest, code=1)
    assert "DELETE /v1/endpoints/sink?unfinished=cancel&reason=WHY" in told
    command = "madeira cancel --endpoint sink --reason WHY"
    assert command in told
    terminal.run(*command.split()[1:])
    assert "- endpoint sink" in terminal.run("apply", "--prune", "-", stdin=rest)


def test_a_literal_without_a_key_is_refused_with_the_remedy(terminal: Terminal) -> None:
    """Nothing is kept in clear."""
    terminal.environ["MADEIRA_SECRET_KEY"] = ""
    told = terminal.run("apply", "-", stdin=FILE, code=1)
    assert "source[shop].secrets[0]" in told
    assert "madeira keygen" in told
    assert "the-secret-of-the-shop" not in told


def test_a_variable_that_the_file_names_and_this_shell_lacks_is_told(terminal: Terminal) -> None:
    """A warning, since the processes may have it; with it nothing is said."""
    lines = terminal.run("apply", "-", stdin=FILE).splitlines()
    assert [line for line in lines if "NOWHERE_SET" in line] == lines[-1:]
    assert lines[-1].startswith("warning: ")
    assert json.loads(terminal.run("apply", "--json", "-", stdin=FILE))["unset"] == ["NOWHERE_SET"]
    terminal.environ["NOWHERE_SET"] = "x"
    assert "warning" not in terminal.run("apply", "-", stdin=FILE)


def test_a_file_is_not_sealed_with_a_key_of_ones_own(terminal: Terminal) -> None:
    """The remedy is told, and so is the way out after a lost key, which works."""
    terminal.run("apply", "-", stdin=FILE)
    terminal.environ["MADEIRA_SECRET_KEY"] = terminal.run("keygen").strip()
    told = terminal.run("apply", "-", stdin=FILE, code=1)
    assert "source[shop].secrets[0]: what is stored was sealed with a key that is not here" in told
    assert "--replace-secrets" in told
    assert "1 changed" in terminal.run("apply", "--replace-secrets", "-", stdin=FILE)
    assert "unchanged" in terminal.run("apply", "-", stdin=FILE)


def findings_of(terminal: Terminal, what: str) -> list[tuple[str, str]]:
    """What doctor says about `what`, with its level."""
    found = json.loads(terminal.run("doctor", "--json", code=1))
    return [(f["level"], f["text"]) for f in found if f["what"] == what]


def test_doctor_counts_what_there_is(terminal: Terminal) -> None:
    """Without the endpoint that is built in; what cannot be used here is there nevertheless, and is told as such."""
    assert findings_of(terminal, "configuration")[0] == (
        "warning",
        "version 1: 0 sources, 0 endpoints, 0 routes: nothing can be posted; make a source with `madeira apply` or the API",
    )
    terminal.run("apply", "-", stdin=FILE.replace('"the-secret-of-the-shop"', '"env:NOWHERE_SET"'))
    (level, text), *unusable = findings_of(terminal, "configuration")
    assert (level, text.partition(": ")[2]) == ("ok", "1 source, 1 endpoint, 1 route")
    assert [(level, text.split()[0]) for level, text in unusable] == [("error", "source/shop"), ("error", "endpoint/sink")]
    both = FILE.replace('"the-secret-of-the-shop"', '"env:NOWHERE_SET", "another-secret"')
    terminal.run("apply", "-", stdin=both.split("[endpoint.")[0])
    assert ("warning", "a secret of source/shop cannot be used") in [
        (level, text.partition(":")[0]) for level, text in findings_of(terminal, "configuration")
    ]


def test_doctor_speaks_of_an_administrator_only_where_there_is_none(terminal: Terminal) -> None:
    """A token of that role is one, and so is the one of the settings; a lower role is none."""
    terminal.run("token", "create", "low", "--role", "operator")
    [(level, text)] = findings_of(terminal, "admin token")
    assert (level, "madeira token create" in text) == ("ok", True)
    terminal.run("token", "create", "high", "--role", "admin")
    assert findings_of(terminal, "admin token") == []
    terminal.run("token", "revoke", "high")
    assert findings_of(terminal, "admin token") != []
    terminal.environ["MADEIRA_ADMIN_TOKEN"] = "x" * 20
    assert findings_of(terminal, "admin token") == []


def test_doctor_warns_of_a_configuration_file_that_nothing_applies(terminal: Terminal, tmp_path: Path) -> None:
    """Only `madeira up` goes by MADEIRA_CONFIG, and none runs here."""
    assert findings_of(terminal, "configuration file") == []
    (tmp_path / "rules.toml").write_text(FILE)
    terminal.environ["MADEIRA_CONFIG"] = str(tmp_path / "rules.toml")
    [(level, text)] = findings_of(terminal, "configuration file")
    assert (level, "madeira apply" in text) == ("warning", True)


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
