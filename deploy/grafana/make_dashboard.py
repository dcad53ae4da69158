"""Makes ``dashboards/madeira.json``: ``python deploy/grafana/make_dashboard.py``.

A dashboard is much JSON and little to say. What there is to say of each panel (its question, its query, its unit) stands here
in a line or two, and the rest is made of it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dashboards" / "madeira.json"

SOURCE = {"type": "prometheus", "uid": "madeira-prometheus"}

#: 0 while Postgres answers: for a sum over series of which there are none while nothing is to be told, as of dead letters. When
#: it does not answer there is no figure, rather than a good one.
NONE = "0 * max(madeira:queue_oldest_age_seconds:max)"

#: Columns of Grafana's grid.
WIDTH = 24


@dataclass
class Panel:
    """A panel: what it tells, and its queries with their legends."""

    title: str
    about: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    #: Highest value of the axis, where there is one.
    top: float | None = None
    #: Values from which on a figure is orange, and red.
    limits: tuple[float, float] | None = None
    stacked: bool = False


@dataclass
class Row:
    """Panels under a title."""

    title: str
    panels: list[Panel] = field(default_factory=list)


ROWS = [
    Row(
        "At a glance",
        [
            Panel(
                "Stores away",
                "1: an API cannot use it.",
                {"{{store}}": "1 - madeira:store_up:min"},
                kind="stat",
                width=4,
                height=4,
                limits=(0.5, 1),
            ),
            Panel(
                "Workers", "Processes with a sign of life lately.", {"": "madeira:workers:max"}, kind="stat", width=4, height=4
            ),
            Panel(
                "Longest wait",
                "What is due and not done for longest, in either queue.",
                {"": "max(madeira:queue_oldest_age_seconds:max)"},
                "s",
                kind="stat",
                width=4,
                height=4,
                limits=(60, 300),
            ),
            Panel(
                "Unfinished deliveries",
                "Accepted, routed and not ended.",
                {"": f"sum(madeira:deliveries_waiting:max) or {NONE}"},
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                "Dead letters in all",
                "Given up, waiting for a person.",
                {"": f"sum(madeira:dead_letters:max) or {NONE}"},
                kind="stat",
                width=4,
                height=4,
                limits=(1, 100),
            ),
            Panel(
                "Last reconcile",
                "How long ago Postgres and Redis were compared.",
                {"": "madeira:reconcile_age_seconds"},
                "s",
                kind="stat",
                width=4,
                height=4,
                limits=(150, 300),
            ),
        ],
    ),
    Row(
        "Intake",
        [
            Panel(
                "Intake rate",
                "Events taken in per second, by source; a duplicate is one that was there already.",
                {"{{source}} {{outcome}}": 'madeira:ingress:rate5m{source=~"$source", outcome=~"accepted|duplicate"}'},
                "reqps",
            ),
            Panel(
                "Intake failures",
                "Refused per second: bad signatures and bad formats, by source.",
                {"{{source}} {{kind}}": 'madeira:ingress_failures:rate5m{source=~"$source"}'},
                "reqps",
            ),
            Panel(
                "Share of intake that fails",
                "Of all that a source posts.",
                {"{{source}} {{kind}}": 'madeira:ingress_failures:ratio_rate5m{source=~"$source"}'},
                "percentunit",
                top=1,
            ),
            Panel(
                "Time to accept",
                "From the request to the answer, at all APIs.",
                {
                    "p50": "histogram_quantile(0.5, sum by (le) (rate(madeira_ingress_request_duration_seconds_bucket[5m])))",
                    "p99": "histogram_quantile(0.99, sum by (le) (rate(madeira_ingress_request_duration_seconds_bucket[5m])))",
                },
                "s",
            ),
        ],
    ),
    Row(
        "Queues",
        [
            Panel(
                "Queue backlog",
                "Ready, delayed until a later try, and in the hands of a worker.",
                {"{{queue}} {{state}}": "madeira:queue_messages:max"},
                stacked=True,
            ),
            Panel("Oldest that waits", "By queue.", {"{{queue}}": "madeira:queue_oldest_age_seconds:max"}, "s"),
            Panel(
                "Consumption rate",
                "Attempts to deliver per second, by what came of them, at all endpoints.",
                {"{{outcome}}": 'sum by (outcome) (madeira:delivery_attempts:rate5m{endpoint=~"$endpoint"})'},
                "ops",
                stacked=True,
            ),
            Panel(
                "Work of the actors",
                "Messages per second that came to an end.",
                {"{{actor}} {{outcome}}": "madeira:actor_messages:rate5m"},
                "ops",
            ),
        ],
    ),
    Row(
        "Receivers",
        [
            Panel(
                "Delivery success rate",
                "Delivered, as a share of all attempts, by endpoint.",
                {"{{endpoint}}": 'madeira:delivery_success:ratio_rate15m{endpoint=~"$endpoint"}'},
                "percentunit",
                top=1,
            ),
            Panel(
                "Retries per delivery",
                "What ended lately; a rise is the first sign that a receiver is near its limit.",
                {"{{endpoint}}": 'madeira:delivery_retries:mean_rate30m{endpoint=~"$endpoint"}'},
            ),
            Panel(
                "Distribution of retries",
                "Of the deliveries that ended, the share that had needed so many retries, by endpoint.",
                {
                    "{{endpoint}} {{retries}}": 'madeira:delivery_retries:share_rate30m{endpoint=~"$endpoint", retries!="0"}',
                },
                "percentunit",
                top=1,
            ),
            Panel(
                "Unfinished by retries",
                "What waits now, by how many retries it has had.",
                {"{{endpoint}} {{retries}}": 'madeira:deliveries_waiting:max{endpoint=~"$endpoint"}'},
                stacked=True,
            ),
            Panel(
                "Time of a call",
                "How long a receiver takes: half of the calls are shorter, and all but one in a hundred.",
                {
                    f"{{{{endpoint}}}} p{round(q * 100)}": f"histogram_quantile({q}, sum by (endpoint, le) "
                    '(rate(madeira_delivery_attempt_duration_seconds_bucket{endpoint=~"$endpoint"}[5m])))'
                    for q in (0.5, 0.99)
                },
                "s",
            ),
            Panel(
                "From acceptance to success",
                "At all endpoints, retries included.",
                {
                    f"p{round(q * 100)}": f"histogram_quantile({q}, "
                    "sum by (le) (rate(madeira_delivery_latency_seconds_bucket[15m])))"
                    for q in (0.5, 0.95, 0.99)
                },
                "s",
            ),
        ],
    ),
    Row(
        "Dead letters and lanes",
        [
            Panel(
                "Dead letters",
                "What waits for a person, by endpoint.",
                {"{{endpoint}}": 'madeira:dead_letters:max{endpoint=~"$endpoint"}'},
                stacked=True,
            ),
            Panel(
                "Growth of dead letters",
                "Given up within a quarter of an hour, by endpoint and whose fault it was.",
                {"{{endpoint}} {{failure_class}}": 'madeira:dead_letters:increase15m{endpoint=~"$endpoint"}'},
            ),
            Panel(
                "Lanes",
                "Lanes that are not served as ever, by what keeps them: their breaker, a Retry-After, a person.",
                {"{{endpoint}} {{state}}": 'madeira:lane_state:max{endpoint=~"$endpoint", state!="active"} > 0'},
                stacked=True,
            ),
            Panel(
                "Lanes that are served",
                "An endpoint has one, one for callback addresses has one for each host.",
                {"{{endpoint}}": 'madeira:lane_state:max{endpoint=~"$endpoint", state="active"}'},
                stacked=True,
            ),
        ],
    ),
    Row(
        "Inside",
        [
            Panel(
                "Differences found by reconcile",
                "Within a quarter of an hour; they are mended when they are counted.",
                {"{{kind}}": "madeira:reconcile_differences:increase15m"},
                width=8,
            ),
            Panel(
                "Connections of the pools",
                "Open, and how many may be.",
                {
                    "{{job}} {{pool}}": "sum by (job, pool) (madeira_pool_connections)",
                    "{{job}} {{pool}} at most": "sum by (job, pool) (madeira_pool_connections_max)",
                },
                width=8,
            ),
            Panel(
                "Rejected messages",
                "What somebody else put into a queue, or what Dramatiq gave up; of events nothing is ever here.",
                {"{{queue}}": "max by (queue) (madeira_dramatiq_dead_messages)"},
                width=8,
            ),
            Panel(
                "Replica lag",
                "How old what the replica shows is at most; up to two seconds when all is well. Empty without one.",
                {"": "madeira:replica_lag_seconds:max"},
                "s",
                width=8,
            ),
            Panel(
                "Replica in use",
                "1: lists are read there. 0: on the primary, since it is away or more than five seconds behind.",
                {"": "madeira:replica_used:min"},
                width=8,
                top=1,
            ),
            Panel(
                "Spans",
                "Sent to the collector of OpenTelemetry per second, and lost. Empty where traces are off.",
                {"{{outcome}}": "sum by (outcome) (rate(madeira_spans_total[5m]))"},
                "ops",
                width=8,
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": "madeira",
        "title": "Madeira",
        "description": "What comes in, what waits, what goes out, and what was given up.",
        "tags": ["madeira"],
        "schemaVersion": 38,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                _variable("source", "label_values(madeira_ingress_requests_total, source)"),
                _variable("endpoint", "label_values(madeira_delivery_attempts_total, endpoint)"),
            ]
        },
        "panels": _panels(),
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        made.append({"id": len(made) + 1, "type": "row", "title": row.title, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + panel.height
            made.append(_panel(len(made) + 1, panel, x, y))
            x += panel.width
        y += row.panels[-1].height
    return made


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.limits is not None:
        colours = zip(("green", "orange", "red"), (None, *panel.limits), strict=True)
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in colours]}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never", "stacking": stacking}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for n, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
