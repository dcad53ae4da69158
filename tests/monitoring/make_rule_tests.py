"""Makes `alerts.yml`, what `promtool test rules` runs: for each alert series under which it fires, and others under which not.

Run as `python -m tests.monitoring.make_rule_tests`. The annotations that are expected are those of the rules, filled in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
RULES = FOLDER.parents[1] / "deploy" / "prometheus" / "rules"

API, WORKER = 'instance="api:8000",job="madeira-api"', 'instance="worker:9191",job="madeira-worker"'
SCHEDULER = 'instance="scheduler:9192",job="madeira-scheduler"'


@dataclass
class Case:
    """One test: `series` by name, and what fires `at` that time; `alert` must not when `fires` is empty."""

    alert: str
    about: str
    at: str
    series: Mapping[str, str]
    #: The labels of each alert that fires, and what its summary says instead of a value.
    fires: list[Mapping[str, str]] = field(default_factory=list)
    values: list[Mapping[str, str]] = field(default_factory=list)


def attempts(endpoint: str, good: str, bad: str) -> dict[str, str]:
    """The attempts of an endpoint, over two workers' pages."""
    name = "madeira_delivery_attempts_total"
    return {
        f'{name}{{endpoint="{endpoint}",outcome="succeeded",{WORKER}}}': good,
        f'{name}{{endpoint="{endpoint}",outcome="retryable",{WORKER}}}': bad,
    }


def retries(endpoint: str, total: str, count: str) -> dict[str, str]:
    """How many retries deliveries had needed, in sum."""
    return {
        f'madeira_delivery_retries_sum{{endpoint="{endpoint}",{WORKER}}}': total,
        f'madeira_delivery_retries_count{{endpoint="{endpoint}",{WORKER}}}': count,
    }


def posts(source: str, **outcomes: str) -> dict[str, str]:
    """The posts of a source, by outcome."""
    return {f'madeira_ingress_requests_total{{outcome="{o}",source="{source}",{API}}}': n for o, n in outcomes.items()}


AGE = f'madeira_queue_oldest_age_seconds{{queue="deliver",{API}}}'
TICKS = f'madeira_scheduler_ticks_total{{actor="reconcile",{SCHEDULER}}}'
LAST = f"madeira_reconcile_last_success_timestamp_seconds{{{API}}}"
FOUND = f'madeira_reconcile_differences_total{{kind="delivery_not_queued",{WORKER}}}'
CANCELLED = f'madeira_reconcile_differences_total{{kind="abandoned",{WORKER}}}'
SPANS = f'madeira_spans_total{{{{outcome="{{}}",{WORKER}}}}}'
DEAD = f'madeira_dead_letters_total{{endpoint="shop",failure_class="receiver",{WORKER}}}'


def lane(state: str, values: str, endpoint: str = "shop") -> dict[str, str]:
    """The lane of an endpoint, as two APIs tell of it."""
    labels = f'endpoint="{endpoint}",state="{state}"'
    return {f'madeira_lane_state{{{labels},instance="api{n}:8000",job="madeira-api"}}': values for n in (1, 2)}


def replica(used: str, api: int = 1) -> dict[str, str]:
    """Whether an API reads lists on the replica."""
    return {f'madeira_replica_used{{instance="api{api}:8000",job="madeira-api"}}': used.strip()}


def store(name: str, up: str, api: int = 1) -> dict[str, str]:
    """Whether an API can use a store."""
    return {f'madeira_store_up{{instance="api{api}:8000",job="madeira-api",store="{name}"}}': up.strip()}


def lacks(metric: str, missing: str, api: int = 1) -> dict[str, str]:
    """Whether the page of an API lacks a metric."""
    return {f'madeira_numbers_missing{{instance="api{api}:8000",job="madeira-api",metric="{metric}"}}': missing.strip()}


#: Both stores are there.
UP_BOTH = store("postgres", "1x90", 3) | store("redis", "1x90", 3)

#: No worker, where it can be told at all: each other minute.
GAPS = " 0 stale" * 10


CASES = [
    Case("MadeiraApiMissing", "the API is down", "10m", {f"up{{{API}}}": "1 1 0x20"}, [{}]),
    Case(
        "MadeiraApiMissing", "one of two is down", "10m", {f"up{{{API}}}": "0x20", 'up{instance="b",job="madeira-api"}': "1x20"}
    ),
    Case("MadeiraStoreAway", "Redis is, and nobody posts", "10m", UP_BOTH | store("redis", "1x3 0x20"), [{"store": "redis"}]),
    Case("MadeiraStoreAway", "Postgres is", "10m", UP_BOTH | store("postgres", "1x3 0x20"), [{"store": "postgres"}]),
    Case(
        "MadeiraStoreAway", "for one of two APIs", "10m", store("redis", "1x20") | store("redis", "0x20", 2), [{"store": "redis"}]
    ),
    Case("MadeiraStoreAway", "it comes and goes", "16m", store("redis", "1 0 0 0 " * 8), [{"store": "redis"}]),
    Case("MadeiraStoreAway", "it was restarted", "6m", store("redis", "1x4 0 1x20")),
    Case("MadeiraStoreAway", "both are there", "10m", UP_BOTH),
    Case("MadeiraWorkersMissing", "the last worker is gone", "10m", {f"madeira_workers{{{API}}}": "4 4 0x20"}, [{}]),
    Case(
        "MadeiraWorkersMissing",
        "it is, and now and then nobody can tell",
        "10m",
        {f"madeira_workers{{{API}}}": "4 4" + GAPS},
        [{}],
    ),
    Case("MadeiraWorkersMissing", "one of four is left", "10m", {f"madeira_workers{{{API}}}": "4 4 1x20"}),
    Case("MadeiraSchedulerMissing", "it is down", "15m", {f"up{{{SCHEDULER}}}": "0x30", TICKS: "1 2 3 _x30"}, [{}]),
    Case("MadeiraSchedulerMissing", "it stands still", "25m", {f"up{{{SCHEDULER}}}": "1x30", TICKS: "0+1x9 9x30"}, [{}]),
    Case("MadeiraSchedulerMissing", "it has never ticked", "15m", {f"up{{{SCHEDULER}}}": "1x30"}, [{}]),
    Case("MadeiraSchedulerMissing", "it comes and goes, and never ticks", "15m", {f"up{{{SCHEDULER}}}": "1 0 " * 15}, [{}]),
    Case("MadeiraSchedulerMissing", "it ticks", "15m", {f"up{{{SCHEDULER}}}": "1x30", TICKS: "0+1x30"}),
    Case("MadeiraSchedulerMissing", "it was started anew", "15m", {f"up{{{SCHEDULER}}}": "1x30", TICKS: "5 6 7 0+1x30"}),
    Case(
        "MadeiraWaitsTooLong",
        "what is oldest gets older",
        "20m",
        {AGE: "0+60x30"},
        [{"queue": "deliver"}],
        [{"{{ $value | humanizeDuration }}": "20m 0s"}],
    ),
    Case(
        "MadeiraWaitsTooLong",
        "now and then nobody can tell how old what is oldest is",
        "20m",
        {AGE: "0+60x8 stale 600 stale stale 780 stale 900 stale stale 1080 stale 1200"},
        [{"queue": "deliver"}],
        [{"{{ $value | humanizeDuration }}": "20m 0s"}],
    ),
    Case("MadeiraWaitsTooLong", "it was late for a moment", "20m", {AGE: "0 60 900 900 0x30"}),
    Case(
        "MadeiraDeadLettersGrow",
        "a dozen within a quarter of an hour",
        "20m",
        {DEAD: "0x10 0+2x6 12x20"},
        [{"endpoint": "shop"}],
        [{"{{ $value | humanize }}": "12"}],
    ),
    Case("MadeiraDeadLettersGrow", "one, and many long ago", "60m", {DEAD: "0+10x5 50x40 51x30"}),
    Case("MadeiraDeadLettersGrow", "a worker was started anew, and nobody died", "20m", {DEAD: "20x10 0x30"}),
    Case(
        "MadeiraSuccessLow",
        "half of one endpoint's, none of the other's",
        "30m",
        attempts("shop", "0+10x60", "0+10x60") | attempts("bank", "0+10x60", "0x60"),
        [{"endpoint": "shop"}],
        [{"{{ $value | humanizePercentage }}": "50%"}],
    ),
    Case("MadeiraSuccessLow", "few attempts say little", "60m", attempts("shop", "0x60", "0x45 1x20")),
    Case("MadeiraSuccessLow", "nothing is sent at all", "60m", attempts("shop", "5x60", "5x60")),
    Case(
        "MadeiraRetriesRise",
        "ten times as many as an hour ago, at one endpoint",
        "180m",
        retries("shop", "0+1x120 120+10x80", "0+10x200") | retries("bank", "0+1x200", "0+10x200"),
        [{"endpoint": "shop"}],
        [{"{{ $value | humanize }}": "1"}],
    ),
    Case("MadeiraRetriesRise", "always as many", "180m", retries("shop", "0+10x200", "0+10x200")),
    Case("MadeiraRetriesRise", "more, and still few", "180m", retries("shop", "0x120 0+1x80", "0+10x200")),
    Case(
        "MadeiraNothingEnds",
        "all that are tried are to be tried again, at one endpoint",
        "180m",
        attempts("shop", "9x200", "0x120 0+1x80")
        | retries("shop", "5x200", "9x200")
        | attempts("bank", "0+1x200", "0+1x200")
        | retries("bank", "0+1x200", "0+1x200"),
        [{"endpoint": "shop"}],
        [{"{{ $value | humanize }}": "30"}],
    ),
    Case("MadeiraNothingEnds", "all die", "180m", attempts("shop", "0x200", "0+1x200") | retries("shop", "0+9x200", "0+1x200")),
    Case(
        "MadeiraNothingEnds",
        "few attempts say little",
        "180m",
        attempts("shop", "0x200", "0x170 4x30") | retries("shop", "0x200", "0x200"),
    ),
    Case(
        "MadeiraNothingEnds", "nothing is tried", "180m", attempts("shop", "9x200", "9x200") | retries("shop", "5x200", "9x200")
    ),
    Case(
        "MadeiraBreakerOpen",
        "it opens and tries, in turn",
        "20m",
        lane("open", "1 0 1 1 0 1x30") | lane("half_open", "0 1 0 0 1 0x30"),
        [{"endpoint": "shop"}],
    ),
    Case(
        "MadeiraBreakerOpen",
        "it is, and now and then nobody can tell",
        "20m",
        lane("open", "1" + " stale 1" * 15),
        [{"endpoint": "shop"}],
    ),
    Case("MadeiraBreakerOpen", "it was open for two minutes", "20m", lane("open", "0 1 1 0x30") | lane("active", "1 0 0 1x30")),
    Case("MadeiraReconcileStale", "it last ran at the beginning", "20m", {LAST: "0x30"}, [{}]),
    Case("MadeiraReconcileStale", "it never ran", "20m", {f"up{{{API}}}": "1x30"}, [{}]),
    Case("MadeiraReconcileStale", "it runs each minute", "20m", {LAST: "0+60x30"}),
    Case("MadeiraReconcileStale", "the API could not ask for a while", "20m", {LAST: "0+60x16 _x3 1140"}),
    Case(
        "MadeiraReconcileFinds",
        "something every few minutes",
        "40m",
        {FOUND: "0 1 1 1 2 2 2 3 3 3 4 4 4 5 5 5 6 6 6 7 7 7 8 8 8 9 9 9 10 10 10 11 11 11 12 12 12 13 13 13 14 14 14"},
        [{"kind": "delivery_not_queued"}],
    ),
    Case("MadeiraReconcileFinds", "once, after a crash", "40m", {FOUND: "0 0 0 50x60"}),
    Case("MadeiraReconcileFinds", "what people cancelled", "40m", {CANCELLED: "0+1x60"}),
    Case(
        "MadeiraIntakeSignatures",
        "every fifth of one source",
        "20m",
        posts("shop", accepted="0+80x30", unauthorized="0+20x30") | posts("bank", accepted="0+80x30", unauthorized="0x30"),
        [{"source": "shop", "kind": "signature"}],
        [{"{{ $value | humanizePercentage }}": "20%"}],
    ),
    Case("MadeiraIntakeSignatures", "strangers", "20m", posts("unknown", unauthorized="0+20x30")),
    Case("MadeiraIntakeSignatures", "one in a hundred", "20m", posts("shop", accepted="0+99x30", unauthorized="0+1x30")),
    Case(
        "MadeiraIntakeFormats",
        "every fifth, in two ways",
        "20m",
        posts("shop", accepted="0+80x30", malformed="0+10x30", invalid="0+10x30"),
        [{"source": "shop", "kind": "format"}],
        [{"{{ $value | humanizePercentage }}": "20%"}],
    ),
    Case(
        "MadeiraIntakeFormats", "duplicates and conflicts are none", "20m", posts("shop", duplicate="0+80x30", conflict="0+9x30")
    ),
    Case(
        "MadeiraIntakeFails",
        "Postgres is away",
        "20m",
        posts("shop", accepted="0+80x30", unavailable="0x10 0+10x30"),
        [{"outcome": "unavailable"}],
    ),
    Case(
        "MadeiraIntakeFails", "it was away, an hour ago", "80m", posts("shop", accepted="0+80x90", unavailable="0+10x10 100x90")
    ),
    Case("MadeiraReplicaUnused", "one of two APIs does without it", "25m", replica("1x5 0x30") | replica("1x40", 2), [{}]),
    Case("MadeiraReplicaUnused", "it comes and goes, and is gone for longer", "40m", replica("1 0 0 " * 20), [{}]),
    Case("MadeiraReplicaUnused", "it was restarted", "25m", replica("1x9 0 0 0 1x30")),
    Case("MadeiraReplicaUnused", "there is none", "25m", {f"up{{{API}}}": "1x30"}),
    Case("MadeiraSpansLost", "the collector is away", "20m", {SPANS.format("lost"): "0x10 0+10x30"}, [{}]),
    Case("MadeiraSpansLost", "it takes them", "20m", {SPANS.format("lost"): "7x40", SPANS.format("exported"): "0+10x40"}),
    Case("MadeiraNumbersMissing", "by no API", "20m", UP_BOTH | lacks("workers", "0 1x30"), [{"metric": "workers"}]),
    Case("MadeiraNumbersMissing", "another API can", "20m", UP_BOTH | lacks("workers", "1x30") | lacks("workers", "0x30", 2)),
    Case("MadeiraNumbersMissing", "now and then", "20m", UP_BOTH | lacks("workers", "1 1 1 0 " * 10)),
    Case("MadeiraNumbersMissing", "no alert goes by it", "20m", UP_BOTH | lacks("deliveries_waiting", "1x30")),
    Case("MadeiraNumbersMissing", "for a store is away", "20m", store("redis", "0x30") | lacks("workers", "1x30")),
    Case(
        "MadeiraNumbersInMemory",
        "of two worker processes",
        "10m",
        {f"madeira_numbers_in_memory{{{WORKER}}}": "0 2x20", f"madeira_numbers_in_memory{{{API}}}": "0x20"},
        [{"job": "madeira-worker", "instance": "worker:9191"}],
        [{"{{ $value | humanize }}": "2"}],
    ),
    Case("MadeiraNumbersInMemory", "it was started anew", "10m", {f"madeira_numbers_in_memory{{{WORKER}}}": "1 1 1 0x20"}),
    Case(
        "MadeiraTargetMissing",
        "of workers, and of one of two APIs",
        "10m",
        {f"up{{{WORKER}}}": "1 0x20", f"up{{{API}}}": "0x20", 'up{instance="b",job="madeira-api"}': "1x20"},
        [{"job": "madeira-api", "instance": "api:8000"}, {"job": "madeira-worker", "instance": "worker:9191"}],
    ),
    Case(
        "MadeiraTargetMissing",
        "nobody has told Prometheus of the workers",
        "10m",
        {f"madeira_workers{{{API}}}": "4x20", f"up{{{API}}}": "1x20"},
        [{"job": "madeira-worker", "instance": "any address"}],
    ),
    Case("MadeiraTargetMissing", "there are no workers", "10m", {f"madeira_workers{{{API}}}": "0x20", f"up{{{API}}}": "1x20"}),
    Case("MadeiraTargetMissing", "all are read but for some minutes", "10m", {f"up{{{WORKER}}}": "1 1 0 0 0 1x20"}),
    Case("MadeiraTargetMissing", "another job's", "10m", {'up{instance="db:9187",job="postgres"}': "0x20"}),
]


def rules_of(name: str) -> list[Any]:
    """The groups of a file of rules."""
    groups: list[Any] = yaml.safe_load((RULES / f"{name}.yml").read_text())["groups"]
    return groups


def made() -> str:
    """The file."""
    rules = {rule["alert"]: rule for group in rules_of("alerts") for rule in group["rules"]}
    tests = [_test(case, rules[case.alert]) for case in CASES]
    document = {
        "rule_files": ["../../deploy/prometheus/rules/recording.yml", "../../deploy/prometheus/rules/alerts.yml"],
        "evaluation_interval": "1m",
        "group_eval_order": [group["name"] for file in ("recording", "alerts") for group in rules_of(file)],
        "tests": tests,
    }
    head = "# Made by `python -m tests.monitoring.make_rule_tests`.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=130)


def _test(case: Case, rule: Mapping[str, Any]) -> dict[str, Any]:
    values = case.values or [{}] * len(case.fires)
    expected = [
        {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": _filled(rule["annotations"], labels, value)}
        for labels, value in zip(case.fires, values, strict=True)
    ]
    return {
        "name": f"{case.alert}: {case.about}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}],
    }


def _filled(annotations: Mapping[str, str], labels: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    filled = {}
    for name, text in annotations.items():
        for label, value in labels.items():
            text = text.replace("{{ $labels." + label + " }}", value)
        for place, value in values.items():
            text = text.replace(place, value)
        filled[name] = text
    return filled


if __name__ == "__main__":
    (FOLDER / "alerts.yml").write_text(made())
