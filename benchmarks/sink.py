"""The receiver of the benchmark: answers 204 at once, and tells when and how often it was called.

In a process of its own: ``python -m benchmarks.sink``. It prints its port, then reads commands from standard input:
``reset`` forgets, ``stats`` prints ``count first last`` (seconds of the monotonic clock), ``times`` the moment of each call.
"""

import asyncio
import sys
import time
from typing import ClassVar

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


class Sink(asyncio.Protocol):
    """One connection. Only what the benchmark sends is understood: a Content-Length and a body."""

    times: ClassVar[list[float]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while True:
            head, mark, rest = self.data.partition(b"\r\n\r\n")
            if not mark:
                return
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(rest) < length:
                return
            self.data = rest[length:]
            Sink.times.append(time.monotonic())
            self.transport.write(ANSWER)  # type: ignore[attr-defined]


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        times = Sink.times
        if line == b"reset\n":
            times.clear()
            print("ok", flush=True)
        elif line == b"stats\n":
            print(len(times), times[0] if times else 0, times[-1] if times else 0, flush=True)
        else:
            print(" ".join(f"{t:.6f}" for t in times), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
