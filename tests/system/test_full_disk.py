"""All processes beside a disk that is full: their numbers need it, their work does not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from madeira.embedded import free_port
from tests.disks import fill, mounted
from tests.receiver import Receiver
from tests.system.conftest import Launch
from tests.system.harness import Process, wait_until


@pytest.fixture
def disk() -> Iterator[Path]:
    """As small as no deployment has it."""
    with mounted("size=8m") as folder:
        yield folder


def lines(process: Process, event: str) -> list[dict[str, Any]]:
    """What a process, or its children, logged under this key."""
    found = [json.loads(line) for line in process.tail(10**7).splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_events_are_accepted_and_delivered_by_processes_that_live_on(
    launch: Launch, receiver: Receiver, disk: Path, when: str
) -> None:
    """All parts, whether the disk was full at their start or becomes it; each says so, and with room a restart mends it."""
    ports = {"MADEIRA_METRICS_PORT": str(free_port()), "MADEIRA_SCHEDULER_METRICS_PORT": str(free_port())}
    env = {"MADEIRA_DATA_DIR": str(disk / "data"), "MADEIRA_LOG_FORMAT": "json", **ports}
    endpoints = {f"e{n:03}": {"url": receiver.url("/a")} for n in range(100)}
    madeira = launch(endpoints, env=env)
    filling = fill(disk) if when == "before" else None
    api, worker = madeira.api(workers=2), madeira.worker(processes=2)
    scheduler = madeira.start("scheduler", ["periodiq", "-v", "madeira.actors"])
    wait_until(lambda: "Registered periodic actors" in scheduler.tail(), what="the start of the scheduler")
    parts = [api, worker, scheduler]
    children = [part.children() for part in parts]
    filling = filling or fill(disk)
    madeira.post_many(20)
    madeira.wait_all()
    assert madeira.http.get("/metrics").status_code == 200
    assert [part.children() for part in parts] == children
    if when == "before":
        # gunicorn's master says it for the processes that it forks; Dramatiq's load all by themselves.
        told = [[line["errno"] for line in lines(part, "metrics.kept_in_memory")] for part in parts]
        assert told == [["ENOSPC"], ["ENOSPC"] * 2, ["ENOSPC"]]

    filling.unlink()
    api.stop()
    madeira.api(workers=1)
    madeira.post()
    page = madeira.http.get("/metrics").text
    assert 'madeira_ingress_requests_total{outcome="accepted",source="test"} 1.0' in page
