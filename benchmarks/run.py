"""The benchmark: ``python -m benchmarks.run`` (or ``make bench``). Quote the ratios, not the rates.

Everything runs on one machine, in one go, against one receiver, with the embedded servers set up as `madeira up` sets
them up (fsync and AOF on):

(a) a bare Dramatiq actor on the stock broker that only does ``httpx.post``: no storage, no retries, no promises; with as many
    threads as are best for it
(b) Madeira's deliver stage: claim, signed call, settle, for deliveries that wait already
(c) Madeira end to end: from the first signed POST to the last recorded success
(d) intake alone, group-committed, and (e) intake with one INSERT and one call to Redis per request
(f) idle latency: from POST to the receiver's door, one event at a time
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import redis

from madeira.egress import Egress
from madeira.embedded import EmbeddedPostgres, EmbeddedValkey, free_port
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer, generate
from madeira.store.database import Database
from madeira.store.migrate import migrate

ROOT = Path(__file__).parents[1]
SECRET = "secret-of-the-benchmark"
TICK = os.sysconf("SC_CLK_TCK")

#: Threads of a process of the bare actor: 8 to 24 are the best for it, with 48 it is a third slower.
BARE_THREADS = 24


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all below it."""
    total = 0.0
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(stat[11]) + int(stat[12])) / TICK
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                total += cpu_seconds(int(child))
    except FileNotFoundError:
        return total
    return total


class Sink:
    """The receiver's process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sink"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def stats(self) -> tuple[int, float, float]:
        count, first, last = self.ask("stats").split()
        return int(count), float(first), float(last)

    def wait(self, count: int, timeout: float = 300.0) -> tuple[float, float]:
        """Wait for `count` calls; returns the moments of the first and the last one."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            got, first, last = self.stats()
            if got >= count:
                return first, last
            time.sleep(0.02)
        raise SystemExit(f"the receiver got {self.stats()[0]} of {count} calls in {timeout:g} s")


@dataclass
class Bench:
    """One run of the benchmark."""

    folder: Path
    events: int
    processes: int
    threads: int
    stack: ExitStack
    sink: Sink = field(init=False)
    postgres: EmbeddedPostgres = field(init=False)
    valkey: EmbeddedValkey = field(init=False)
    env: dict[str, str] = field(init=False)
    key: str = field(default_factory=generate, repr=False)

    def __post_init__(self) -> None:
        self.sink = Sink()
        self.stack.callback(self.sink.process.kill)
        self.postgres = EmbeddedPostgres(folder=self.folder / "postgres")
        self.valkey = EmbeddedValkey(folder=self.folder / "valkey")
        for server in (self.postgres, self.valkey):
            server.start()
            self.stack.callback(server.stop)
        migrate(self.postgres.url)
        self._configure()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MADEIRA_", "PROMETHEUS_"))}
        self.env = kept | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MADEIRA_DATABASE_URL": self.postgres.url,
            "MADEIRA_REDIS_URL": self.valkey.url,
            "MADEIRA_DATA_DIR": str(self.folder / "data"),
            "MADEIRA_SECRET_KEY": self.key,
            "MADEIRA_PROCESSES": str(self.processes),
            "MADEIRA_THREADS": str(self.threads),
            "MADEIRA_METRICS_PORT": "0",
            "MADEIRA_SCHEDULER_METRICS_PORT": "0",
            "MADEIRA_EGRESS_ALLOW": "127.0.0.1",
            "BARE_REDIS_URL": self.valkey.url,
        }

    def _configure(self) -> None:
        database = Database(url=self.postgres.url, application="benchmark", pool_max=1)
        database.open()
        egress = Egress(allow=("127.0.0.1",), deny=())
        configurator = Configurator(database=database, sealer=Sealer((self.key,)), egress=egress)
        configurator.apply(self._config(), prune=True, who="the benchmark")
        database.close()

    def _config(self) -> str:
        text = f'[[source]]\nname = "bench"\nsecrets = ["{SECRET}"]\n'
        for n in range(4):
            text += (
                f'[[endpoint]]\nname = "bench{n}"\nurl = "http://127.0.0.1:{self.sink.port}/{n}"\nconcurrency = 1000\n'
                f'secrets = ["whsec_dGhlIHNlY3JldCBvZiB0aGUgYmVuY2g="]\n'
                f'[[route]]\nname = "bench{n}"\nevent_type = "bench{n}.*"\nendpoint = "bench{n}"\n'
            )
        return text

    @contextmanager
    def running(self, *args: str, ready: Callable[[str], bool], **env: str) -> Iterator[int]:
        """A process of the system under test, from ready to stopped; gives its pid."""
        log = self.folder / f"{args[0]}.log"
        with log.open("w") as out:
            process = subprocess.Popen(args, env=self.env | env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 30
            while not ready(log.read_text()):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{args[0]} did not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()
            process.wait(30)

    def worker(self, module: str, *queues: str, threads: int | None = None) -> Any:
        """A Dramatiq master with the benchmark's processes, and its threads if not told otherwise."""
        count = str(threads or self.threads)
        args = ["dramatiq", module, "-p", str(self.processes), "-t", count, *(["-Q", *queues] if queues else [])]
        return self.running(*args, ready=lambda log: log.count("ready for action") >= self.processes)

    def api(self, port: int, app: str = "madeira.api:app") -> Any:
        """The API on `port`."""

        def ready(_: str) -> bool:
            try:
                import urllib.request

                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        return self.running("gunicorn", "-c", "deploy/gunicorn.conf.py", app, ready=ready, MADEIRA_PORT=str(port))

    def load(self, port: int, count: int, connections: int = 32) -> tuple[float, float]:
        """Post `count` events; returns when it began and how long it took."""
        args = [sys.executable, "-m", "benchmarks.load", str(port), str(count), str(connections), SECRET]
        begun, took, bad = subprocess.run(args, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
        if int(bad):
            raise SystemExit(f"{bad} of {count} posts were not accepted")
        return float(begun), float(took)

    def wipe(self) -> None:
        """Start the next stage from nothing, as on the first day: what Postgres knows of the tables goes with their rows."""
        with psycopg.connect(self.postgres.url, autocommit=True) as conn:
            conn.execute("TRUNCATE event, delivery, delivery_log, lease CASCADE")
        redis.Redis.from_url(self.valkey.url).flushall()
        self.sink.ask("reset")

    # -- the stages ---------------------------------------------------------------------------------------------

    def stage(self, name: str) -> tuple[float, dict[str, float]]:
        """One stage: events per second, and CPU per event in ms by process."""
        if name == "single":
            return self.intake("benchmarks.one_by_one:app")
        stages = {"bare": self.bare, "deliver": self.deliver, "end": self.end_to_end, "intake": self.intake}
        return stages[name]()

    def bare(self) -> tuple[float, dict[str, float]]:
        """(a) calls per second of the bare actor, and CPU per call in ms."""
        self.wipe()
        os.environ["BARE_REDIS_URL"] = self.valkey.url
        from benchmarks.bare import call

        for n in range(self.events):
            call.send(f"http://127.0.0.1:{self.sink.port}/{n % 4}")
        with self.worker("benchmarks.bare", threads=BARE_THREADS) as pid:
            before = self._cpu(worker=pid)
            first, last = self.sink.wait(self.events)
            after = self._cpu(worker=pid)
        return self.events / (last - first), per_event(before, after, self.events)

    def deliver(self) -> tuple[float, dict[str, float]]:
        """(b) deliveries per second, and CPU per delivery in ms."""
        self.wipe()
        port = free_port()
        with self.api(port):
            self.load(port, self.events)
        with self.worker("madeira.actors", "route"):
            self._wait("SELECT count(*) FROM delivery", self.events)
        self.sink.ask("reset")
        with self.worker("madeira.actors", "deliver") as pid:
            before = self._cpu(worker=pid)
            first, last = self.sink.wait(self.events)
            self._wait("SELECT count(*) FROM delivery WHERE status = 'succeeded'", self.events)
            after = self._cpu(worker=pid)
        return self.events / (last - first), per_event(before, after, self.events)

    def end_to_end(self) -> tuple[float, dict[str, float]]:
        """(c) events per second from the first POST to the last recorded success, and CPU per event in ms."""
        self.wipe()
        port = free_port()
        with self.api(port) as api, self.worker("madeira.actors") as worker:
            self.load(port, 200)
            self._wait("SELECT count(*) FROM event WHERE status = 'succeeded'", 200)
            before = self._cpu(worker=worker, api=api)
            begun, _ = self.load(port, self.events)
            self._wait("SELECT count(*) FROM event WHERE status = 'succeeded'", self.events + 200)
            took = time.monotonic() - begun
            after = self._cpu(worker=worker, api=api)
        return self.events / took, per_event(before, after, self.events)

    def intake(self, app: str = "madeira.api:app") -> tuple[float, dict[str, float]]:
        """(d), (e) accepted events per second with nobody working."""
        self.wipe()
        port = free_port()
        with self.api(port, app) as api:
            self.load(port, 500)
            before = self._cpu(api=api)
            _, took = self.load(port, self.events)
            after = self._cpu(api=api)
        return self.events / took, per_event(before, after, self.events)

    def idle_latency(self, count: int = 200) -> tuple[float, float]:
        """(f) p50 and p95 in ms from the first byte of a POST to the receiver's door, one event at a time."""
        self.wipe()
        port = free_port()
        begins = []
        with self.api(port), self.worker("madeira.actors"):
            self.load(port, 50, 1)
            self.sink.wait(50)
            self.sink.ask("reset")
            import socket

            from benchmarks.load import requests

            with socket.create_connection(("127.0.0.1", port)) as s:
                for n, request in enumerate(requests(count, SECRET, f"idle{time.time_ns()}")):
                    begins.append(time.monotonic())
                    s.sendall(request)
                    s.recv(65536)
                    self.sink.wait(n + 1, 10)
        times = [float(t) for t in self.sink.ask("times").split()]
        late = sorted(1000 * (t - b) for t, b in zip(times, begins, strict=True))
        return statistics.median(late), late[int(len(late) * 0.95)]

    def _cpu(self, **pids: int) -> dict[str, float]:
        servers = {"postgres": self.postgres.pid, "redis": self.valkey.pid}
        return {name: cpu_seconds(pid) for name, pid in (pids | servers).items()}

    def _wait(self, statement: str, count: int, timeout: float = 300.0) -> None:
        with psycopg.connect(self.postgres.url, autocommit=True) as conn:
            deadline = time.monotonic() + timeout
            while True:
                row = conn.execute(statement).fetchone()  # type: ignore[call-overload]
                if row and row[0] >= count:
                    return
                if time.monotonic() > deadline:
                    raise SystemExit(f"only {row} of {count} after {timeout:g} s: {statement}")
                time.sleep(0.02)


def per_event(before: dict[str, float], after: dict[str, float], events: int) -> dict[str, float]:
    """CPU in ms per event, by process."""
    return {name: 1000 * (after[name] - before[name]) / events for name in before}


def show(name: str, values: Sequence[float]) -> None:
    """Print a row."""
    spread = f"  ({min(values):,.0f} to {max(values):,.0f})" if len(values) > 1 else ""
    print(f"{name:<52}{statistics.median(values):>10,.0f}/s{spread}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages that are asked for, in turn, as often as asked, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5000, help="events per stage")
    parser.add_argument("--rounds", type=int, default=5, help="how often each stage runs; stages take turns")
    parser.add_argument("--processes", type=int, default=2, help="processes of the API and of the workers, each")
    parser.add_argument("--threads", type=int, default=48, help="threads per process")
    parser.add_argument("--only", nargs="*", default=["bare", "deliver", "end", "intake", "single", "idle"])
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="madeira-bench-"))
    folder.chmod(0o711)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        bench = Bench(folder, args.events, args.processes, args.threads, stack)
        report(bench, args.rounds, args.only)


#: What each stage measures; in the order in which they take turns.
STAGES = {
    "bare": "(a) bare Dramatiq + httpx actor",
    "deliver": "(b) deliver stage",
    "end": "(c) end to end",
    "intake": "(d) intake, group-committed",
    "single": "(e) intake, one by one",
}

#: Ratios that are printed: stage, compared with, in words.
RATIOS = (
    ("deliver", "bare", "deliver stage / bare"),
    ("end", "bare", "end to end / bare"),
    ("intake", "single", "intake grouped / one by one"),
)


def report(bench: Bench, rounds: int, only: Sequence[str]) -> None:
    """Run the stages in turn and print what came of it.

    Each round goes in the order opposite to the last: a machine that grows slower or faster meanwhile does so for all of them.
    """
    rates: dict[str, list[float]] = {name: [] for name in STAGES if name in only}
    cpu: dict[str, list[dict[str, float]]] = {name: [] for name in rates}
    for n in range(rounds):
        for name in sorted(rates, key=list(STAGES).index, reverse=bool(n % 2)):
            rate, spent = bench.stage(name)
            rates[name].append(rate)
            cpu[name].append(spent)
    threads = f"{bench.threads} threads ((a): {BARE_THREADS})"
    print(f"{bench.events:,} events, {bench.processes} processes x {threads}, median of {rounds}\n")
    for name, values in rates.items():
        show(STAGES[name], values)
    for over, under, what in RATIOS:
        if over in rates and under in rates:
            pairs = [a / b for a, b in zip(rates[over], rates[under], strict=True)]
            print(f"{what:<52}{statistics.median(pairs):>10.2f}  ({min(pairs):.2f} to {max(pairs):.2f})")
    for name, spent in cpu.items():
        median = {process: statistics.median(each[process] for each in spent) for process in spent[0]}
        shares = ", ".join(f"{process} {ms:.2f}" for process, ms in median.items())
        print(f"CPU per event, {STAGES[name][4:]}: {sum(median.values()):.2f} ms ({shares})")
    if "idle" in only:
        p50, p95 = bench.idle_latency()
        print(f"{'(f) idle, POST to the receiver, p50 / p95':<52}{p50:>10.1f} ms / {p95:.1f} ms")


if __name__ == "__main__":
    main()
