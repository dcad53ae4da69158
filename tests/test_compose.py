"""docker-compose.yml and what goes with it: of the schema, true to the code, and shut where it must be."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from madeira import settings
from madeira.broker.queues import KEYED, ORDINARY
from madeira.cli import main
from madeira.routing.fields import MAX_TIMEOUT_S
from tests.queues import declared

ROOT = Path(__file__).parents[1]
FILES = ("docker-compose.yml", "deploy/compose.secrets.yml", "deploy/compose.metrics-token.yml")
COMPOSE, SECRETS, METRICS_TOKEN = (yaml.safe_load((ROOT / file).read_text()) for file in FILES)
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
WORKERS = {name: service for name, service in OURS.items() if service["command"][0] == "dramatiq"}

#: The programs of other packages that the image has.
PROGRAMS = {"gunicorn", "dramatiq", "periodiq"}


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])  # type: ignore[index]


def option(command: list[str], name: str) -> list[str]:
    """The values of an option of a command."""
    rest = command[command.index(name) + 1 :]
    return rest[: next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))]


def environment(service: dict[str, Any], shell: dict[str, str]) -> dict[str, str]:
    """The environment of a service, with the variables of `shell`, as `docker compose` puts them in."""
    found = {}
    for name, value in service["environment"].items():
        found[name] = re.sub(r"\$\{(\w+):[-?][^}]*\}", lambda match: shell.get(match[1], ""), str(value))
    return found


def entrypoint(service: str) -> list[str]:
    """That of a service, as the engine hands it on."""
    return [word.replace("$$", "$") for word in SERVICES[service]["entrypoint"]]


@pytest.fixture(scope="module")
def shell() -> dict[str, str]:
    """What `deploy/compose-env` writes."""
    told = subprocess.run([ROOT / "deploy" / "compose-env"], capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in told.splitlines() if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("file", FILES)
def test_it_is_of_the_compose_schema(file: str) -> None:
    """The one of the compose specification, as a package for checking such files brings it."""
    schema = (resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text()
    problems = jsonschema_rs.validator_for(json.loads(schema)).iter_errors(yaml.safe_load((ROOT / file).read_text()))
    assert [f"{list(p.instance_path)}: {p.message}" for p in problems] == []


@pytest.mark.parametrize("service", OURS)
def test_every_command_is_a_known_one(service: str) -> None:
    """Of `madeira`, or a program that is installed with it; the files that it names are in the image."""
    program, *arguments = OURS[service]["command"]
    assert program == "madeira" or program in PROGRAMS
    assert (Path(sys.executable).parent / program).is_file()
    if program == "madeira":
        assert arguments[0] in main.commands
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for word in [*arguments, *OURS[service].get("healthcheck", {}).get("test", [])]:
        if word.startswith("deploy/"):
            assert (ROOT / word).is_file()
            assert re.search(rf"^COPY (?!--from).*\b{re.escape(word)}\b", dockerfile.split("\nFROM")[-1], re.MULTILINE)


@pytest.mark.parametrize("service", OURS)
def test_every_setting_is_known_and_counts_there(service: str, shell: dict[str, str]) -> None:
    """A setting that only `madeira up` goes by would do nothing."""
    environ = environment(OURS[service], shell)
    names = {name for name in environ if name.startswith(settings.PREFIX)}
    assert names <= {settings.environment_name(f) for f in fields(settings.Settings)}
    assert "MADEIRA_CONFIG" not in names
    values = settings.load(environ)
    assert values.secret_key
    assert values.admin_token
    settings.require(values, "database_url", "redis_url")


def test_without_passwords_nothing_starts() -> None:
    """None is written down here: where the shell says nothing, Madeira, Postgres and Grafana refuse to start."""
    for name, value in SERVICES["postgres"]["environment"].items():
        assert "PASSWORD" not in name or value == "${POSTGRES_PASSWORD:-}"
    grafana = environment(SERVICES["grafana"], {})
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"] == ""
    refused = subprocess.run(entrypoint("grafana"), env=grafana, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.split(";")[0]) == (1, "GRAFANA_PASSWORD is not set")
    for service in OURS.values():
        assert settings.load(environment(service, {})).database_url == ""
    text = (ROOT / FILES[0]).read_text()
    assert not re.search(r"://[^/\s]*:[^/\s$]*@", text), "a password in a URL"


@pytest.mark.parametrize("name", ["GF_SECURITY_ADMIN_PASSWORD", "GF_SECURITY_ADMIN_PASSWORD__FILE"])
def test_with_a_password_or_a_file_of_one_grafana_starts(name: str) -> None:
    *shell, script = entrypoint("grafana")
    found = subprocess.run(
        [*shell, script.replace("/run.sh", "env")], env={name: "p"}, capture_output=True, text=True, check=True
    )
    assert f"{name}=p" in found.stdout.splitlines()


@pytest.mark.parametrize("file", FILES)
def test_no_variable_must_be_set_that_may_come_from_a_file(file: str) -> None:
    """The engine asks for such ones before it puts a second file on top."""
    assert re.findall(r"\$\{\w+:?\?", (ROOT / file).read_text()) == []


def test_passwords_are_new_each_time_and_fit_each_other(shell: dict[str, str]) -> None:
    """The one of Postgres stands in Madeira's URL too; no two files of `deploy/compose-env` share any."""
    assert f":{shell['POSTGRES_PASSWORD']}@postgres/" in shell["MADEIRA_DATABASE_URL"]
    again = subprocess.run([ROOT / "deploy" / "compose-env"], capture_output=True, text=True, check=True).stdout
    for name in ("POSTGRES_PASSWORD", "MADEIRA_SECRET_KEY", "MADEIRA_ADMIN_TOKEN", "GRAFANA_PASSWORD"):
        assert len(shell[name]) >= 24
        assert shell[name] not in again


def test_secrets_come_from_files_for_every_process_that_needs_them(tmp_path: Path) -> None:
    """With the second file on top no process sees a secret in its environment, and each reads its own."""
    assert set(SECRETS["services"]) == set(OURS) | {"postgres", "grafana"}
    values = {"database_url": "postgresql://u:p@h/d", "redis_url": "redis://h/0", "admin_token": "t"}
    values["secret_key"] = "bWFkZWlyYS10ZXN0cy1zZWFsLXdpdGgtdGhpcy1rZXk="
    for name, value in values.items():
        (tmp_path / name).write_text(value + "\n")
    for name, service in OURS.items():
        above = SECRETS["services"][name]
        assert set(above["secrets"]) <= set(SECRETS["secrets"])
        environ = environment(service, {"MADEIRA_DATABASE_URL": "postgresql://other/d"}) | above["environment"]
        found = settings.load({k: v.replace("/run/secrets", str(tmp_path)) for k, v in environ.items()})
        assert (found.database_url, found.redis_url, found.admin_token) == ("postgresql://u:p@h/d", "redis://h/0", "t")
        assert found.secret_key == (values["secret_key"],)


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_is_given_longer_to_stop_than_any_call_may_take(service: str) -> None:
    """The engine waits longer than Dramatiq, and that longer than the longest timeout of an endpoint."""
    (patience_ms,) = option(WORKERS[service]["command"], "--worker-shutdown-timeout")
    assert MAX_TIMEOUT_S < int(patience_ms) / 1000 < seconds(WORKERS[service]["stop_grace_period"])


def test_the_numbers_tell_of_every_queue() -> None:
    """What an actor declares has its gauges."""
    assert sorted((*KEYED, *ORDINARY)) == declared()


def test_the_dedicated_workers_take_all_queues_and_none_twice() -> None:
    """A queue that none of them took would wait for ever, once the general workers are gone."""
    dedicated = [option(s["command"], "-Q") for s in WORKERS.values() if s.get("profiles") == ["dedicated"]]
    assert sorted(queue for queues in dedicated for queue in queues) == sorted(declared())
    assert "-Q" not in WORKERS["worker"]["command"]


@pytest.mark.parametrize("service", SERVICES)
def test_every_container_is_shut(service: str) -> None:
    """Read-only, without rights, and on the outside only where somebody is to come in, and then on this machine only."""
    found = SERVICES[service]
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in found["security_opt"]
    for port in found.get("ports", []):
        assert port.startswith(("127.0.0.1:", "${MADEIRA_BIND:-127.0.0.1:"))
    if service in ("postgres", "redis"):
        assert found["networks"] == ["stores"]
        assert COMPOSE["networks"]["stores"] == {"internal": True}


def test_processes_wait_for_what_they_need_and_for_nothing_that_runs_elsewhere() -> None:
    """The tables come first; a store that is not one of these containers is not waited for."""
    for name, service in OURS.items():
        before = service["depends_on"]
        if name == "migrate":
            assert before["postgres"] == {"condition": "service_healthy", "required": False}
        else:
            assert before["migrate"] == {"condition": "service_completed_successfully"}
            assert before["redis"] == {"condition": "service_healthy", "required": False}
    for store in ("postgres", "redis"):
        assert SERVICES[store]["profiles"] == [store]
        assert SERVICES[store]["healthcheck"]["test"]


def test_the_queues_are_safe_in_their_redis() -> None:
    """It writes down what it has, throws nothing away, and shares its volume with nobody."""
    command = shlex.join(SERVICES["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    users = [name for name, s in SERVICES.items() for v in s.get("volumes", []) if v.startswith("redis:")]
    assert users == ["redis"]


def test_every_image_has_a_version() -> None:
    """What is started tomorrow is what was tried today."""
    for name, service in SERVICES.items():
        assert re.search(r":(v?\d+\.\d+|\$\{MADEIRA_VERSION)", service["image"]), name
    (base,) = re.findall(r"^ARG BASE=(.*)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert re.search(r":\d+\.\d+\.\d+-slim-\w+$", base)


def test_the_token_of_the_numbers_comes_from_one_file_to_whoever_shows_or_reads_them() -> None:
    """Each of ours takes it, and Prometheus finds it where its own file says."""
    assert set(METRICS_TOKEN["services"]) == set(OURS) | {"prometheus"}
    place = f"/run/secrets/{next(iter(METRICS_TOKEN['secrets']))}"
    for name, above in METRICS_TOKEN["services"].items():
        assert above["secrets"] == list(METRICS_TOKEN["secrets"])
        if name in OURS:
            assert above["environment"] == {"MADEIRA_METRICS_TOKEN": "", "MADEIRA_METRICS_TOKEN_FILE": place}
    assert f"credentials_file: {place}" in (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
