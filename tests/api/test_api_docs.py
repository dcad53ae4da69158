"""docs/api.md says what is true: its examples run, in their order, and its tables are made from the code."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg
import pytest

from madeira.api import problems
from madeira.api.openapi.operations import OPERATIONS
from madeira.api.openapi.parts import Access
from madeira.records import PlannedDelivery
from madeira.states import FailureClass, Role
from madeira.store import routing
from tests.api.people import audited, token
from tests.api.serving import SECRET, Api

PAGE: Final = Path(__file__).parents[2] / "docs" / "api.md"
MADE: Final = "made by `python -m tests.api.test_api_docs`"


def operations_table() -> str:
    """The table of all that can be asked."""
    lines = ["", "| call | who | what it does |", "|---|---|---|"]
    lines += [f"| `{o.method.upper()} {o.path}` | {_who(o.access)} | {o.summary} |" for o in OPERATIONS]
    return "\n".join(lines) + "\n\n"


def _who(access: Access) -> str:
    ways = ([str(access.role)] if access.role else []) + (["source"] if access.source else [])
    return ", ".join(ways) or "everybody"


def problems_table() -> str:
    """The table of all problem types."""
    lines = ["", "| status | type | when |", "|---|---|---|"]
    lines += [f"| {status} | `{name}` | {when} |" for name, (status, when) in problems.TYPES.items()]
    return "\n".join(lines) + "\n\n"


def page() -> str:
    """The page with its tables made anew."""
    text = PAGE.read_text()
    for name, made in (("operations", operations_table()), ("problems", problems_table())):
        begin, end = f"<!-- {name}: {MADE} -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = text.partition(begin)
        assert found, f"the page has no mark for {name}"
        text = before + begin + made + end + rest.partition(end)[2]
    return text


def test_the_tables_are_what_the_code_says() -> None:
    """Made anew they are the same."""
    assert PAGE.read_text() == page()


@pytest.fixture
def prepared(shared_api: Api) -> Api:
    """An API with an event whose delivery is dead, and one that no route wanted, as the page supposes."""
    dead = PlannedDelivery("sink", "sink", (), FailureClass.RECEIVER, "the receiver answered 404")
    for name, plan in (("order-4715", [dead]), ("order-4716", [])):
        # As the page posts it, which then is a duplicate.
        [line] = re.findall(rf'^.*"event_id": "{name}".*\n', PAGE.read_text(), re.MULTILINE)
        assert shared_api.post(line.encode()).status == 202
        with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
            seq = c.execute("SELECT seq FROM event WHERE event_id = %s", (name,)).fetchone()[0]
            routing.route(c, [(seq, plan)])
    return shared_api


def test_every_example_runs(prepared: Api, tmp_path: Path) -> None:
    """In one shell, in the order of the page; each call succeeds and says what the page says of it."""
    text, _ = token(prepared, Role.ADMIN)
    before = audited(prepared)
    environ = {
        "PATH": os.environ["PATH"],
        "URL": f"http://127.0.0.1:{prepared.port}",
        "SOURCE": "shop",
        "SECRET": SECRET,
        "TOKEN": text,
    }
    script = "\n".join(["set -eu", *blocks()])
    done = subprocess.run(["/bin/bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    for told in (
        '"event_id": "order-4711", "source": "shop", "trace_id": "checkout-17", "status": "pending", "duplicate": false',
        '"accepted": 2, "duplicates": 0, "rejected": [{"line": 2',
        '"replayed": 1',
        '"outcome": "business"',
        '"secrets": ["hidden:1", "hidden:2"]',
        '"concurrency": 4',
        '"token": "mdr_',
        '"action": "delete"',
    ):
        assert told in done.stdout, f"{told} is not in\n{done.stdout}"
    assert done.stdout.count('"duplicate": true') == 2
    assert "what-the-partner-gave-us" not in done.stdout
    # Four actions on events, nine changes of the configuration and tokens, a test call.
    assert audited(prepared) == before + 14


def blocks() -> Iterator[str]:
    """The page's examples."""
    found = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 17
    yield from found


if __name__ == "__main__":
    PAGE.write_text(page())
