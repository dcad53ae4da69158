"""docs/routing.md says what is true: its tables are run, and its lists are held against the code."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from madeira import event_values, expressions, templates
from madeira.delivery.answer import Answer
from madeira.delivery.verdict import judge
from madeira.errors import MadeiraError
from madeira.event_values import EventValues
from madeira.records import RoutableEvent
from madeira.templates import filters
from tests.delivery.samples import endpoint

PAGE = (Path(__file__).parents[1] / "docs" / "routing.md").read_text()


def event() -> EventValues:
    """The event that the page shows, by its own texts."""
    shown = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    found = json.loads(shown[1])
    texts = {name: re.search(rf'"{name}": (\{{.*\}}),?\n', shown[1]) for name in ("payload", "parameters")}
    return EventValues(
        RoutableEvent(
            seq=1,
            source="billing",
            event_id=found["event_id"],
            event_type=found["event_type"],
            routing_key=found["routing_key"],
            target_uri=None,
            trace_id="t",
            created_at=datetime(2026, 1, 2, tzinfo=UTC),
            payload=texts["payload"][1] if texts["payload"] else "",
            parameters=texts["parameters"][1] if texts["parameters"] else "",
        )
    )


def rows(title: str) -> Iterator[list[str]]:
    """The cells of the table whose first column is `title`."""
    table = re.search(rf"^\| {title} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table is not None
    for line in table[1].splitlines():
        yield [cell.strip().strip("`").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def outcome(kind: str, text: str) -> str:
    try:
        if kind == "filter":
            reason = expressions.check(text, frozenset(event_values.NAMES))
            return f"error: {reason}" if reason else str(expressions.evaluate(text, event())).lower()
        check, make = {
            "body": (templates.check_body, templates.body),
            "header": (templates.check_header, templates.header),
            "url": (templates.check_url, templates.url),
        }[kind]
        reason = check(text)
        return f"error: {reason}" if reason else make(text, event())
    except MadeiraError as e:
        return f"error: {e}"


@pytest.mark.parametrize(
    ("kind", "text", "expected"), [(kind, *row) for kind in ("filter", "body", "header", "url") for row in rows(kind)]
)
def test_each_example_gives_what_the_page_says(kind: str, text: str, expected: str) -> None:
    """Of an error the page tells the beginning."""
    given = outcome(kind, text)
    assert given.startswith(expected) if expected.startswith("error") else given == expected


@pytest.mark.parametrize(("rule", "given", "expected"), list(rows("success")))
def test_each_success_rule_judges_as_the_page_says(rule: str, given: str, expected: str) -> None:
    status, _, body = given.partition(" ")
    answer = Answer(int(status), {}, body.encode(), False, "http://a.test/", datetime(2026, 1, 2, tzinfo=UTC), 0.1)
    assert expressions.check(rule, expressions.ANSWER_VARIABLES) is None
    assert judge(answer, endpoint(success=rule)).outcome == expected


def test_the_page_names_every_filter_and_test_and_variable() -> None:
    told = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert {*filters.FILTERS, *filters.TESTS, *event_values.NAMES, *expressions.ANSWER_VARIABLES} <= told
    assert f"{expressions.MAX_LENGTH:,} characters" in PAGE
