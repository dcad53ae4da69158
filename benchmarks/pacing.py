"""Makes the pictures of `docs/pacing.md` from real runs: ``python -m benchmarks.pacing [FOLDER]``. Takes about a minute.

A whole Madeira, two worker processes, and a receiver that notes when each call begins and ends. Every picture shows what one
setting does to the same burst.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pictures import Bar, draw
from madeira.embedded import EmbeddedPostgres, EmbeddedValkey
from madeira.store.migrate import migrate
from tests.receiver import Answer, Call, Receiver
from tests.system.bulk import Site, site
from tests.system.harness import TOKEN, wait_until

#: Seconds that the receiver takes for a call.
CALL_S = 0.15

#: Seconds of rest before a burst.
QUIET_S = 1.2

#: What each row of a picture is called, and the settings of its endpoint.
BURST: Mapping[str, dict[str, Any]] = {
    "concurrency = 10\n(the default)": {},
    "concurrency = 2": {"concurrency": 2},
    "rate = 10": {"rate": 10},
    "rate = 10\nburst = 8": {"rate": 10, "burst": 8},
}
BREAKER: Mapping[str, dict[str, Any]] = {
    "with a breaker": {"breaker": {"enabled": True, "hold": 1, "max": 4}},
    "without": {"breaker": {"enabled": False}},
}
ORDER: Mapping[str, dict[str, Any]] = {"none": {}, "payload.account": {"ordering": "payload.account"}}
#: Which event a delivery of the lane with three lines belongs to.
_EVENTS = "SELECT d.id, e.event_id FROM delivery d JOIN event e ON e.seq = d.event_seq WHERE d.endpoint = 'lines'"

ACCOUNTS = ("A", "B", "C")
RETRY = {"initial": 1.5, "max": 1.5, "jitter": 0, "max_attempts": 10}


def _name(kind: str, n: int) -> str:
    return f"{kind}{n}"


def endpoints(receiver: Receiver) -> dict[str, dict[str, Any]]:
    """Those of all pictures; each has its own lane, so that pictures do not touch each other."""

    def at(name: str, **more: Any) -> dict[str, Any]:
        return {"url": receiver.url(f"/{name}"), "retry": RETRY, **more}

    found = {"warm": at("warm")}
    for kind, rows in (("burst", BURST), ("breaker", BREAKER), ("order", ORDER)):
        found |= {_name(kind, n): at(_name(kind, n), **more) for n, more in enumerate(rows.values())}
    return found | {
        "patience": at("patience", rate=10),
        "lines": at("lines", rate=14),
    }


def bars(calls: Sequence[Call], since: float, label: Callable[[Call], str] = lambda _: "") -> list[Bar]:
    """What a picture shows of `calls`."""
    found = []
    for call in calls:
        failed = call.status is None or call.status >= 300
        found.append(Bar(call.at - since, (call.ended or call.at) - since, failed, label(call)))
    return found


def burst(shared: Site) -> str:
    """Forty events at once."""
    rows = {}
    for n, name in enumerate(BURST):
        lane, path = _name("burst", n), f"/{_name('burst', n)}"
        shared.receiver.answer(path, Answer(delay_s=CALL_S))
        # A lane that was never used, or whose memory was lost, has no credit yet.
        shared.bulk.post(1, f"{lane}.x")
        shared.receiver.wait_for(1, path=path)
        since = time.monotonic() + QUIET_S
        wait_until(lambda since=since: time.monotonic() >= since, what="a quiet lane")
        shared.bulk.post(40, f"{lane}.x")
        shared.receiver.wait_for(41, 30, path=path)
        shared.bulk.wait_done(lane)
        rows[name] = bars(shared.receiver.calls_to(path)[1:], since)
    return draw("Forty events accepted at once, with different caps and rates", rows)


def breaker(shared: Site) -> str:
    """Ten events a second, and a receiver that is gone from the second second to the seventh."""
    since = time.monotonic()

    def answer(_: Call) -> Answer:
        return Answer(status=503 if 2 <= time.monotonic() - since < 7 else 200, delay_s=0.02)

    names = [_name("breaker", n) for n in range(len(BREAKER))]
    for name in names:
        shared.receiver.answer(f"/{name}", answer)
    for n in range(110):
        wait_until(lambda n=n: time.monotonic() >= since + n * 0.1, what="the next event", every=0.005)
        for name in names:
            shared.bulk.post(1, f"{name}.x")
    shared.bulk.wait_done(*names, timeout=40)
    rows = {row: bars(shared.receiver.calls_to(f"/{name}"), since) for row, name in zip(BREAKER, names, strict=True)}
    return draw("A receiver that answers 503 for five seconds, with and without a breaker", rows, away=(2.0, 7.0))


def patience(shared: Site) -> str:
    """The eleventh call is answered 429 with `Retry-After: 3`."""
    since = time.monotonic()
    shared.receiver.answer("/patience", Answer(delay_s=0.03))
    shared.receiver.queue("/patience", *[Answer(delay_s=0.03)] * 10, Answer(status=429, headers={"Retry-After": "3"}))
    shared.bulk.post(40, "patience.x")
    shared.receiver.wait_for(41, 40, path="/patience")
    shared.bulk.wait_done("patience")
    return draw("Retry-After: 3 on the eleventh call", {"rate = 10": bars(shared.receiver.calls_to("/patience"), since)})


def order(shared: Site) -> str:
    """Five events of each of three accounts; the second of B fails twice."""
    rows = {}
    for n, (ordering, _) in enumerate(ORDER.items()):
        name, since, failures = _name("order", n), time.monotonic(), [0]

        def answer(call: Call, failures: list[int]) -> Answer:
            fails = call.json()["payload"] == {"account": "B", "n": 2} and failures[0] < 2
            failures[0] += fails
            return Answer(status=503 if fails else 200, delay_s=CALL_S)

        shared.receiver.answer(f"/{name}", partial(answer, failures=failures))
        for i in range(1, 6):
            for account in ACCOUNTS:
                shared.madeira.post(f"{name}.x", {"account": account, "n": i})
        shared.receiver.wait_for(17, 40, path=f"/{name}")
        shared.bulk.wait_done(name)
        for account in ACCOUNTS:
            calls = [c for c in shared.receiver.calls_to(f"/{name}") if c.json()["payload"]["account"] == account]
            rows[f"{ordering}: {account}"] = bars(calls, since, lambda call: str(call.json()["payload"]["n"]))
    return draw("The second event of account B fails twice, with and without an order", rows)


def lines(shared: Site) -> str:
    """Fresh events, retries and replays that wait in one lane at the same time."""
    madeira, receiver = shared.madeira, shared.receiver
    admin = {"Authorization": f"Bearer {TOKEN}"}
    receiver.answer("/lines", Answer(status=400))
    died = [madeira.post("lines.x") for _ in range(30)]
    receiver.wait_for(30, path="/lines")
    shared.bulk.wait_done("lines")
    held = {"reason": "the picture"}
    assert madeira.http.post("/v1/endpoints/lines/pause", json=held, headers=admin).is_success
    receiver.answer("/lines", Answer(delay_s=0.02))
    receiver.forget()
    retried = {ref.delivery_id for ref in shared.bulk.delay([0.0] * 30, "lines")}
    for event in died:
        answer = madeira.http.post(f"/v1/events/{event}/replay?source=test", json=held, headers=admin)
        assert answer.is_success, answer.text
    for _ in range(60):
        madeira.post("lines.x")
    shared.madeira.http.post("/v1/endpoints/lines/resume", json=held, headers=admin)
    since = time.monotonic()
    shared.bulk.wait_done("lines", timeout=60)
    ids = {row["id"]: row["event_id"] for row in madeira.rows(_EVENTS)}
    again = {ids[delivery] for delivery in retried}
    rows: dict[str, list[Call]] = {"fresh": [], "retries": [], "replays": []}
    for call in receiver.calls_to("/lines"):
        event = call.json()["event_id"]
        rows["retries" if event in again else "replays" if event in died else "fresh"].append(call)
    return draw("Three lines in one lane of 14 calls a second", {k: bars(calls, since) for k, calls in rows.items()})


PICTURES: Mapping[str, Callable[[Site], str]] = {
    "burst": burst,
    "breaker": breaker,
    "retry-after": patience,
    "order": order,
    "lines": lines,
}


def main() -> None:
    """Run everything and write the pictures into a folder."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="madeira-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        folder.chmod(0o711)
        postgres, valkey = EmbeddedPostgres(folder=folder / "postgres"), EmbeddedValkey(folder=folder / "valkey")
        try:
            postgres.start()
            valkey.start()
            migrate(postgres.url_of(postgres.database))
            (folder / "site").mkdir()
            with site(
                folder=folder / "site",
                postgres_url=postgres.url_of("postgres"),
                template_database=postgres.database,
                redis_url=valkey.url,
                endpoints=endpoints,
                threads=24,
            ) as shared:
                shared.bulk.post(40, "warm.x")
                shared.receiver.wait_for(40, 20, path="/warm")
                for name, picture in PICTURES.items():
                    (target / f"{name}.svg").write_text(picture(shared))
                    print(name, flush=True)
        finally:
            valkey.stop()
            postgres.stop()


if __name__ == "__main__":
    main()
