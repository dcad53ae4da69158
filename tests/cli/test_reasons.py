"""The terminal takes no reason that the API would refuse, and says what would be right."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from madeira.cli.main import main
from madeira.reasons import MAX_REASON


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Every command that takes a reason, and whether it needs one."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        for option in command.params:
            if option.name == "reason":
                yield (*path, name), option.required


ALL = sorted(commands(main))
NEEDED = [path for path, needed in ALL if needed]


def refusal(path: tuple[str, ...], reason: str) -> str:
    done = CliRunner().invoke(main, [*path, "--reason", reason])
    assert done.exit_code == 2, done.output
    return done.output


def test_all_commands_that_act_are_met() -> None:
    """Else the tests below would hold for nothing."""
    assert {" ".join(path) for path in NEEDED} >= {
        "endpoints pause",
        "endpoints disable",
        "replay",
        "reroute",
        "cancel",
        "jobs cancel",
    }
    assert {" ".join(path) for path, _ in ALL} >= {"endpoints enable", "apply", "token create", "reencrypt", "endpoints test"}


@pytest.mark.parametrize("path", [path for path, _ in ALL], ids=" ".join)
@pytest.mark.parametrize(
    "reason", ["x" * (MAX_REASON + 1), "two\nlines", "a bell\a", "half a letter \udc80"], ids=["long", "lines", "bell", "half"]
)
def test_a_reason_that_is_no_short_line_is_refused(path: tuple[str, ...], reason: str) -> None:
    """It would break a terminal, a page, or the row in the audit."""
    assert f"at most {MAX_REASON} printable characters" in refusal(path, reason)


@pytest.mark.parametrize("path", NEEDED, ids=" ".join)
@pytest.mark.parametrize("reason", ["", " ", " late"], ids=["nothing", "space", "late"])
def test_a_reason_that_says_nothing_is_refused_where_one_is_needed(path: tuple[str, ...], reason: str) -> None:
    """Nobody could be told later why nothing goes."""
    assert "must say why" in refusal(path, reason)
