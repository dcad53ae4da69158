"""Whole systems that a Prometheus looks at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from madeira.embedded import free_port
from tests.system.conftest import launch, receiver  # noqa: F401  # fixtures
from tests.system.harness import Madeira, Process, wait_until


@dataclass
class Site:
    """A Madeira whose three kinds of processes all have a page."""

    madeira: Madeira
    api: Process
    worker: Process
    scheduler: Process
    targets: dict[str, int] = field(default_factory=dict)

    def is_served(self, job: str) -> bool:
        """Whether a kind of process has begun to serve its page."""
        try:
            return bool(self.page(job))
        except httpx.TransportError:
            return False

    def page(self, job: str) -> str:
        """The page of a kind of process."""
        port = self.targets[job]
        answer = self.madeira.http.get(f"http://127.0.0.1:{port}/metrics")
        assert answer.status_code == 200
        return answer.text

    def numbers(self, job: str) -> dict[str, float]:
        """The series of a page."""
        lines = (line.rpartition(" ") for line in self.page(job).splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}


Open = Callable[..., Site]


@pytest.fixture
def open_site(launch: Callable[..., Madeira]) -> Open:  # noqa: F811
    """Starts everything, with the given endpoints."""

    def start(endpoints: Mapping[str, Mapping[str, Any]], *, processes: int = 2, config: str = "", **options: Any) -> Site:
        ports = {"madeira-worker": free_port(), "madeira-scheduler": free_port()}
        env = {
            "MADEIRA_METRICS_PORT": str(ports["madeira-worker"]),
            "MADEIRA_SCHEDULER_METRICS_PORT": str(ports["madeira-scheduler"]),
            **options.pop("env", {}),
        }
        madeira = launch(endpoints, env=env, **options)
        if config:
            madeira.configure(madeira.config + config)
        scheduler = madeira.start("scheduler", ["periodiq", "madeira.actors"])
        api = madeira.api(workers=2)
        worker = madeira.worker(processes=processes)
        site = Site(madeira, api, worker, scheduler, {"madeira-api": madeira.port, **ports})
        for job in ports:
            wait_until(lambda job=job: site.is_served(job), 30, what=f"the page of {job}")
        return site

    return start
