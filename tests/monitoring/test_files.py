"""What Prometheus and Grafana are given names only what there is: metrics, rules, entries of the runbook."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from madeira import metrics
from madeira.settings import Settings
from tests.monitoring import make_rule_tests

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES_AND_CONFIG = DEPLOY / "prometheus"
PAGE = ROOT / "docs" / "monitoring.md"
BEGIN, END = "<!-- metrics: made by `python -m tests.monitoring.test_files` -->\n", "<!-- end of metrics -->\n"

#: What a series of a metric may have behind the metric's name.
ENDINGS = ("", "_total", "_bucket", "_sum", "_count")


def rules() -> Iterator[dict[str, Any]]:
    """All rules."""
    for file in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml")):
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from group["rules"]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
PANELS = [p for p in json.loads((DEPLOY / "grafana" / "dashboards" / "madeira.json").read_text())["panels"] if p["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def described() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Every metric as it is called on a page, with its labels and what it is."""
    found = {}
    for metric in vars(metrics).values():
        if isinstance(metric, metrics.Snapshot):
            found[metric.name] = (metric.name, metric.labels, metric.documentation)
        elif type(metric).__name__ in ("Counter", "Gauge", "Histogram") and type(metric).__module__.startswith("prometheus"):
            ending = "_total" if type(metric).__name__ == "Counter" else ""
            found[metric._name + ending] = (metric._name + ending, metric._labelnames, metric._documentation)
    return found


def table() -> str:
    """The rows of the table of metrics."""
    return "".join(
        f"| `{name.removeprefix('madeira_')}` | {', '.join(f'`{label}`' for label in labels)} | {text} |\n"
        for name, labels, text in sorted(described().values())
    )


def page() -> str:
    """The page with its table made anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def names_in(query: str) -> set[str]:
    """The metrics and recorded series that a query names."""
    return set(re.findall(r"\bmadeira[_:][a-z0-9_:]*", re.sub(r'"[^"]*"', "", query)))


def is_known(name: str) -> bool:
    """Whether there is such a series."""
    known = described()
    bare = {name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)}
    return name in RECORDED or name in known or any(b in known for b in bare if not name.endswith("_total"))


def test_the_page_names_every_metric() -> None:
    """The table cannot lag behind: `python -m tests.monitoring.test_files` makes it anew."""
    assert PAGE.read_text() == page()


def test_every_metric_that_a_page_must_have_is_there() -> None:
    """By name, with its labels."""
    wanted = {
        "ingress_requests_total": {"source", "outcome"},
        "ingress_request_duration_seconds": set(),
        "queue_messages": {"queue", "state"},
        "queue_oldest_age_seconds": {"queue"},
        "actor_messages_total": {"actor", "outcome"},
        "actor_duration_seconds": {"actor"},
        "delivery_attempts_total": {"endpoint", "outcome"},
        "delivery_attempt_duration_seconds": {"endpoint"},
        "deliveries_settled_total": {"endpoint", "status"},
        "delivery_retries": {"endpoint"},
        "deliveries_waiting": {"endpoint", "retries"},
        "dead_letters_total": {"endpoint", "failure_class"},
        "dead_letters": {"endpoint"},
        "delivery_latency_seconds": set(),
        "lane_state": {"endpoint", "state"},
        "reconcile_differences_total": {"kind"},
        "reconcile_last_success_timestamp_seconds": set(),
        "pool_connections": {"pool"},
        "dramatiq_dead_messages": {"queue"},
        "scheduler_ticks_total": {"actor"},
        "workers": set(),
    }
    there = {name.removeprefix("madeira_"): set(labels) for name, labels, _ in described().values()}
    assert {name: there.get(name) for name in wanted} == wanted
    ours = {metric.name for metric in REGISTRY.collect() if metric.name.startswith("madeira_")}
    assert ours <= {name.removesuffix("_total") for name in described()}


@pytest.mark.parametrize("rule", list(rules()), ids=lambda rule: str(rule.get("alert") or rule["record"]))
def test_a_rule_names_only_series_that_there_are(rule: dict[str, Any]) -> None:
    """A misspelt name would make an alert that never fires."""
    names = names_in(rule["expr"]) | (set() if "up{" not in rule["expr"] else {"madeira_workers"})
    assert names
    assert {name for name in names if not is_known(name)} == set()


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{n}-{title}" for n, (title, _) in enumerate(QUERIES)])
def test_a_panel_names_only_series_that_there_are(title: str, query: str) -> None:
    """And has a source that is provisioned."""
    assert names_in(query)
    assert {name for name in names_in(query) if not is_known(name)} == set()


def test_a_name_that_is_wrong_is_found_wrong() -> None:
    """The checks above can fail."""
    assert not is_known("madeira_delivery_attempt_total")
    assert not is_known("madeira_dead_letters_bucket_total")
    assert not is_known("madeira:queue_messages:sum")
    assert is_known("madeira_delivery_retries_bucket")


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_is_wrong_and_leads_to_its_entry(alert: str) -> None:
    """In plain words, and to a heading of the runbook that bears its name."""
    notes = ALERTS[alert]["annotations"]
    assert notes["runbook"] == f"docs/operations.md#{alert.lower()}"
    assert f"\n### {alert}\n" in (ROOT / "docs" / "operations.md").read_text()
    assert notes["summary"].endswith(".")
    assert ALERTS[alert]["labels"]["severity"] in ("critical", "warning")


def test_no_entry_is_about_an_alert_that_there_is_not() -> None:
    """What was removed from the rules is removed from the runbook."""
    assert set(re.findall(r"^### (Madeira\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)) == set(ALERTS)


def test_each_alert_is_tried_firing_and_not_firing() -> None:
    """By series that are made for it; the file of them is made from the cases."""
    assert (ROOT / "tests" / "monitoring" / "alerts.yml").read_text() == make_rule_tests.made()
    for alert in ALERTS:
        assert {bool(case.fires) for case in make_rule_tests.CASES if case.alert == alert} == {True, False}, alert


def test_the_dashboard_is_what_its_script_makes() -> None:
    """Nobody changed it by hand, and it has its ids once."""
    code = f"import runpy; print(runpy.run_path({str(DEPLOY / 'grafana' / 'make_dashboard.py')!r})['text'](), end='')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    assert made == (DEPLOY / "grafana" / "dashboards" / "madeira.json").read_text()
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)


def test_panels_do_not_cover_each_other() -> None:
    """Each place of the grid is taken once, and none beyond its width."""
    taken = [
        (x, y)
        for at in (panel["gridPos"] for panel in PANELS)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24


def test_grafana_is_given_the_source_that_the_panels_ask() -> None:
    """By its uid, and the folder that holds the dashboard."""
    provisioning = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "madeira.yml").read_text())["datasources"]
    asked = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert asked == {source["uid"]}
    [provider] = yaml.safe_load((provisioning / "dashboards" / "madeira.yml").read_text())["providers"]
    mounts = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in mounts


def test_prometheus_asks_at_the_ports_that_the_settings_have() -> None:
    """Each kind of process once, by the names of its services."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    asked = {(job["job_name"], *dns["names"], dns["port"]) for job in config["scrape_configs"] for dns in job["dns_sd_configs"]}
    s = Settings()
    assert asked == {
        ("madeira-api", "api", s.port),
        ("madeira-worker", "worker", "worker-deliver", "worker-route", "worker-house", s.metrics_port),
        ("madeira-scheduler", "scheduler", s.scheduler_metrics_port),
    }
    files = [file for glob in config["rule_files"] for file in (DEPLOY / "prometheus").glob(glob)]
    assert len(files) == 2


if __name__ == "__main__":
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ
    PAGE.write_text(page())
