"""Every page as it is drawn, on a desk and on a phone, in light and in dark: nothing sticks out, is cut off or unreadable."""

from collections.abc import Callable

import pytest

from madeira.embedded import free_port
from madeira.states import Role
from tests.api.conftest import serve  # noqa: F401  # a fixture
from tests.api.serving import ADMIN_TOKEN, Api
from tests.browser.conftest import Windows
from tests.browser.world import World

#: Pages of a Madeira that is in use, by the names of their pictures.
PAGES: dict[str, Callable[[World], str]] = {
    "overview": lambda w: "/console",
    "overview-week": lambda w: "/console?range=7d",
    "events": lambda w: "/console/events",
    "events-filtered": lambda w: "/console/events?status=dead&endpoint=partner-ledger&event_type=order.*&q=upstream",
    "event-delivered": lambda w: f"/console/events/{w.delivered}?source=shop",
    "event-dead": lambda w: f"/console/events/{w.event_of(w.letters[2])}?source=shop",
    "event-parked": lambda w: f"/console/events/{w.parked}?source=shop",
    "event-retried": lambda w: f"/console/events/{w.retried}?source=shop",
    "event-unrouted": lambda w: f"/console/events/{w.unrouted}?source=shop",
    "event-pending": lambda w: f"/console/events/{w.pending}?source=shop",
    "event-cancelled": lambda w: f"/console/events/{w.cancelled}?source=billing",
    "dead-letters": lambda w: "/console/dead-letters",
    "dead-letters-filtered": lambda w: "/console/dead-letters?endpoint=partner-ledger&error=http_503&failure_class=receiver",
    "dead-letter": lambda w: f"/console/dead-letters/{w.letters[2]}",
    "dead-letter-born-dead": lambda w: f"/console/dead-letters/{w.letters[-1]}",
    "preview-replay": lambda w: "/console/jobs/new?action=replay",
    "preview-cancel": lambda w: "/console/jobs/new?action=cancel&endpoint=crm&error=read_timeout",
    "preview-reroute": lambda w: "/console/jobs/new?action=reroute",
    "preview-cancel-unfinished": lambda w: "/console/jobs/new?action=cancel&among=unfinished&endpoint=partner-ledger",
    "preview-of-none": lambda w: "/console/jobs/new?action=reroute&endpoint=crm",
    "jobs": lambda w: "/console/jobs",
    "job-running": lambda w: f"/console/jobs/{w.jobs['running']}",
    "job-paused": lambda w: f"/console/jobs/{w.jobs['paused']}",
    "job-done": lambda w: f"/console/jobs/{w.jobs['done']}",
    "job-failed": lambda w: f"/console/jobs/{w.jobs['failed']}",
    "job-cancelled": lambda w: f"/console/jobs/{w.jobs['cancelled']}",
    "endpoints": lambda w: "/console/endpoints",
    "endpoint-broken": lambda w: "/console/endpoints/partner-ledger",
    "endpoint-paused": lambda w: "/console/endpoints/warehouse-sync",
    "endpoint-callback": lambda w: "/console/endpoints/callback",
    "routes": lambda w: "/console/routes",
    "route": lambda w: "/console/routes/orders-to-ledger",
    "sources": lambda w: "/console/sources",
    "source": lambda w: "/console/sources/billing",
    "dry-run": lambda w: "/console/dry-run",
    "dry-run-of-an-event": lambda w: f"/console/dry-run?source=shop&event={w.delivered}",
    "audit": lambda w: "/console/audit",
    "audit-filtered": lambda w: "/console/audit?who=admin&action=pause",
    "edit-endpoint": lambda w: "/console/endpoints/partner-ledger/edit",
    "edit-route": lambda w: "/console/routes/orders-to-ledger/edit",
    "edit-source": lambda w: "/console/sources/billing/edit",
    "edit-new-endpoint": lambda w: "/console/endpoints/-/new",
    "edit-new-route": lambda w: "/console/routes/-/new?endpoint=crm",
    "edit-new-source": lambda w: "/console/sources/-/new",
    "edit-remove": lambda w: "/console/endpoints/search-index/remove",
    "edit-remove-route": lambda w: "/console/routes/customers-to-crm/remove",
    "edit-remove-source": lambda w: "/console/sources/warehouse-europe-central-2/remove",
    "edit-endpoints": lambda w: "/console/endpoints",
    "edit-an-endpoint": lambda w: "/console/endpoints/crm",
    "viewer-overview": lambda w: "/console",
    "viewer-event": lambda w: f"/console/events/{w.event_of(w.letters[2])}?source=shop",
    "viewer-dead-letters": lambda w: "/console/dead-letters",
    "viewer-job": lambda w: f"/console/jobs/{w.jobs['running']}",
    "viewer-endpoint": lambda w: "/console/endpoints/crm",
    "problem-404": lambda w: "/console/nothing",
    "problem-403": lambda w: "/console/endpoints/crm/edit",
    "problem-422": lambda w: "/console/events?status=odd&since=yesterday",
    "problem-no-such-endpoint": lambda w: "/console/endpoints/nobody",
}


@pytest.mark.parametrize("name", list(PAGES))
def test_a_page_is_whole_and_readable_at_every_width_and_in_every_scheme(windows: Windows, world: World, name: str) -> None:
    world.goes_on()
    seen = windows({"edit": Role.ADMIN, "viewer": Role.VIEWER}.get(name.split("-")[0], Role.OPERATOR))
    seen.open(PAGES[name](world))
    assert (seen.page.locator("#problem").count() == 1) == name.startswith("problem"), "it is the page that was asked for"
    faults = seen.looked_over(name)
    assert not faults, "\n".join(faults)


def test_what_is_folded_is_whole_and_readable_once_it_is_unfolded(windows: Windows, world: World) -> None:
    seen = windows(Role.ADMIN)
    for name in ("dead-letter", "event-dead", "event-delivered", "edit-endpoint", "overview", "audit", "dry-run-of-an-event"):
        page = seen.open(PAGES[name](world))
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        faults = seen.looked_over(f"{name}-unfolded")
        assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "address", "field", "value"),
    [
        ("endpoint", "/console/endpoints/crm/edit", "url", "ftp://crm.example/{nothing"),
        ("route", "/console/routes/orders-to-ledger/edit", "filter", "payload.amount >"),
        ("source", "/console/sources/billing/edit", "rate, per second", "quick"),
    ],
)
def test_a_form_that_is_refused_is_whole_and_readable(
    windows: Windows, world: World, name: str, address: str, field: str, value: str
) -> None:
    seen = windows(Role.ADMIN)
    page = seen.open(address)
    page.get_by_label(field, exact=False).first.fill(value)
    page.get_by_role("button", name="Save").click()
    page.get_by_role("alert").first.wait_for()
    faults = seen.looked_over(f"edit-refused-{name}")
    assert not faults, "\n".join(faults)


def test_what_was_done_what_is_ticked_what_came_of_a_call_and_the_keys_are_whole_and_readable(
    windows: Windows, world: World
) -> None:
    seen = windows(Role.OPERATOR)
    page = seen.open("/console/dead-letters?endpoint=partner-ledger")
    page.get_by_label("tick all").check()
    faults = seen.looked_over("dead-letters-ticked")
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keys").wait_for()
    faults += seen.looked_over("keys")
    page = seen.open("/console/endpoints/crm")
    page.get_by_role("button", name="Call it").click()
    page.get_by_role("heading", name="The test call").wait_for()
    faults += seen.looked_over("endpoint-called")
    page.locator("form[action$='/disable']").get_by_label("Reason").fill("gone for good, says Ann of theirs")
    page.get_by_role("button", name="Disable").click()
    page.locator("#done").wait_for()
    faults += seen.looked_over("endpoint-disabled")
    page.get_by_role("button", name="Enable").click()
    page.locator("#done").wait_for()
    assert not faults, "\n".join(faults)


def test_without_postgres_the_page_that_says_so_is_whole_and_readable(
    windows: Windows,
    serve: Callable[..., Api],  # noqa: F811
    shared_redis_url: str,
) -> None:
    away = serve(f"postgresql://nobody@127.0.0.1:{free_port()}/x", shared_redis_url, config=None).start()
    seen = windows(None)
    seen.base = f"http://127.0.0.1:{away.port}"
    seen.sign_in(ADMIN_TOKEN)
    seen.open("/console/events")
    assert "Postgres cannot be reached" in seen.text()
    faults = seen.looked_over("problem-503")
    assert not faults, "\n".join(faults)
