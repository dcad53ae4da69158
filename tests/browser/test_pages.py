"""Every page as it is drawn, on a desk and on a phone, in light and in dark: nothing sticks out, is cut off or unreadable."""

from collections.abc import Callable

import pytest

from madeira.states import Role
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
    "preview-cancel": lambda w: "/console/jobs/new?action=cancel&endpoint=crm&error=timeout",
    "preview-reroute": lambda w: "/console/jobs/new?action=reroute",
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
    "edit-new-source": lambda w: "/console/sources/-/new",
    "edit-remove": lambda w: "/console/endpoints/search-index/remove",
    "problem-404": lambda w: "/console/nothing",
    "problem-422": lambda w: "/console/events?status=odd&since=yesterday",
    "problem-no-such-endpoint": lambda w: "/console/endpoints/nobody",
}


@pytest.mark.parametrize("name", list(PAGES))
def test_a_page_is_whole_and_readable_at_every_width_and_in_every_scheme(windows: Windows, world: World, name: str) -> None:
    world.goes_on()
    seen = windows(Role.ADMIN if name.startswith("edit") else Role.OPERATOR)
    seen.open(PAGES[name](world))
    faults = seen.looked_over(name)
    assert not faults, "\n".join(faults)
