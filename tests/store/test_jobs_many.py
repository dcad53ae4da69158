"""A job about fifty thousand dead letters is previewed and made at once, and each of its steps is short."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from madeira.store import job_steps, jobs
from madeira.store.jobs import NewJob
from madeira.store.selection import Selection
from tests.store.making import Connection
from tests.store.test_dead_letters_many import MANY, many, p95

__all__ = ["many"]

pytestmark = [pytest.mark.long, pytest.mark.alone]

#: Seconds that a preview may take, and a step.
PREVIEW_S = 2.0
STEP_S = 0.5

ALL = NewJob("replay", Selection(), "the partner is back")


def test_a_preview_of_fifty_thousand_takes_two_seconds_at_most(many: Connection) -> None:
    """Whatever is selected, before Postgres has counted the rows and afterwards."""
    asked = {
        "all": ALL,
        "of an endpoint": replace(ALL, selection=Selection(endpoint="e7")),
        "of a source and a type": replace(ALL, selection=Selection(source="s0", event_type="order.*")),
        "of a text": replace(ALL, selection=Selection(text="E2345")),
        "of nothing": replace(ALL, selection=Selection(text="nobody says this")),
        "cancel of all": replace(ALL, action="cancel", selection=Selection(source="s0")),
        "cancel of what has not ended": replace(ALL, action="cancel", among="unfinished"),
        "reroute": replace(ALL, action="reroute"),
    }

    def looks() -> dict[str, float]:
        return {name: p95(preview(many, job)) for name, job in asked.items()}

    before = looks()
    many.execute("VACUUM ANALYZE")
    after = looks()
    for name in asked:
        print(f"p95 of a preview {name}: {before[name] * 1000:.1f} ms, once vacuumed {after[name] * 1000:.1f} ms")
    assert jobs.preview(many, ALL).total == MANY
    assert max(*before.values(), *after.values()) < PREVIEW_S


def preview(conn: Connection, job: NewJob) -> Callable[[], Any]:
    return lambda: jobs.preview(conn, job)


def test_no_step_is_long_however_few_of_many_are_wanted(many: Connection) -> None:
    """All of one endpoint, and a handful among all: the rest is passed over page by page."""
    for chosen in (
        replace(ALL, action="cancel", selection=Selection(endpoint="e7")),
        replace(ALL, selection=Selection(text="E2345")),
    ):
        job, _ = jobs.create(many, chosen, "admin")
        took, begun = [], 0
        while True:
            began = time.perf_counter()
            step = job_steps.step(many, job["id"])
            took.append(time.perf_counter() - began)
            begun += len(step.begun)
            if step.is_over or not step.moved:
                break
        found = jobs.find(many, job["id"])
        assert found is not None
        print(f"{chosen.action}: {len(took)} steps, the longest {max(took) * 1000:.0f} ms; {found['done']} done, {begun} begun")
        assert found["done"] + begun > 0
        assert max(took) < STEP_S
