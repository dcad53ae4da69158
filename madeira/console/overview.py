"""Is anything wrong? One sentence, then charts, the endpoints by their trouble, what is dead, and how Madeira itself does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import falcon
import psycopg

from madeira.api import query
from madeira.broker.queues import ALIVE_S, Queues
from madeira.console import asking, charts, lately, trouble, words
from madeira.console.house import House, Page
from madeira.console.sparks import Spark, Sparks
from madeira.console.trouble import Row
from madeira.errors import BrokerUnavailable
from madeira.states import JobState
from madeira.store import holding, jobs, notices, reconcile, rollups
from madeira.store import overview as store
from madeira.store.notices import Notice
from madeira.store.overview import Overview
from madeira.store.rollups import Point, Range

#: Endpoints, and groups of dead letters, of the page; the rest is a link away.
ROWS: Final = 20
DEAD: Final = 12

#: Notices of the page.
_NOTICES: Final = 6

#: Seconds of a minute in which a page that refreshes itself gets charts too: those of the minute before have been counted then.
_DRAWN: Final = range(10, 16)


class Part(NamedTuple):
    """A part of the sentence."""

    text: str
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """How Madeira itself does."""

    #: Worker processes that give signs of life; None while Redis is away.
    workers: int | None
    #: The last run of reconcile, and whether it is long ago.
    last_run: dict[str, Any] | None
    is_late: bool


class _Read(NamedTuple):
    """What the page reads of Postgres."""

    overview: Overview
    held: dict[str, str]
    runs: list[dict[str, Any]]
    #: Of the charts; None when there are none this time.
    points: list[Point] | None
    notices: list[Notice]
    jobs: list[dict[str, Any]]
    sparks: Mapping[str, Spark]


def add(app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
    """Add the page."""
    app.add_route("/console", OverviewPage(house))


class OverviewPage(Page):
    """``/console``."""

    def __init__(self, house: House) -> None:
        super().__init__(house)
        self._sparks = Sparks()

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show how everything is."""
        chosen = asking.read(req, {"range": query.choice(*charts.RANGES)}).values.get("range", "1h")
        house, shown = self.house, charts.RANGES[chosen]
        draws = draws_charts(datetime.now(UTC), refreshes=bool(req.get_header("X-Madeira-Refresh")))
        configured = house.configurator.list("endpoint")
        read = house.read(req, lambda connection: self._read(connection, shown.range if draws else None))
        found = read.overview
        rows = trouble.rows(configured, found, held=read.held, queues=house.queues)
        health = _health(read.runs, house.queues)
        house.show(
            req,
            resp,
            "overview.html",
            title="Overview",
            sentences=sentences(found, rows, health, read.jobs),
            rows=rows,
            sparks=read.sparks,
            overview=found,
            health=health,
            drawn=None if read.points is None else charts.draw(read.points, shown),
            ranges=charts.RANGES,
            chosen=chosen,
            most_rows=ROWS,
            most_dead=DEAD,
            notices=[lately.told(notice) for notice in read.notices],
        )

    def _read(self, connection: psycopg.Connection[Any], drawn: Range | None) -> _Read:
        return _Read(
            overview=store.read(connection),
            held=holding.states(connection),
            runs=reconcile.last_runs(connection, 1),
            points=rollups.series(connection, drawn) if drawn else None,
            notices=notices.latest(connection, _NOTICES),
            jobs=jobs.lately(connection),
            sparks=self._sparks.read(connection),
        )


def draws_charts(now: datetime, *, refreshes: bool) -> bool:
    """Whether there are charts this time. Numbers come once a minute: what `refreshes` a page every two seconds reads them a few
    times a minute only, and what it does not get stays as it is.
    """
    return not refreshes or now.second in _DRAWN


def _health(runs: list[dict[str, Any]], queues: Queues) -> Health:
    try:
        workers = queues.alive(ALIVE_S)
    except BrokerUnavailable:
        workers = None
    last = runs[0] if runs else None
    return Health(workers, last, is_late=last is None or last["age_s"] > reconcile.LATE_S)


def sentences(found: Overview, rows: list[Row], health: Health, worked: Sequence[Mapping[str, Any]] = ()) -> list[list[Part]]:
    """What is wrong, the worst first; when nothing is, that all is well; and which of the jobs `worked` go on."""
    failed = [job for job in worked if job["state"] == JobState.FAILED]
    told = [*_of_madeira(found, health), *_of_endpoints(rows, found), *_of_failed(failed), *_of_the_dead(found)]
    return [*(told or [_all_well(found)]), *_of_jobs([job for job in worked if job["state"] != JobState.FAILED])]


def _of_madeira(found: Overview, health: Health) -> list[list[Part]]:
    told = []
    if health.workers is None:
        told.append([Part("Redis cannot be reached: events are accepted, and nothing is delivered until it is back.")])
    elif health.workers == 0:
        told.append([Part("No worker gives a sign of life: events are accepted, and nothing is delivered.")])
    if health.is_late and health.workers:
        ran = f"last ran {words.span(health.last_run['age_s'])} ago" if health.last_run else "has not run yet"
        told.append([Part(f"Reconcile {ran}: is the scheduler running?")])
    if found.unrouted and found.unrouted_since and _age(found.unrouted_since) > reconcile.LATE_S:
        waiting = f"{words.plural(found.unrouted, 'event waits for its', 'events wait for their')} routing"
        told.append([Part(waiting, words.address("events", status="pending")), Part(_oldest(found.unrouted_since))])
    return told


def _of_endpoints(rows: list[Row], found: Overview) -> list[list[Part]]:
    held = [row for row in rows if row.waiting and (row.is_held or not row.is_configured)]
    if not held:
        return []
    count = sum(row.waiting for row in held)
    only = held[0] if len(held) == 1 else None
    who = Part(only.name, words.address("endpoints", only.name)) if only else Part(f"{len(held)} endpoints", "#endpoints")
    verb = "holds" if only else "hold"
    more = "more than " if found.more_waiting else ""
    why = f" ({words.lane(only.state) if only.is_configured else 'it is not configured'})" if only else ""
    since = min(row.since for row in held if row.since)
    return [[who, Part(f"{why} {verb} {more}{words.plural(count, 'delivery', 'deliveries')}{_oldest(since)}")]]


def _of_failed(failed: Sequence[Mapping[str, Any]]) -> list[list[Part]]:
    if not failed:
        return []
    if len(failed) > 1:
        return [[Part(f"{len(failed)} jobs", words.address("jobs", state="failed")), Part(" have failed since yesterday.")]]
    (job,) = failed
    why = f": {words.cut(job['error'], 200)}" if job["error"] else ""
    return [[Part(f"Job {job['id']}", words.address("jobs", str(job["id"]))), Part(f" ({job['action']}) has failed{why}.")]]


def _of_jobs(under_way: Sequence[Mapping[str, Any]]) -> list[list[Part]]:
    if not under_way:
        return []
    if len(under_way) > 1:
        states = [JobState(job["state"]) for job in under_way]
        told = [
            f"{count} {'go on' if state is JobState.RUNNING else 'are paused'}"
            if count > 1
            else f"1 {'goes on' if state is JobState.RUNNING else 'is paused'}"
            for state in (JobState.RUNNING, JobState.PAUSED)
            if (count := states.count(state))
        ]
        return [[Part("Jobs", "/console/jobs"), Part(f": {' and '.join(told)}.")]]
    (job,) = under_way
    over = job["done"] + job["failed"] + job["skipped"]
    what = f" ({job['action']}) {'goes on' if job['state'] == JobState.RUNNING else 'is paused'}"
    link = Part(f"Job {job['id']}", words.address("jobs", str(job["id"])))
    return [[link, Part(f"{what}: {words.number(over)} of {words.number(job['total'])} are through.")]]


def _of_the_dead(found: Overview) -> list[list[Part]]:
    if not found.dead:
        return []
    count, first = found.dead_in_all, min(one.first for one in found.dead)
    more = "More than " if found.more_dead else ""
    since = f"{first.astimezone(UTC):{'%H:%M' if _age(first) < 86_400 else '%Y-%m-%d'}} UTC"
    return [[Part(f"{more}{words.plural(count, 'dead letter')}", "#dead"), Part(f" since {since}.")]]


def _all_well(found: Overview) -> list[Part]:
    done = f"{words.plural(found.accepted, 'event')} accepted and {words.number(found.delivered)} delivered"
    told = f"All well: {done} in the last minute"
    if not found.waiting:
        return [Part(f"{told}, nothing waits.")]
    since = min(one.since for one in found.waiting.values())
    return [Part(f"{told}, {words.plural(found.waiting_in_all, 'delivery', 'deliveries')} on the way{_oldest(since)}")]


def _oldest(since: datetime) -> str:
    return f"; the oldest has waited {words.span(_age(since))}."


def _age(moment: datetime) -> float:
    return max(0.0, (datetime.now(UTC) - moment).total_seconds())
