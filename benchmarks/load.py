"""A load generator that costs little: signed POSTs over kept connections, made beforehand, from a process of its own.

``python -m benchmarks.load PORT COUNT CONNECTIONS SECRET [PREFIX]`` prints the seconds that it took and how many answers
were no 202.
"""

import asyncio
import hashlib
import hmac
import json
import sys
import time


def requests(count: int, secret: str, prefix: str) -> list[bytes]:
    """Signed requests for `count` events over four types."""
    made = []
    for n in range(count):
        payload = {"amount": n, "currency": "EUR", "note": "benchmark"}
        body = json.dumps({"event_id": f"{prefix}-{n}", "event_type": f"bench{n % 4}.event", "payload": payload}).encode()
        stamp = str(int(time.time()))
        mac = hmac.new(secret.encode(), stamp.encode() + b"\n" + body, hashlib.sha256).hexdigest()
        head = (
            "POST /v1/events HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nX-Madeira-Source: bench\r\n"
            f"X-Madeira-Timestamp: {stamp}\r\nX-Madeira-Signature: {mac}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


async def client(port: int, todo: list[bytes], bad: list[int]) -> None:
    """One connection: the next request when the answer to the last one is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while todo:
        writer.write(todo.pop())
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 202"):
            bad[0] += 1
        at = head.lower().find(b"content-length:")
        await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
    writer.close()


async def main() -> None:
    port, count, connections, secret = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    todo = requests(count, secret, sys.argv[5] if len(sys.argv) > 5 else f"b{time.time_ns()}")
    todo.reverse()
    bad = [0]
    begun = time.monotonic()
    await asyncio.gather(*(client(port, todo, bad) for _ in range(connections)))
    print(f"{begun:.6f} {time.monotonic() - begun:.6f} {bad[0]}")


if __name__ == "__main__":
    asyncio.run(main())
