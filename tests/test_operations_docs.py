"""docs/operations.md names everything that somebody on call may see, and no command that there is not."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from madeira.cli.main import main
from madeira.lanes.state import STATES
from madeira.records import OWN_SOURCE
from madeira.routing.config import parse_toml
from madeira.states import DeliveryStatus, EventStatus, FailureClass
from madeira.store.holding import MOVES
from madeira.store.notices import Kind

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text()

#: Methods of a logger that write what somebody may be woken by.
LOUD = {"warning", "error", "exception", "critical"}


def first_cells() -> set[str]:
    """The words that have a row of their own in a table."""
    cells = re.findall(r"^\| (`[^|]*`) \|", PAGE, re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def log_keys() -> Iterator[str]:
    """The keys of all lines of level warning and above, as the source has them."""
    for folder in ("madeira", "actors", "middleware"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOUD and node.args:
                    key = node.args[0]
                    if isinstance(key, ast.Constant) and re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", str(key.value)):
                        yield str(key.value)


def commands() -> Iterator[list[str]]:
    """Every `madeira …` on the page, without what an ellipsis stands for."""
    inline = re.findall(r"`(madeira [a-z][^`]*)`", PAGE)
    blocks = re.findall(r"^(madeira [^#\n]*)", PAGE, re.MULTILINE)
    for text in inline + blocks:
        yield [word for word in shlex.split(text)[1:] if "…" not in word]


def test_every_notice_is_explained() -> None:
    """Each kind has its row."""
    assert set(Kind) <= first_cells()


def test_every_state_is_explained() -> None:
    """Of events, deliveries, endpoints and lanes; and every class of failure."""
    endpoints = {after for _, after in MOVES.values()}
    assert {*EventStatus, *DeliveryStatus, *FailureClass, *STATES, *endpoints} <= first_cells()


def test_every_loud_line_of_the_log_is_explained() -> None:
    """Each key has its row, and no row is about a key that is never written."""
    keys = set(log_keys())
    assert len(keys) > 40
    assert keys - first_cells() == set()
    words = {*EventStatus, *DeliveryStatus, *FailureClass, *STATES, *Kind}
    assert first_cells() - keys - words == set()


def test_every_command_of_the_page_exists() -> None:
    """With the options that it is shown with."""
    found = list(commands())
    assert len(found) > 15
    for words in found:
        command: click.Command = main
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert command is not main, words
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, (command.name, words)


def test_the_configuration_of_the_page_sends_notices_where_it_says() -> None:
    """It can be applied as it stands, and its payload is JSON."""
    shown = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    rules = parse_toml(shown[1], where="page", environ={"PAGER_SECRET": "s" * 32})
    [route] = rules.routes
    assert (route.source, route.endpoint) == (OWN_SOURCE, "pager")
    payload = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert payload is not None
    assert json.loads(payload[1])["kind"] in set(Kind)


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"\]\(#([a-z-]+)\)", PAGE))))
def test_every_link_within_the_page_leads_somewhere(anchor: str) -> None:
    """To a heading of that name."""
    headings = {
        re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    assert anchor in headings
