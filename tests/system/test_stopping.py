"""What stops, starts anew or is replaced: each kind of process when it is told to, and all of them one after another."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.request import urlopen

import pytest

from madeira.embedded import free_port
from tests.receiver import Answer, Gate, Receiver
from tests.system.conftest import Launch
from tests.system.harness import START_S, Madeira, Process, wait_until

#: Each program as a container runs it, what it says when it is up, and seconds within which it must be gone when idle.
PROGRAMS: Mapping[str, tuple[Sequence[str], str, float]] = {
    "the API": (("gunicorn", "-c", "deploy/gunicorn.conf.py", "madeira.api:app"), "Booting worker", 8.0),
    "the worker": (("dramatiq", "madeira.actors", "-p", "1", "-t", "4"), "ready for action", 8.0),
    "the scheduler": (("periodiq", "-v", "madeira.actors"), "Registered periodic actors", 2.0),
}

#: Runs a program as the first process of a namespace of its own, as a container does.
AS_FIRST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

#: Events per second, and threads that post them, half of them over connections that stay open.
RATE = 100
SENDERS = 10


def may_be_first() -> bool:
    """Whether this user may make a namespace of processes."""
    tried = shutil.which("unshare") and subprocess.run([*AS_FIRST, "true"], capture_output=True, check=False)
    return bool(tried and tried.returncode == 0)


@pytest.mark.long
@pytest.mark.parametrize("first", [False, True], ids=["by itself", "as process one"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kind_of_process_ends_soon_when_it_is_told_to(launch: Launch, receiver: Receiver, name: str, first: bool) -> None:
    """With exit code 0, also as the first process of a container, which gets no signal that it does not handle; no part stays."""
    if first and not may_be_first():
        pytest.skip("this user may not make a namespace of processes (unshare --pid)")
    command, up, limit_s = PROGRAMS[name]
    metrics = free_port()
    madeira = launch({"a": {"url": receiver.url("/a")}}, env={"MADEIRA_METRICS_PORT": str(metrics)})
    process = madeira.start("told", [*AS_FIRST, *command] if first else command)
    wait_until(lambda: up in process.tail(), what=f"the start of {name}")
    if name == "the worker":
        wait_until(lambda: answers(metrics), what="the page of the worker's numbers")
    told = time.monotonic()
    os.kill(process.children()[0] if first else process.pid, signal.SIGTERM)
    assert process.popen.wait(limit_s + 5) == 0, process.tail()
    assert time.monotonic() - told < limit_s
    assert not answers(metrics)


def answers(port: int, path: str = "/metrics") -> bool:
    """Whether something serves the page there, and says that it is well."""
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def listener(process: Process, port: int) -> int:
    """Which of the processes below this one listens at a port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    [inode] = [line[9] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]
    for pid in process.children():
        with contextlib.suppress(FileNotFoundError):
            if any(os.readlink(fd) == f"socket:[{inode}]" for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return pid
    raise AssertionError(f"none of {process.children()} listens at {port}")


@pytest.mark.long
def test_the_page_of_workers_outlives_the_process_that_is_there_for_it(launch: Launch, receiver: Receiver) -> None:
    """Dramatiq does not start that one again; a worker process serves the same numbers."""
    port = free_port()
    madeira = launch({"a": {"url": receiver.url("/a")}}, env={"MADEIRA_METRICS_PORT": str(port)})
    madeira.api()
    worker = madeira.worker(processes=2)
    wait_until(lambda: answers(port), what="the page")
    madeira.post_many(3)
    madeira.wait_all()
    os.kill(listener(worker, port), signal.SIGKILL)
    wait_until(lambda: not answers(port), what="the end of the page")
    wait_until(lambda: answers(port), 30, what="the page again")
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        assert b'madeira_delivery_attempts_total{endpoint="a",outcome="succeeded"} 3.0' in page.read()


@pytest.mark.long
def test_workers_that_are_to_start_anew_finish_their_calls_first(launch: Launch, receiver: Receiver) -> None:
    """SIGHUP: what is under way is answered and settled, what waits is called by the new processes, nothing twice."""
    gate = Gate()
    receiver.queue("/a", *(Answer(hold=gate) for _ in range(3)))
    madeira = launch({"a": {"url": receiver.url("/a"), "timeout": 30, "concurrency": 3}})
    madeira.api()
    worker = madeira.worker()
    old = worker.children()[0]
    events = madeira.post_many(20)
    receiver.wait_for(3)
    worker.popen.send_signal(signal.SIGHUP)
    wait_until(lambda: "Stopping worker process" in worker.tail(10**7), what="the beginning of the end")
    gate.set()
    wait_until(lambda: not works(old), what="the end of the old process")
    wait_until(lambda: worker.tail(10**7).count("ready for action") >= 2, 30, what="the start of the new one")
    events += madeira.post_many(5)
    madeira.wait_all()
    assert receiver.count() == 25
    assert [[row["outcome"] for row in madeira.attempts(event)] for event in events] == [["succeeded"]] * 25


def works(pid: int) -> bool:
    """Whether a process is there and has not ended; its parent, which was replaced, asks no more how it did."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- everything is replaced under load ------------------------------------------------------------------------------


@dataclass
class Load:
    """Posts `RATE` events a second to whichever API answers, as a balancer would that only knows refused connections."""

    madeira: Madeira
    ports: Sequence[int]
    outcomes: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)
    refused: int = 0

    def __post_init__(self) -> None:
        self._numbers = count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.begun = time.monotonic()
        self._threads = [threading.Thread(target=self._run, args=(n % 2 == 0,)) for n in range(SENDERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, keeps: bool) -> None:
        kept: http.client.HTTPConnection | None = None
        while True:
            with self._lock:
                number = next(self._numbers)
            if self._stop.wait(max(0.0, self.begun + number / RATE - time.monotonic())):
                break
            kept = self._post(number, kept)
            if kept and not keeps:
                kept.close()
                kept = None
        if kept:
            kept.close()

    def _post(self, number: int, kept: http.client.HTTPConnection | None) -> http.client.HTTPConnection | None:
        body = json.dumps({"event_id": f"n{number}", "event_type": "a.b", "payload": {"n": number}}).encode()
        connection = kept or self._connect(number)
        try:
            connection.request("POST", "/v1/events", body, self.madeira.sign(body))
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as e:
            self._note(f"{'kept' if kept else 'fresh'} connection: {type(e).__name__}")
            connection.close()
            return None
        self._note(str(answer.status), f"n{number}" if answer.status == 202 else None)
        if answer.will_close:
            connection.close()
            return None
        return connection

    def _note(self, outcome: str, event: str | None = None) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            if event:
                self.accepted.append(event)

    def _connect(self, number: int) -> http.client.HTTPConnection:
        for turn in count(number):
            connection = http.client.HTTPConnection("127.0.0.1", self.ports[turn % len(self.ports)], timeout=10)
            try:
                connection.connect()
                return connection
            except ConnectionRefusedError:
                connection.close()
                with self._lock:
                    self.refused += 1
        raise AssertionError


class Host:
    """One API and one worker, with a data folder and ports of their own, as one of several hosts has them."""

    def __init__(self, madeira: Madeira, folder: Path) -> None:
        self.madeira = madeira
        self.port = free_port()
        self.env = {"MADEIRA_PORT": str(self.port), "MADEIRA_DATA_DIR": str(folder), "MADEIRA_PROCESSES": "2"}
        self.api = self._api()
        self.worker = self._worker()

    def _api(self) -> Process:
        args = ["gunicorn", "-c", "deploy/gunicorn.conf.py", "madeira.api:app"]
        process = self.madeira.start("api", args, self.env)
        wait_until(lambda: answers(self.port, "/readyz"), START_S, what="the API's start")
        return process

    def _worker(self) -> Process:
        return self.madeira.worker(env=self.env)

    def replace_api(self) -> None:
        assert self.api.stop(45) == 0
        self.api = self._api()

    def replace_worker(self) -> None:
        assert self.worker.stop(45) == 0
        self.worker = self._worker()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_everything_is_replaced_under_load_and_no_sender_or_receiver_notices(
    launch: Launch, receiver: Receiver, tmp_path: Path
) -> None:
    """Two hosts, each process of each replaced once: every post is answered 202, every event is called once.

    A connection that is refused tells a sender that nothing was said: it goes to the other host.
    """
    receiver.default(Answer(delay_s=0.05))
    madeira = launch({"a": {"url": receiver.url("/a"), "timeout": 10}}, env={"MADEIRA_LOG_LEVEL": "warning"})
    hosts = [Host(madeira, tmp_path / name) for name in ("one", "two")]
    scheduler = madeira.start("scheduler", ["periodiq", "madeira.actors"])
    load = Load(madeira, [host.port for host in hosts])
    try:
        assert subprocess.run(["madeira", "migrate"], env=madeira.env, capture_output=True, check=False).returncode == 0
        for host in hosts:
            host.replace_api()
            host.replace_worker()
        assert scheduler.stop(5) == 0
        scheduler = madeira.start("scheduler", ["periodiq", "madeira.actors"])
        for host in hosts:
            # In place, as an operator would to rotate a key.
            host.api.popen.send_signal(signal.SIGHUP)
            host.worker.popen.send_signal(signal.SIGHUP)
        served = len(load.accepted)
        wait_until(lambda: len(load.accepted) > served + 5 * RATE, what="load after the last restart")
    finally:
        load.end()
    took = time.monotonic() - load.begun
    # On a machine that is busy with other things the backlog may be long.
    madeira.wait_all(300)
    calls = Counter(call.json()["event_id"] for call in receiver.calls)
    outcomes = Counter(row["outcome"] for row in madeira.rows("SELECT outcome FROM delivery_log"))
    print(
        f"\n{len(load.accepted)} events in {took:.0f} s ({len(load.accepted) / took:.0f}/s): answers {dict(load.outcomes)}, "
        f"connects refused {load.refused}, calls {sum(calls.values())}, called twice {sum(n > 1 for n in calls.values())}, "
        f"never {len(set(load.accepted) - set(calls))}, attempts {dict(outcomes)}"
    )
    assert set(load.outcomes) == {"202"}
    assert load.refused > 0, "a host that stops refuses for a moment"
    assert calls == Counter(load.accepted)
    assert outcomes == Counter({"succeeded": len(load.accepted)})
    assert len(load.accepted) > 0.9 * RATE * took
