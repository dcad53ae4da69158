"""How much slower routing is with a thousand routes than with one: ``python -m benchmarks.routing``. Quote the ratio.

Measured in one run, in turns: the matching alone, and the whole of routing as the actor does it (read sixteen events from
Postgres, match them, insert their deliveries). Each event matches one route, which has a filter over the payload. The thousand
routes are of forty sources, half of them for exact types and half for patterns; events come for all of them. As a third the
event types are new each time, so that nothing that was remembered helps.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from madeira.egress import Egress
from madeira.embedded import EmbeddedPostgres
from madeira.records import Endpoint, NewEvent, RoutableEvent, Route
from madeira.routing.config import Rules
from madeira.routing.rules import match
from madeira.store import events
from madeira.store import routing as store
from madeira.store.database import Database
from madeira.store.migrate import migrate

SOURCES, TYPES, BATCH = 40, 25, 16
EGRESS = Egress()
PAYLOAD = json.dumps({"amount": 250, "currency": "EUR", "lines": [{"sku": f"sku-{n}", "count": n} for n in range(10)]})

#: Source and event type.
Kind = tuple[str, str]


def rules(sources: int, types: int) -> Rules:
    """One route for each of so many sources and types."""
    routes = [
        Route(f"r{s}-{t}", "a", f"source{s}", f"type{t}.*" if t % 2 else f"type{t}.done", filter="payload.amount > 100")
        for s in range(sources)
        for t in range(types)
    ]
    return Rules(MappingProxyType({}), MappingProxyType({"a": Endpoint("a", "http://a.example/")}), tuple(routes))


def kinds(count: int, sources: int, types: int) -> list[Kind]:
    """Sources and types of `count` events, in turn."""
    return [(f"source{n % sources}", f"type{n // sources % types}.done") for n in range(count)]


def matching(these: Rules, of: Sequence[Kind]) -> float:
    """Events per second that are matched."""
    found = [
        RoutableEvent(n, source, f"e{n}", event_type, None, None, "trace", 0, datetime.now(UTC), PAYLOAD, None)
        for n, (source, event_type) in enumerate(of)
    ]
    started = time.perf_counter()
    planned = sum(len(match(these, event, egress=EGRESS)) for event in found)
    rate = len(found) / (time.perf_counter() - started)
    assert planned == len(found), "an event was not matched"
    return rate


def routing(database: Database, these: Rules, of: Sequence[Kind]) -> float:
    """Events per second that are routed, from rows to rows, on one thread."""
    with database.connection() as conn:
        seqs = []
        for at in range(0, len(of), 200):
            group = [
                NewEvent(source, uuid.uuid4().hex, event_type, PAYLOAD, bytes(32), "trace")
                for source, event_type in of[at : at + 200]
            ]
            seqs += [accepted.seq for accepted in events.insert(conn, group)]
    started = time.perf_counter()
    for at in range(0, len(seqs), BATCH):
        with database.connection() as conn:
            found, _ = store.routable(conn, seqs[at : at + BATCH])
        plans = [(event.seq, match(these, event, egress=EGRESS)) for event in found]
        with database.connection() as conn:
            store.route(conn, plans)
    return len(seqs) / (time.perf_counter() - started)


def compare(
    name: str, measure: Callable[[Rules, Sequence[Kind]], float], count: int, rounds: int, *, fresh: bool = False
) -> None:
    """Measure with one route and with a thousand, in turns; print the medians and their ratio."""
    one, thousand = rules(1, 1), rules(SOURCES, TYPES)
    if fresh:
        one = Rules(one.sources, one.endpoints, (Route("r", "a", "source1", "type1.*", filter="payload.amount > 100"),))
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for these, found in ((one, rates[0]), (thousand, rates[1])):
            of = kinds(count, SOURCES, TYPES) if these is thousand else kinds(count, 1, 1)
            if fresh:
                of = [("source1", f"type1.x{number}-{n}") for n in range(count)]
            found.append(measure(these, of))
    first, second = statistics.median(rates[0]), statistics.median(rates[1])
    print(f"{name:28} one route {first:8.0f}/s   1,000 routes {second:8.0f}/s   ratio {second / first:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    compare("matching", matching, options.events, options.rounds)
    compare("matching, types all new", matching, options.events, options.rounds, fresh=True)
    folder = Path(tempfile.mkdtemp(prefix="madeira-routing-"))
    postgres = EmbeddedPostgres(folder=folder / "postgres")
    try:
        postgres.start()
        migrate(postgres.url)
        database = Database(url=postgres.url, application="benchmark", pool_max=1)
        database.open()
        try:
            compare("routing", lambda these, of: routing(database, these, of), options.events, options.rounds)
        finally:
            database.close()
    finally:
        postgres.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
