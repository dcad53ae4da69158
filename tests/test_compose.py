"""docker-compose.yml says what is true: its commands are there, its settings are known, and what it starts can take events in."""

import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from madeira import settings
from madeira.cli import main
from madeira.routing.follow import rules_of
from madeira.sealing import Sealer
from madeira.store import configuration
from madeira.store.database import Database

ROOT = Path(__file__).parents[1]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}

#: The programs of other packages that the image has.
PROGRAMS = {"gunicorn", "dramatiq", "periodiq"}


def commands(service: dict[str, Any]) -> list[list[str]]:
    """The commands of a service; those that a shell runs one after another are several."""
    words = shlex.split(service["command"])
    texts = words[2].split("&&") if words[:2] == ["sh", "-c"] else [service["command"]]
    return [shlex.split(text) for text in texts]


def environment(service: dict[str, Any]) -> dict[str, str]:
    """The environment of a service, where the shell of `docker compose` sets nothing."""
    return {name: "" if str(value).startswith("${") else str(value) for name, value in service["environment"].items()}


@pytest.mark.parametrize("service", OURS)
def test_every_command_is_a_known_one(service: str) -> None:
    """Of `madeira`, or a program that is installed with it."""
    for program, *arguments in commands(OURS[service]):
        assert program == "madeira" or program in PROGRAMS
        assert (Path(sys.executable).parent / program).is_file()
        if program == "madeira":
            assert arguments[0] in main.commands
            assert all((ROOT / file).is_file() for file in arguments[1:])


@pytest.mark.parametrize("service", OURS)
def test_every_setting_is_known_and_counts_there(service: str) -> None:
    """A setting that only `madeira up` goes by would do nothing."""
    environ = environment(OURS[service])
    names = {name for name in environ if name.startswith(settings.PREFIX)}
    assert names <= {settings.environment_name(f) for f in fields(settings.Settings)}
    assert "MADEIRA_CONFIG" not in names
    settings.load(environ)


@pytest.mark.long
def test_what_is_applied_at_the_start_can_be_used_by_all(empty_database_url: str, tmp_path: Path) -> None:
    """The commands of `migrate`, run on an empty database: a source can post, and nothing lacks a variable in any service."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(settings.PREFIX)}
    here = {"MADEIRA_DATABASE_URL": empty_database_url, "MADEIRA_DATA_DIR": str(tmp_path)}
    for _, *arguments in commands(OURS["migrate"]):
        command = [sys.executable, "-m", "madeira.cli", *arguments]
        environ = plain | environment(OURS["migrate"]) | here
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    database = Database(url=empty_database_url, application="tests", pool_max=1)
    database.open()
    try:
        with database.connection() as conn:
            found = configuration.read(conn)
    finally:
        database.close()
    for service in OURS.values():
        rules = rules_of(found, sealer=Sealer(()), environ=environment(service))
        assert rules.sources
        assert rules.unusable == {}
