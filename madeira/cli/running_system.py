"""What `madeira doctor` looks at beyond settings and servers: whether Madeira runs and keeps time, and whether whom it calls has
an address.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import psycopg

from madeira import spans
from madeira.broker.queues import ALIVE_S, Queues
from madeira.cli.findings import Finding
from madeira.egress import Egress
from madeira.errors import SettingsError
from madeira.records import CALLBACK_URL
from madeira.settings import Settings
from madeira.store import holding, leases, reconcile
from madeira.store.configuration import Snapshot
from madeira.store.database import Database
from madeira.store.replica import MAX_AGE_S, Lists

#: Seconds that clocks may differ: unnoticed, and before signatures and leases go wrong.
_APART_S: Final = (1.0, 30.0)

#: Share of Postgres' connections that may be taken.
_TAKEN: Final = 0.8

#: Hosts that are looked up, and seconds for all of them.
_HOSTS: Final = 100
_LOOKUP_S: Final = 5.0

#: Names that a finding tells.
_NAMED: Final = 5

#: Seconds between two looks at a replica that is not used yet.
_AGAIN_S: Final = 0.2

#: Seconds that a collector may take to answer.
_COLLECTOR_S: Final = 3.0

#: Looks up a host and a port, as `socket.getaddrinfo`.
Lookup = Callable[..., list[Any]]


def workers(queues: Queues) -> Iterator[Finding]:
    """Whether there are any."""
    count = queues.alive(ALIVE_S)
    if count:
        yield Finding("ok", "workers", f"{count} {'process gives' if count == 1 else 'processes give'} signs of life")
    else:
        text = "no worker process gives a sign of life: nothing is delivered; start `dramatiq madeira.actors`"
        yield Finding("warning", "workers", text)


def scheduler(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    """Whether reconcile runs, which is what the scheduler is for."""
    runs = reconcile.last_runs(conn, 1)
    if runs and runs[0]["age_s"] <= reconcile.LATE_S:
        yield Finding("ok", "scheduler", f"reconcile ran {runs[0]['age_s']:.0f} s ago")
        return
    ran = f"last ran {runs[0]['age_s'] / 60:,.0f} min ago" if runs else "has never run"
    if (held_s := leases.held_s(conn, reconcile.LEASE)) is not None and held_s > reconcile.LATE_S:
        text = f"reconcile {ran}, and a run has been going on for {held_s / 60:,.0f} min: with much unfinished it takes long"
        yield Finding("warning", "scheduler", f"{text}; wait for its end, and see that Postgres and Redis are not overloaded")
        return
    text = f"reconcile {ran}: what Redis loses stays lost; start `periodiq madeira.actors`, and see that there are workers"
    yield Finding("warning", "scheduler", text)


def replica(values: Settings) -> Iterator[Finding]:
    """Whether lists are read on the replica, if one is named; it is given the seconds by which it may be behind."""
    if not values.replica_url:
        return
    opened = [
        Database(url=url, application="madeira-cli", pool_max=1, writes=writes)
        for url, writes in ((values.database_url, True), (values.replica_url, False))
    ]
    for one in opened:
        one.open()
    try:
        lists = Lists(primary=opened[0], replica=opened[1])
        until = time.monotonic() + MAX_AGE_S
        while (why := lists.look()) and time.monotonic() < until:
            time.sleep(_AGAIN_S)
    finally:
        for one in opened:
            one.close()
    if why is None:
        yield Finding("ok", "replica", "lists are read there")
        return
    text = f"lists are read on the primary instead: {' '.join(why.split())}"
    yield Finding("warning", "replica", f"{text}; see that MADEIRA_REPLICA_URL names a streaming replica of this very database")


def collector(values: Settings) -> Iterator[Finding]:
    """Whether a collector takes spans, where they are switched on."""
    if values.traces == "off":
        return
    try:
        why = spans.refusal(values, timeout_s=_COLLECTOR_S)
    except SettingsError as e:
        yield Finding("error", "traces", f"{e}; no process starts with it")
        return
    if why is None:
        yield Finding("ok", "traces", "the collector takes spans")
        return
    text = f"{why}: spans are lost, and nothing else; see that it runs, and that OTEL_EXPORTER_OTLP_ENDPOINT names it"
    yield Finding("warning", "traces", text)


def clock_of_postgres(conn: psycopg.Connection[Any]) -> float:
    """Seconds by which its clock is ahead of ours."""

    def ask() -> float:
        ((found,),) = conn.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
        return float(found)

    return _ahead(ask)


def clock_of_redis(queues: Queues) -> float:
    """Seconds by which its clock is ahead of ours."""

    def ask() -> float:
        found: Any = queues.client.time()
        return float(found[0] + found[1] / 1e6)

    return _ahead(ask)


def _ahead(ask: Callable[[], float]) -> float:
    """By how much a clock is ahead, given the best of it: half of the way is taken to be there, half back."""
    before = time.time()
    found = ask()
    after = time.time()
    if before <= found <= after:
        return 0.0
    return found - (before + after) / 2


def clocks(ahead: Mapping[str, float]) -> Iterator[Finding]:
    """Whether all have the same time; `ahead` is by how many seconds each is ahead of this machine."""
    if not ahead:
        return
    every = {"this machine": 0.0, **ahead}
    first, last = min(every, key=every.__getitem__), max(every, key=every.__getitem__)
    apart = every[last] - every[first]
    fine, bearable = _APART_S
    if apart <= fine:
        yield Finding("ok", "clocks", f"{', '.join(every)} have the same time")
        return
    text = f"the clock of {last} is {apart:.1f} s ahead of that of {first}; let all machines keep time by NTP"
    yield Finding("warning" if apart <= bearable else "error", "clocks", text)


def held(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    """The endpoints that somebody holds."""
    found = {name: state for name, state in holding.states(conn).items() if state != "active"}
    if not found:
        return
    told = ", ".join(f"{name} ({state})" for name, state in list(found.items())[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    name, state = next(iter(found.items()))
    then = f"`madeira endpoints {'resume' if state == 'paused' else 'enable'} {name}` lets it go"
    yield Finding("warning", "held endpoints", f"{told}{more}: nothing is called there until somebody lets it go; {then}")


def connections(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    """Whether Postgres has connections left."""
    ((used, most),) = conn.execute(
        "SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),"
        " current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer"
    )
    if used < _TAKEN * most:
        yield Finding("ok", "connections", f"{used} of {most} of Postgres are in use")
        return
    text = f"{used} of {most} of Postgres are in use: raise max_connections, or run fewer processes or smaller pools"
    yield Finding("warning", "connections", text)


def addresses(found: Snapshot, egress: Egress, *, lookup: Lookup = socket.getaddrinfo) -> Iterator[Finding]:
    """Whether each endpoint's host has an address, and one that may be called."""
    hosts = {name: host for name, stored in found.endpoints.items() if (host := _host(stored.spec.get("url", "")))}
    some = dict(list(hosts.items())[:_HOSTS])
    known = _looked_up({*some.values()}, lookup)
    bad = [(name, why) for name, host in some.items() if (why := _refusal(host, known.get(host), egress))]
    for name, why in bad[:_NAMED]:
        yield Finding("warning", "addresses", f"endpoint {name}: {why}")
    if len(bad) > _NAMED:
        yield Finding("warning", "addresses", f"and {len(bad) - _NAMED} more endpoints are like that")
    if some and not bad:
        yield Finding("ok", "addresses", f"every host of {len(some)} endpoints has addresses that may be called")


def _host(url: str) -> str | None:
    if url == CALLBACK_URL:
        return None
    try:
        return urlsplit(url.partition("{")[0]).hostname
    except ValueError:
        return None


def _looked_up(hosts: set[str], lookup: Lookup) -> dict[str, list[str] | str]:
    """The addresses of each, or why there are none; one that is not answered in time is not there.

    A look-up cannot be interrupted: the threads are daemons, so that one that hangs does not hold up the end of the command.
    """
    known: dict[str, list[str] | str] = {}

    def look(host: str) -> None:
        known[host] = _addresses(host, lookup)

    threads = [threading.Thread(target=look, args=(host,), daemon=True) for host in sorted(hosts)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _LOOKUP_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(known)


def _addresses(host: str, lookup: Lookup) -> list[str] | str:
    try:
        return sorted({str(one[4][0]) for one in lookup(host, 443, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as e:
        return getattr(e, "strerror", None) or "it is no possible name"


def _refusal(host: str, known: list[str] | str | None, egress: Egress) -> str | None:
    """Why calls to a host would fail; None when they need not."""
    why = egress.refusal_of_host(host)
    if why:
        return why
    if not isinstance(known, list):
        why = known or f"no answer within {_LOOKUP_S:g} s"
        return f"the host {host} has no address ({why}): is the name right, and does this machine's resolver know it?"
    for address in known:
        why = egress.refusal(host, address)
        if why:
            return why
    return None
