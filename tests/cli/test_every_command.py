"""What holds of every command, whichever it is: it can speak JSON, its exit codes are told, and a shell completes it."""

import json
import os
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from madeira.cli.completion import SHELLS
from madeira.cli.main import main

ROOT = Path(__file__).parents[2]

#: Commands whose output is a script for a shell.
SCRIPTS = {"completion"}


def commands(group: click.Command = main, path: tuple[str, ...] = ()) -> dict[str, click.Command]:
    """Every command that does something, by its name."""
    if not isinstance(group, click.Group):
        return {" ".join(path): group}
    return {name: one for key, sub in group.commands.items() for name, one in commands(sub, (*path, key)).items()}


COMMANDS = commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_print_json(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert ("--json" in options) != (name in SCRIPTS)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server, no running `up`, no setting."""
    for variable in list(os.environ):
        if variable.startswith("MADEIRA_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("MADEIRA_DATA_DIR", str(tmp_path / "data"))


#: What a command needs to be understood; all others need nothing.
ARGUMENTS = {
    "apply": ["/dev/null"],
    "send": ['{"event_type": "a"}'],
    "events show": ["e1"],
    "trace": ["e1"],
    "replay": ["e1", "--source", "s", "--reason", "x"],
    "reroute": ["e1", "--source", "s", "--reason", "x"],
    "cancel": ["e1", "--source", "s", "--reason", "x"],
    "jobs show": ["1"],
    "jobs follow": ["1"],
    "jobs pause": ["1", "--reason", "x"],
    "jobs resume": ["1"],
    "jobs cancel": ["1", "--reason", "x"],
    "token create": ["me", "--role", "viewer"],
    "token revoke": ["t1"],
    "endpoints show": ["e"],
    "endpoints test": ["e"],
    "endpoints pause": ["e", "--reason", "x"],
    "endpoints resume": ["e"],
    "endpoints disable": ["e", "--reason", "x"],
    "endpoints enable": ["e"],
    "dry-run": ['{"event_type": "a"}', "--source", "s"],
}

#: Commands that do without a server, or would start some.
ALONE = {"up", "listen", "keygen", "doctor", "completion"}


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - ALONE))
def test_a_command_that_cannot_be_done_ends_with_a_code_and_a_line_and_no_answer(name: str) -> None:
    arguments = [*name.split(), *ARGUMENTS.get(name, [])]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code in (1, 2), done.output
    if name != "send":
        # It takes what it has to know from a file, and misses that first.
        assert done.exit_code == 1, done.output
    assert done.stdout == ""
    assert done.stderr.startswith(("Error: ", "Usage: "))
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_not_understood_ends_with_2_and_help_with_0(name: str) -> None:
    done = CliRunner().invoke(main, [*name.split(), "--no-such-option"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert CliRunner().invoke(main, [*name.split(), "--help"]).exit_code == 0


def numbers() -> dict[str, click.Parameter]:
    """Every number that a command takes, by where it stands."""
    kinds = (click.types.IntParamType, click.types.FloatParamType)
    return {f"{name} {p.opts[0]}": p for name, one in COMMANDS.items() for p in one.params if isinstance(p.type, kinds)}


def test_a_number_is_written_in_plain_digits() -> None:
    """Python itself takes more than that, and than the API: `1_0` for ten, and the digits of every script."""
    assert {"replay --rate", "jobs show job_id", "listen --port"} <= set(numbers())
    for where, parameter in numbers().items():
        for odd in ("1_0", "\u0661\u0660\u0660", " 1", "+1", "nan", "1" * 31):
            with pytest.raises(click.BadParameter, match="number"):
                pytest.fail(f"{where} takes {odd!r} for {parameter.type.convert(odd, parameter, None)}")


@pytest.mark.parametrize("where", numbers())
def test_a_number_has_bounds_and_what_is_beyond_them_is_refused(where: str) -> None:
    """Below zero, without end, or past what fits: nothing of it goes further."""
    parameter = numbers()[where]
    for odd in ("-1", "1e999", "9" * 19):
        if where.endswith("job_id") and odd == "-1":
            # There is none of that number, which is told.
            continue
        with pytest.raises(click.BadParameter):
            pytest.fail(f"{where} takes {odd!r} for {parameter.type.convert(odd, parameter, None)}")


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("name", ["apply", "dry-run", "send"])
def test_a_file_that_cannot_be_read_is_told_by_what_is_wrong_with_it(name: str, tmp_path: Path) -> None:
    """An empty name is not the folder in which one is."""
    more = {"apply": [], "dry-run": ["--source", "s"], "send": ["--source", "s", "--secret", "x"]}[name]
    for file, told in (("", "empty"), (str(tmp_path), "Is a directory"), (str(tmp_path / "none"), "No such file")):
        done = CliRunner().invoke(main, [name, file, *more])
        assert done.exit_code in (1, 2)
        assert told in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("nowhere")
def test_how_long_a_level_holds_is_said_of_a_level_only() -> None:
    for given in ([], ["own", "--reason", "x"]):
        done = CliRunner().invoke(main, ["log-level", *given, "--for", "10"])
        assert (done.exit_code, "--for goes with a level" in done.stderr) == (2, True)


def test_every_command_stands_in_the_page_of_the_commands() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")]
    told = [name.strip().strip("`") for row in rows for name in row.split(",")]
    assert sorted(told) == sorted(COMMANDS)


def test_a_key_can_be_read_by_a_program() -> None:
    done = CliRunner().invoke(main, ["keygen", "--json"])
    assert list(json.loads(done.stdout)) == ["key"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_a_script_that_asks_the_command(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"_MADEIRA_COMPLETE={shell}_complete" in done.stdout
    words = {"COMP_WORDS": "madeira endpoints pa", "COMP_CWORD": "pa" if shell == "fish" else "2"}
    asked = CliRunner().invoke(main, [], prog_name="madeira", env=words | {"_MADEIRA_COMPLETE": f"{shell}_complete"})
    assert "pause" in asked.stdout


@pytest.mark.long
def test_bash_takes_the_script_and_completes_by_it(tmp_path: Path) -> None:
    """As a person has it: the script is read, and the key pressed."""
    folder = ROOT / ".venv" / "bin"
    script = """
        eval "$(madeira completion bash)"
        COMP_WORDS=(madeira jobs pau); COMP_CWORD=2
        _madeira_completion madeira; echo "${COMPREPLY[@]}"
    """
    environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["pause"], done.stderr
