"""A page with nothing on it says why, and what to do next."""

from typing import Any

import psycopg
import pytest

from madeira.states import Role
from tests.api.serving import Api
from tests.browser.conftest import Windows

#: Pages, and words of what each says when there is nothing.
PAGES = {
    "overview": ("/console", ("There is no endpoint yet", "madeira apply", "Nothing was counted in this time", "None: whatever")),
    "events": ("/console/events", ("There is no event yet", "madeira send")),
    "events-none-match": ("/console/events?q=nothing", ("No event matches", "Take a filter away")),
    "dead-letters": ("/console/dead-letters", ("There is no dead letter", "madeira dead")),
    "dead-letters-none-match": ("/console/dead-letters?endpoint=nobody", ("No dead letter matches",)),
    "jobs": ("/console/jobs", ("There was no job yet", "madeira replay")),
    "jobs-none-match": ("/console/jobs?state=failed", ("No job matches",)),
    "preview": ("/console/jobs/new?action=replay", ("Nothing matches: there is no such dead letter", "Nothing was done")),
    "endpoints": ("/console/endpoints", ("There is no endpoint yet", "madeira apply")),
    "endpoints-none-match": ("/console/endpoints?q=nothing", ("No endpoint has this in its name",)),
    "routes": ("/console/routes", ("There is no route", "madeira apply")),
    "sources": ("/console/sources", ("There is no source", "madeira apply")),
    "dry-run": ("/console/dry-run", ("There is no source that can be used",)),
    "audit": ("/console/audit", ("Nobody has done anything yet",)),
    "audit-none-match": ("/console/audit?who=nobody", ("Nothing on record matches", "token NAME")),
}


@pytest.fixture(scope="module")
def empty(shared_api: Api, signed_in: Any) -> None:
    """Nothing is there but a token."""
    signed_in(Role.OPERATOR)
    shared_api.configure("")
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"], autocommit=True) as c:
        c.execute("TRUNCATE audit")


@pytest.mark.parametrize("name", list(PAGES))
def test_a_page_with_nothing_on_it_says_why_and_what_to_do(windows: Windows, empty: None, name: str) -> None:
    address, words = PAGES[name]
    seen = windows(Role.OPERATOR)
    seen.open(address)
    said = seen.text()
    assert [one for one in words if one not in said] == []
    faults = seen.looked_over(f"empty-{name}")
    assert not faults, "\n".join(faults)
