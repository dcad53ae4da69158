"""A real Prometheus of one test, on a port of its own, with the rules that are shipped."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from madeira.embedded import free_port
from tests.system.harness import wait_until

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"

#: What a minute of the rules is in a test, in milliseconds.
MINUTE_MS = 1000

_UNITS = {"s": 1 / 60, "m": 1, "h": 60, "d": 1440}

Rewrite = Callable[[str], str]


def program(name: str) -> str:
    """The path of one of Prometheus' programs; without it a test is skipped and says why."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"the program {name} is not installed; on Debian: apt-get install prometheus")
    return found


def scaled(text: str) -> str:
    """Rules whose minutes are seconds: times of series, of alerts, and the seconds that alerts compare with."""

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{round(int(found[2]) * _UNITS[found[3]] * MINUTE_MS)}ms"

    text = re.sub(r"(\[|for: |offset )(\d+)([smhd])\b", shorter, text)
    return re.sub(r"(seconds\S* > )300\b", rf"\g<1>{300 * MINUTE_MS // 60_000}", text)


def since_start(query: str) -> str:
    """Rules or a query that count since the beginning instead of over some minutes: exact, whatever the time of a scrape."""
    return re.sub(r"\b(?:rate|increase)\(([^()\[\]]+)\[\w+\]\)", r"(\1)", query)


class Prometheus:
    """A running server that scrapes each `period_ms`, and waits so long for a page; `targets` are ports by the names of jobs."""

    def __init__(self, *, folder: Path, targets: Mapping[str, int], rewrite: Rewrite, period_ms: int = 500) -> None:
        self.port = free_port()
        self.log = folder / "prometheus.log"
        (folder / "rules").mkdir(parents=True)
        for file in RULES.glob("*.yml"):
            (folder / "rules" / file.name).write_text(rewrite(file.read_text()))
        jobs = [{"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for name, port in targets.items()]
        config = {
            "global": {"scrape_interval": f"{period_ms}ms", "scrape_timeout": f"{period_ms}ms", "evaluation_interval": "500ms"},
            "rule_files": ["rules/*.yml"],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)
        wait_until(self._is_ready, 30, what="the start of Prometheus")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> dict[frozenset[tuple[str, str]], float]:
        """What an expression is at this moment, by labels (the metric's name aside)."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        return {_labels(one["metric"]): float(one["value"][1]) for one in answer["data"]["result"]}

    def firing(self) -> dict[str, list[dict[str, Any]]]:
        """The alerts that fire, by name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in self._http.get("/api/v1/alerts").json()["data"]["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their health."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def close(self) -> None:
        """Stop it."""
        self._http.close()
        self._process.terminate()
        self._process.wait(20)


def _labels(metric: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in metric.items() if name != "__name__")


@contextlib.contextmanager
def scraping(**options: Any) -> Iterator[Prometheus]:
    """A Prometheus that ends with the block; its log is shown when the block fails."""
    prometheus = Prometheus(**options)
    try:
        yield prometheus
    except BaseException:
        print(prometheus.log.read_text()[-4000:])
        raise
    finally:
        prometheus.close()
