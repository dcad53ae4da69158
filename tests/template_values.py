"""An event as templates and expressions see it, each part of which a test may change."""

from datetime import UTC, datetime
from typing import Any

from madeira.event_values import EventValues
from madeira.records import RoutableEvent

PAYLOAD = (
    '{"big": 12345678901234567890, "real": 1.0, "cents": 1.10, "exp": 1E+2, "zero": -0, "neg": -1.50, "text": "<a & \\"b\\">", '
    '"accent": "Z\\u00fcrich", "half": "\\ud800", "none": null, "yes": true, "list": [3, 1.0, 2], "items": '
    '[{"sku": "x", "n": 2}, {"sku": "y", "n": 3.50}], "object": {"a": {"b": "c"}}, "lines": "a\\r\\nX-Evil: 1", "nul": "\\u0000"}'
)

PARAMETERS = (
    '{"account": "a/b c", "dots": "..", "path": "x/y", "up": "x/../y", "encoded": "%2e%2e", "list": ["a", "b/c"], "empty": "", '
    '"object": {}, "none": null, "cents": 1.10, "yes": true, "hash": "a#b", "host": "@evil.example/", "accent": "\\u00fc", '
    '"half": "\\ud800", "back": "..\\\\x", "nested": {"deep": [10, {"er": "z"}]}, "space": " "}'
)


def values(payload: str = PAYLOAD, parameters: str | None = PARAMETERS, **fields: Any) -> EventValues:
    known: dict[str, Any] = {
        "source": "billing",
        "event_id": "evt-1",
        "event_type": "payment.done",
        "routing_key": None,
        "target_uri": "https://back.example/cb?x=1",
        "trace_id": "trace-1",
        "created_at": datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
        **fields,
    }
    return EventValues(RoutableEvent(seq=1, payload=payload, parameters=parameters, **known))


VALUES = values()
