"""Sends one event with nothing but Python.

URL=http://127.0.0.1:8000 SOURCE=demo SECRET=demo-secret python send_bare.py order-1
"""

import hashlib
import hmac
import json
import os
import sys
import time
import urllib.error
import urllib.request


def send(event: dict[str, object]) -> tuple[int, str]:
    """Post `event`; status and body of the answer. What does not tell a decision is tried again: the event has an id."""
    body = json.dumps(event).encode()
    wait_s = 0.2
    for _ in range(6):
        # Each try is signed anew: a timestamp is good for five minutes.
        now = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "X-Madeira-Source": os.environ["SOURCE"],
            "X-Madeira-Timestamp": now,
            "X-Madeira-Signature": hmac.new(
                os.environ["SECRET"].encode(), now.encode() + b"\n" + body, hashlib.sha256
            ).hexdigest(),
        }
        request = urllib.request.Request(os.environ["URL"] + "/v1/events", body, headers)
        asked_s = 0.0
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            if e.code not in (408, 429) and e.code < 500:
                return e.code, e.read().decode()
            asked_s = float(e.headers.get("Retry-After", "0"))
        except OSError as e:
            print(f"no answer: {e}", file=sys.stderr)
        time.sleep(max(wait_s, asked_s))
        wait_s *= 2
    raise SystemExit("not confirmed; send it again later, with the same event_id")


status, answer = send({"event_id": sys.argv[1], "event_type": "order.created", "payload": {"total": 42}})
print(status, answer)
sys.exit(0 if status in (200, 202) else 1)
