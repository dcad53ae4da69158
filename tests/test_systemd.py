"""deploy/systemd: units that systemd takes, with programs that there are, and the patience that the calls need."""

import configparser
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from madeira.cli import main
from madeira.routing.fields import MAX_TIMEOUT_S

ROOT = Path(__file__).parents[1]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
NAMES = [unit.name for unit in UNITS]

#: Where the units expect Madeira.
HOME = "/opt/madeira/"


def read(unit: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False, comment_prefixes=("#",))
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read(unit)
    return found


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze, of Debian's systemd")
def test_systemd_takes_them(tmp_path: Path) -> None:
    """As they are, but for the place of the programs: those of this Python."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(f"{HOME}bin/", f"{Path(sys.executable).parent}/"))
    files = [str(tmp_path / name) for name in NAMES]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "madeira" in line]
    assert (ours, done.returncode) == ([], 0)


@pytest.mark.parametrize("unit", UNITS, ids=NAMES)
def test_the_program_is_there_and_without_rights(unit: Path) -> None:
    """Of this package or one that comes with it; not root, and nothing to write on but its own folder."""
    service = read(unit)["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert (Path(sys.executable).parent / program.removeprefix(f"{HOME}bin/")).is_file()
    if program.endswith("/madeira"):
        assert arguments[0] in main.commands
    assert service["User"] == "madeira"
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"


def test_a_worker_is_given_longer_to_stop_than_any_call_may_take() -> None:
    """systemd waits longer than Dramatiq, and that longer than the longest timeout; and it tells the master alone."""
    service = read(ROOT / "deploy/systemd/madeira-worker@.service")["Service"]
    words = shlex.split(service["ExecStart"])
    patience_s = int(words[words.index("--worker-shutdown-timeout") + 1]) / 1000
    assert MAX_TIMEOUT_S < patience_s < int(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed"


def test_what_one_worker_is_told_counts_more_than_what_all_are_told() -> None:
    """Of two files that set the same, systemd takes the later one."""
    unit = (ROOT / "deploy/systemd/madeira-worker@.service").read_text()
    files = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("EnvironmentFile=")]
    assert files == ["/etc/madeira/madeira.env", "-/etc/madeira/worker-%i.env"]


def test_a_first_try_of_the_migrations_that_fails_does_not_keep_the_rest_from_starting() -> None:
    """As when the machine of Postgres comes up later: what requires a unit that fails is not started when it succeeds."""
    migrate = read(ROOT / "deploy/systemd/madeira-migrate.service")
    assert migrate["Service"]["Restart"] == "on-failure"
    for unit in UNITS:
        if unit.name == "madeira-migrate.service":
            continue
        section = read(unit)["Unit"]
        assert "madeira-migrate.service" in section["After"].split()
        assert "madeira-migrate.service" in section["Wants"].split()
        assert not {"Requires", "Requisite", "BindsTo"} & set(section)
