"""Sends events with Madeira's Python client: one, and then many.

URL=http://127.0.0.1:8000 SOURCE=demo SECRET=demo-secret python send.py order-1
"""

import os
import sys

from madeira.client import Client, Event

order = sys.argv[1]
with Client(os.environ["URL"], source=os.environ["SOURCE"], secret=os.environ["SECRET"]) as client:
    receipt = client.send("order.created", {"total": 42}, event_id=order)
    print(f"{receipt.event_id}: {receipt.status}{', known before' if receipt.duplicate else ''}")

    lines = (Event(event_type="order.line", payload={"line": n}, event_id=f"{order}-{n}") for n in range(3000))
    summary = client.send_many(lines)
    print(f"{summary.accepted} accepted, {summary.duplicates} known before, {len(summary.rejected)} refused")
    for rejected in summary.rejected:
        print(f"{rejected.event_id}: {rejected.type}: {rejected.detail}", file=sys.stderr)
