"""A worker that is told to stop answers what has reached it, and refuses what comes later; nobody is reset."""

import http.client
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.api.serving import Api, event, rows, signed
from tests.system.harness import wait_until


class SlowPost(threading.Thread):
    """A client that sends its body in two halves; `outcome` is a status, or what refused it."""

    def __init__(self, api: Api, name: str, second_half: threading.Event) -> None:
        super().__init__(daemon=True)
        self.api = api
        self.body = event(name)
        self.second_half = second_half
        self.first_half_sent = threading.Event()
        self.outcome: int | str = "nothing"
        self.start()

    def run(self) -> None:
        headers = "".join(f"{k}: {v}\r\n" for k, v in signed(self.body).items())
        head = f"POST /v1/events HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(self.body)}\r\n\r\n"
        try:
            s = socket.create_connection(("127.0.0.1", self.api.port), timeout=30)
        except OSError:
            self.outcome = "refused"
            self.first_half_sent.set()
            return
        with s:
            try:
                s.sendall(head.encode() + self.body[:10])
                self.first_half_sent.set()
                self.second_half.wait(30)
                s.sendall(self.body[10:])
                answer = http.client.HTTPResponse(s)
                answer.begin()
                self.outcome = answer.status
            except (OSError, http.client.HTTPException) as e:
                self.outcome = f"broken: {e!r}"


@pytest.mark.long
def test_nobody_who_connects_during_a_stop_is_cut_off(api: Api) -> None:
    """Thousands knock, as fast as they can, until nobody listens: each is answered, or refused before it said a word."""
    ended = threading.Event()

    def knock() -> Counter[str]:
        seen: Counter[str] = Counter()
        while not (ended.is_set() and seen["refused"]):
            try:
                s = socket.create_connection(("127.0.0.1", api.port), timeout=30)
            except ConnectionRefusedError:
                seen["refused"] += 1
                continue
            try:
                with s:
                    s.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    seen["answered" if s.recv(12) == b"HTTP/1.1 200" else "said nothing"] += 1
            except OSError:
                seen["cut off"] += 1
        return seen

    with ThreadPoolExecutor(8) as pool:
        knocks = [pool.submit(knock) for _ in range(8)]
        os.kill(api.pid, signal.SIGTERM)
        assert api.wait() == 0
        ended.set()
        seen = sum((k.result() for k in knocks), Counter[str]())
    assert set(seen) == {"answered", "refused"}, seen


@pytest.mark.alone
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGHUP])
def test_slow_posts_survive_a_stop_or_a_reload(api: Api, sig: signal.Signals) -> None:
    """Twenty posts whose bodies are half sent at the signal are all answered 202; what comes during it too, or is refused."""
    second_half = threading.Event()
    slow = [SlowPost(api, f"slow{n}", second_half) for n in range(20)]
    for client in slow:
        assert client.first_half_sent.wait(10)
    wait_until(lambda: _has_threads_reading(api), what="the workers to read")
    old = api.worker_pids
    os.kill(api.pid, sig)
    late: list[SlowPost] = []
    at_once = threading.Event()
    at_once.set()
    for n in range(100):
        late.append(SlowPost(api, f"late{n}", at_once))
        time.sleep(0.005)
    second_half.set()
    for client in [*slow, *late]:
        client.join(30)
    assert [c.outcome for c in slow] == [202] * 20
    outcomes = {c.outcome for c in late}
    assert outcomes <= ({202, "refused"} if sig == signal.SIGTERM else {202}), outcomes
    assert rows(api.env["MADEIRA_DATABASE_URL"]) == 20 + sum(c.outcome == 202 for c in late)
    if sig == signal.SIGTERM:
        assert api.wait() == 0
    else:
        wait_until(lambda: len(api.worker_pids) == 2 and not set(api.worker_pids) & set(old), what="new workers")


def _has_threads_reading(api: Api) -> bool:
    """Whether the workers have taken the twenty connections: none is left in the kernel's queue."""
    with open("/proc/net/tcp") as table:
        listening = [line.split() for line in table if f":{api.port:04X} " in line and line.split()[3] == "0A"]
    return all(int(columns[4].split(":")[1], 16) == 0 for columns in listening)


def test_a_stop_without_requests_is_quick(api: Api) -> None:
    """SIGTERM on an idle API ends it within seconds, with exit code 0."""
    assert api.post(event("one")).status == 202
    started = time.monotonic()
    api.terminate()
    assert api.wait(10) == 0
    assert time.monotonic() - started < 8


def test_who_has_connected_and_said_nothing_yet_is_answered_by_a_worker_that_stops(api: Api) -> None:
    """Connections without a byte at the signal: the one that speaks then is answered, the silent ones end no worker early."""
    silent = [socket.create_connection(("127.0.0.1", api.port), timeout=20) for _ in range(6)]
    wait_until(lambda: _has_threads_reading(api), what="the workers to accept")
    api.terminate()
    body = event("late")
    headers = "".join(f"{k}: {v}\r\n" for k, v in signed(body).items())
    for s in silent[::2]:
        s.sendall(f"POST /v1/events HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert s.recv(4096).startswith((b"HTTP/1.1 202 ", b"HTTP/1.1 200 "))
    for s in silent[1::2]:
        assert s.recv(1) == b""
    for s in silent:
        s.close()
    assert api.wait(10) == 0
    assert "Exception" not in api.log.read_text()


def test_a_silent_connection_ends_after_a_while_and_its_worker_goes_on(
    serve: Callable[..., Api], database_url: str, redis_url: str
) -> None:
    api = serve(database_url, redis_url).start("--keep-alive", "1")
    wait_until(lambda: len(api.worker_pids) == 2, what="both workers")
    before = api.worker_pids
    silent = [socket.create_connection(("127.0.0.1", api.port), timeout=20) for _ in range(6)]
    for s in silent:
        assert s.recv(1) == b""
        s.close()
    assert api.post(event("one")).status == 202
    assert api.worker_pids == before
    assert "Exception" not in api.log.read_text()


@pytest.mark.long
def test_a_sender_that_stalls_is_given_up(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """Half a body and then silence does not keep a thread for ever: 408 after a while."""
    api = serve(database_url, redis_url).start()
    never = threading.Event()
    client = SlowPost(api, "stalled", never)
    assert client.first_half_sent.wait(10)
    with socket.create_connection(("127.0.0.1", api.port), timeout=40) as s:
        body = event("x")
        headers = "".join(f"{k}: {v}\r\n" for k, v in signed(body).items())
        s.sendall(f"POST /v1/events HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        assert s.recv(4096).startswith(b"HTTP/1.1 408 ")
    assert rows(database_url) == 0
    never.set()


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"MADEIRA_DATABASE_URL": ""}, "MADEIRA_DATABASE_URL is not set"),
        ({"MADEIRA_REDIS_URL": "nonsense"}, "MADEIRA_REDIS_URL"),
        ({"MADEIRA_MAX_BODY": "-1"}, "MADEIRA_MAX_BODY"),
        ({"MADEIRA_THREAD": "4"}, "did you mean MADEIRA_THREADS"),
        ({"MADEIRA_CONFIG": "/nowhere.toml"}, "there is no file /nowhere.toml"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_one_line(
    serve: Callable[..., Api], database_url: str, redis_url: str, env: dict[str, str], told: str
) -> None:
    """A missing or wrong setting is told in one line, and nothing is served."""
    api = serve(database_url, redis_url, **env)
    with pytest.raises(AssertionError, match="gunicorn ended"):
        api.start()
    assert api.wait() != 0
    lines = api.log.read_text().strip().splitlines()
    assert len(lines) == 1
    assert told in lines[0]
