"""How much faster a batch brings events in than single posts do: ``python -m benchmarks.batch``. Quote the ratio.

The same API, the same servers (fsync and AOF on), in turns: single posts by 16 clients over kept connections, and batches of
5,000 lines, one after another by one client.
"""

import argparse
import hashlib
import hmac
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.run import ROOT, SECRET, Bench
from madeira.embedded import free_port

#: Clients that post single events.
CLIENTS = 16

#: Lines of a batch.
LINES = 5_000


def singles(port: int, events: int) -> float:
    """Events per second by single posts, from a process of its own."""
    args = [sys.executable, "-m", "benchmarks.load", str(port), str(events), str(CLIENTS), SECRET]
    _, took, bad = subprocess.run(args, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    if int(bad):
        raise SystemExit(f"{bad} of {events} posts were not accepted")
    return events / float(took)


def batches(port: int, events: int) -> float:
    """Events per second by batches; the bodies are made and signed beforehand, as for the single posts."""
    prefix = f"batch{time.time_ns()}"
    bodies = []
    for start in range(0, events, LINES):
        lines = [
            json.dumps(
                {
                    "event_id": f"{prefix}-{n}",
                    "event_type": f"bench{n % 4}.event",
                    "payload": {"amount": n, "currency": "EUR", "note": "benchmark"},
                }
            )
            for n in range(start, min(start + LINES, events))
        ]
        bodies.append("\n".join(lines).encode())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    accepted = 0
    begun = time.monotonic()
    for body in bodies:
        stamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/x-ndjson",
            "X-Madeira-Source": "bench",
            "X-Madeira-Timestamp": stamp,
            "X-Madeira-Signature": hmac.new(SECRET.encode(), stamp.encode() + b"\n" + body, hashlib.sha256).hexdigest(),
        }
        connection.request("POST", "/v1/events/batch", body, headers)
        accepted += json.loads(connection.getresponse().read())["accepted"]
    took = time.monotonic() - begun
    connection.close()
    if accepted != events:
        raise SystemExit(f"{accepted} of {events} events were accepted")
    return events / took


def main() -> None:
    """Run both in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000, help="events of each kind in each round")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is done; they take turns")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="madeira-bench-"))
    folder.chmod(0o711)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        bench = Bench(folder, args.events, 2, 24, stack)
        port = free_port()
        with bench.api(port):
            singles(port, 500)
            pairs = [(singles(port, args.events), batches(port, args.events)) for _ in range(args.rounds)]
    for name, values in (("single posts, 16 clients", [a for a, _ in pairs]), ("batches of 5,000 lines", [b for _, b in pairs])):
        print(f"{name:<40}{statistics.median(values):>10,.0f}/s")
    ratios = [b / a for a, b in pairs]
    print(f"{'batches / single posts':<40}{statistics.median(ratios):>10.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
