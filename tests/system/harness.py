"""A whole Madeira in processes of its own, driven from a test: started, asked, killed and frozen.

Nothing is imitated: gunicorn serves the API, Dramatiq runs the workers, events come in signed over HTTP. Timings are
scaled by the settings that exist for it.
"""

import contextlib
import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import redis
from psycopg.rows import dict_row

from madeira.egress import Egress
from madeira.embedded import free_port
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.store.database import Database

ROOT = Path(__file__).parents[2]

SECRET = "whsec_dGhlIHNlY3JldCBvZiB0aGUgdGVzdHM="
TOKEN = "the-token-of-the-tests"

#: What secrets are sealed with.
KEY = "bWFkZWlyYS10ZXN0cy1zZWFsLXdpdGgtdGhpcy1rZXk="

#: Settings that make in seconds what takes a minute in production.
QUICK: Mapping[str, str] = {
    "MADEIRA_BEAT_S": "0.3",
    "MADEIRA_SILENCE_S": "1.5",
    "MADEIRA_LEASE_MARGIN_S": "2",
    "MADEIRA_RECONCILE_S": "1",
    "MADEIRA_LOG_LEVEL": "info",
}

#: Seconds within which a process must be up; where much else runs, one that loads OpenTelemetry has needed more than twenty.
START_S = 60.0


def wait_until(predicate: Callable[[], Any], timeout: float = 20.0, *, what: str = "it", every: float = 0.02) -> Any:
    """Poll `predicate` until it is true, and return its value; a state of another process has no event to wait for."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s for {what} (last value: {value!r})")
        threading_wait(every)


def threading_wait(seconds: float) -> None:
    """Give the processor away between two looks."""
    import select

    select.select([], [], [], seconds)


def later(seconds: float) -> str:
    """A moment to come, as an event carries it."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def toml(endpoints: Mapping[str, Mapping[str, Any]], routes: Sequence[Mapping[str, Any]] | None = None) -> str:
    """A configuration with one source `test` and, unless `routes` are given, one route ``<endpoint>.*`` per endpoint.

    Without a breaker, unless an endpoint brings one: most tests have receivers that fail a lot, and count their calls.
    """
    text = f'[[source]]\nname = "test"\nsecrets = ["{SECRET}"]\n'
    for name, fields in endpoints.items():
        retry = {"initial": 0.2, "max": 2, "max_attempts": 4, **fields.get("retry", {})}
        values = {"secrets": [SECRET], **{k: v for k, v in fields.items() if k not in ("retry", "breaker")}}
        text += f'\n[[endpoint]]\nname = "{name}"\n'
        text += "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items() if k != "headers")
        if "headers" in values:
            text += "[endpoint.headers]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values["headers"].items())
        breaker = fields.get("breaker", {"enabled": False})
        text += "[endpoint.breaker]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in breaker.items())
        text += "[endpoint.retry]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in retry.items())
    if routes is None:
        routes = [{"name": name, "event_type": f"{name}.*", "endpoint": name} for name in endpoints]
    for route in routes:
        text += "\n[[route]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in route.items())
    return text


def configure(database_url: str, config: str) -> None:
    """Make the configuration in a database what the TOML text `config` says, and nothing else."""
    database = Database(url=database_url, application="tests", pool_max=1)
    database.open()
    try:
        configurator(database).apply(config, prune=True, who="the tests")
    finally:
        database.close()


def configurator(database: Database) -> Configurator:
    """What changes the configuration, with the key and the policy that the processes of the tests have."""
    egress = Egress(allow=("127.0.0.0/8", "::1"), deny=())
    return Configurator(database=database, sealer=Sealer((KEY,)), egress=egress)


class Process:
    """A process group that the test started."""

    def __init__(self, name: str, args: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                args, env=dict(env), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def children(self) -> list[int]:
        """Pids of the worker processes below this one that work (not Dramatiq's fork or multiprocessing's tracker)."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in listed]

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill -9 the whole group."""
        self.signal_group(signal.SIGKILL)
        self.popen.wait(10)

    def stop(self, timeout: float = 20.0) -> int:
        """SIGTERM the master, and wait; returns the exit code."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"{self.name} did not stop within {timeout:g} s:\n{self.tail()}") from None
        self.signal_group(signal.SIGKILL)
        return self.popen.returncode

    def freeze(self) -> None:
        self.signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal_group(signal.SIGCONT)

    def tail(self, size: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-size:]


class Madeira:
    """One Madeira: settings, configuration file, and the processes that the test starts."""

    def __init__(
        self, *, folder: Path, database_url: str, redis_url: str, config: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.database_url = database_url
        self.redis_url = redis_url
        self.port = free_port()
        self.namespace = "m"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MADEIRA_", "PROMETHEUS_", "dramatiq_"))}
        self.env = {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "MADEIRA_DATABASE_URL": database_url,
            "MADEIRA_REDIS_URL": redis_url,
            "MADEIRA_NAMESPACE": self.namespace,
            "MADEIRA_DATA_DIR": str(folder / "data"),
            "MADEIRA_SECRET_KEY": KEY,
            "MADEIRA_PORT": str(self.port),
            "MADEIRA_METRICS_PORT": "0",
            "MADEIRA_SCHEDULER_METRICS_PORT": "0",
            "MADEIRA_EGRESS_ALLOW": "127.0.0.0/8,::1",
            "MADEIRA_ADMIN_TOKEN": TOKEN,
            "MADEIRA_THREADS": "8",
            **QUICK,
            **(env or {}),
        }
        self.config = ""
        if config:
            self.configure(config)
        self.processes: list[Process] = []
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=15, trust_env=False)
        self._db: psycopg.Connection[dict[str, Any]] | None = None

    def configure(self, config: str) -> None:
        """Make the configuration what the TOML text `config` says, and nothing else; running processes follow.

        Where no database is named, `madeira up` is to start one and apply the text.
        """
        self.config = config
        if self.database_url:
            configure(self.database_url, config)
            return
        file = self.folder / "madeira.toml"
        file.write_text(config)
        self.env["MADEIRA_CONFIG"] = str(file)

    # -- processes ----------------------------------------------------------------------------------------------

    def start(self, name: str, args: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        log = self.folder / f"{name}-{len(self.processes)}.log"
        process = Process(name, args, {**self.env, **(env or {})}, log)
        self.processes.append(process)
        return process

    def api(self, *, workers: int = 1, env: Mapping[str, str] | None = None, options: Sequence[str] = ()) -> Process:
        """Start the API and wait until it answers."""
        args = ["gunicorn", "-c", "deploy/gunicorn.conf.py", *options, "madeira.api:app"]
        process = self.start("api", args, {"MADEIRA_PROCESSES": str(workers), **(env or {})})
        wait_until(lambda: self._alive(process), START_S, what="the API's start")
        return process

    def _alive(self, process: Process) -> bool:
        assert process.popen.poll() is None, f"the API ended:\n{process.tail()}"
        try:
            return self.http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def worker(
        self,
        *,
        processes: int = 1,
        threads: int = 8,
        queues: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        name: str = "worker",
    ) -> Process:
        """Start a Dramatiq master and wait until its processes work."""
        args = ["dramatiq", "madeira.actors", "-p", str(processes), "-t", str(threads), *options]
        if queues:
            args += ["-Q", *queues]
        process = self.start(name, args, env)
        wait_until(lambda: self._ready(process, processes), START_S, what="the worker's start")
        return process

    def _ready(self, process: Process, processes: int) -> bool:
        assert process.popen.poll() is None, f"the worker ended:\n{process.tail()}"
        return process.tail(10**7).count("ready for action") >= processes

    def close(self) -> None:
        for process in reversed(self.processes):
            process.thaw()
            process.kill()
        self.http.close()
        if self._db is not None:
            self._db.close()

    # -- the way in ---------------------------------------------------------------------------------------------

    def sign(self, body: bytes, timestamp: int | None = None) -> dict[str, str]:
        stamp = str(int(time.time()) if timestamp is None else timestamp)
        mac = hmac.new(SECRET.encode(), stamp.encode() + b"\n" + body, hashlib.sha256).hexdigest()
        return {
            "X-Madeira-Source": "test",
            "X-Madeira-Timestamp": stamp,
            "X-Madeira-Signature": mac,
            "Content-Type": "application/json",
        }

    def send(self, body: bytes, client: httpx.Client | None = None) -> httpx.Response:
        return (client or self.http).post("/v1/events", content=body, headers=self.sign(body))

    def post(self, event_type: str = "a.b", payload: Any = None, *, event_id: str | None = None, **fields: Any) -> str:
        """Post an event that must be accepted; returns its id."""
        event_id = event_id or f"e-{uuid.uuid4().hex}"
        body = json.dumps({"event_id": event_id, "event_type": event_type, "payload": payload, **fields}).encode()
        answer = self.send(body)
        assert answer.status_code == 202, (answer.status_code, answer.text)
        return event_id

    def post_many(self, count: int, event_type: str = "a.b", *, threads: int = 8, **fields: Any) -> list[str]:
        """Post events in parallel."""
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda n: self.post(event_type, {"n": n}, **fields), range(count)))

    # -- what became of it --------------------------------------------------------------------------------------

    def rows(self, statement: str, *params: Any) -> list[dict[str, Any]]:
        if self._db is None or self._db.closed:
            self._db = psycopg.connect(self.database_url, autocommit=True, row_factory=dict_row)
        return self._db.execute(statement, params).fetchall()  # type: ignore[arg-type]

    def value(self, statement: str, *params: Any) -> Any:
        (row,) = self.rows(statement, *params)
        (value,) = row.values()
        return value

    def event(self, event_id: str) -> dict[str, Any]:
        (row,) = self.rows("SELECT * FROM event WHERE event_id = %s", event_id)
        return row

    def delivery(self, event_id: str) -> dict[str, Any]:
        (row,) = self.rows("SELECT d.* FROM delivery d JOIN event e ON e.seq = d.event_seq WHERE e.event_id = %s", event_id)
        return row

    def attempts(self, event_id: str) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT l.* FROM delivery_log l JOIN delivery d ON d.id = l.delivery_id JOIN event e ON e.seq = d.event_seq "
            "WHERE e.event_id = %s ORDER BY l.id",
            event_id,
        )

    def wait_status(self, event_id: str, *statuses: str, timeout: float = 20.0) -> dict[str, Any]:
        found: dict[str, Any] = wait_until(
            lambda: (row := self.event(event_id))["status"] in statuses and row, timeout, what=f"{event_id} {statuses}"
        )
        return found

    def unfinished(self) -> int:
        count: int = self.value("SELECT count(*) FROM event WHERE status IN ('pending', 'delivering')")
        return count

    def wait_all(self, timeout: float = 30.0) -> None:
        """Wait until every event has ended."""
        wait_until(lambda: self.unfinished() == 0, timeout, what="the end of all events", every=0.05)

    @property
    def redis(self) -> "redis.Redis":
        return redis.Redis.from_url(self.redis_url)

    def keys(self) -> list[str]:
        return sorted(key.decode() for key in self.redis.scan_iter(f"{self.namespace}:*"))

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.tail()}" for p in self.processes)


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Madeira]:
    """A Madeira whose processes end with the block; their logs are shown when the block fails."""
    madeira = Madeira(**options)
    try:
        yield madeira
    except BaseException:
        print(madeira.logs())
        raise
    finally:
        madeira.close()
