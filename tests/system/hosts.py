"""A Madeira on several hosts of a network: servers on hosts of their own, doors, workers, and a receiver.

Everything runs as it does on real hosts: names, processes, data folders and addresses of each host are its own, and what is cut
off hangs, since nobody tells it. `tests.system.network` makes the hosts; here is what runs on them, and
`tests.system.senders` has those who send events.
"""

import contextlib
import http.client
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import redis
from prometheus_client.parser import text_string_to_metric_families

from madeira.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from madeira.store.migrate import migrate
from tests.receiver import Answer, Call, Receiver
from tests.system import crash
from tests.system.crash import Fault
from tests.system.harness import Madeira, Process, running, threading_wait, toml, wait_until
from tests.system.network import NETWORK, OUTSIDE, Host, Network, network

PASSWORD: Final = "password-of-the-hosts"

#: The address that leads to whichever Redis is in charge.
REDIS: Final = f"{NETWORK}.20"

REDIS_PORT: Final = 6379
POSTGRES_PORT: Final = 5432
API_PORT: Final = 8000
METRICS_PORT: Final = 9191

#: A call's time and the rest of its lease, in seconds: less than in production, and far more than packets take.
TIMEOUT_S: Final = 3.0
MARGIN_S: Final = 4.0
SCALED: Final = {
    "MADEIRA_BEAT_S": "0.5",
    "MADEIRA_SILENCE_S": "3",
    "MADEIRA_LEASE_MARGIN_S": str(MARGIN_S),
    "MADEIRA_RECONCILE_S": "2",
    "MADEIRA_PORT": str(API_PORT),
    "MADEIRA_PROCESSES": "1",
    "MADEIRA_EGRESS_ALLOW": f"{NETWORK}.0/24",
}

#: Threads of a worker: so many deliveries can be in its hands.
THREADS: Final = 8


class _Elsewhere(EmbeddedServer):
    """A server on a host of the network instead of on loopback."""

    fixed_port = 0

    def __init__(self, *, host: Host, folder: Path, options: Mapping[str, str]) -> None:
        super().__init__(folder=folder, options=options)
        self.host = host

    @property
    def url(self) -> str:
        return super().url.replace("127.0.0.1", self.host.address)

    def _load_access(self) -> None:
        self._access = {"password": PASSWORD, "port": self.fixed_port}

    def _as_account(self, command: Sequence[str], death_signal: int | None) -> list[str]:
        return self.host.on_network(*super()._as_account(command, death_signal))


class Postgres(_Elsewhere, EmbeddedPostgres):
    """A Postgres on a host."""

    fixed_port = POSTGRES_PORT

    def __init__(self, *, host: Host, folder: Path) -> None:
        super().__init__(host=host, folder=folder, options={"listen_addresses": "0.0.0.0", "fsync": "off"})

    def url_of(self, database: str) -> str:
        return super().url_of(database).replace("127.0.0.1", self.host.address)

    def _make_data(self) -> None:
        super()._make_data()
        with (self.data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {NETWORK}.0/24 scram-sha-256\nhost replication all {NETWORK}.0/24 scram-sha-256\n")


class Valkey(_Elsewhere, EmbeddedValkey):
    """A Valkey on a host; `primary` is the one whose replica it is."""

    fixed_port = REDIS_PORT

    def __init__(self, *, host: Host, folder: Path, primary: "Valkey | None" = None) -> None:
        options = {"bind": "0.0.0.0", "repl-diskless-sync-delay": "0"}
        if primary:
            options |= {"replicaof": f"{primary.host.address} {REDIS_PORT}", "masterauth": PASSWORD}
        super().__init__(host=host, folder=folder, options=options)

    def _command(self) -> list[str]:
        command = super()._command()
        file = self.folder / "valkey.conf"
        # One directive with two values, which the base class would quote as one.
        file.write_text("".join(_unquoted(line) for line in file.read_text().splitlines(keepends=True)))
        return command

    def client(self) -> "redis.Redis":
        """A client that asks this very server."""
        return redis.Redis.from_url(self.url, socket_timeout=2.0)


def _unquoted(line: str) -> str:
    return line.replace('"', "") if line.startswith("replicaof ") else line


# -- those who receive ----------------------------------------------------------------------------------------------------

#: Of so many events to `/flaky` one is refused for good, and of so many the first attempt fails.
REFUSED_EVERY: Final = 40
FLAKY_EVERY: Final = 10


def receive(call: Call) -> Answer:
    """Takes a moment; the ordered lane and the flaky one fail now and then, the flaky one also for good."""
    number = call.json()["payload"]["n"]
    first = call.headers["x-madeira-attempt"] == "1"
    if call.path == "/flaky" and is_refused(number):
        return Answer(status=400, delay_s=0.05)
    fails = call.path != "/steady" and first and number % FLAKY_EVERY == 0
    return Answer(status=503 if fails else 200, delay_s=0.05)


def is_refused(number: int) -> bool:
    """Whether `/flaky` refuses the event of that number for good."""
    return number % REFUSED_EVERY == 7


def configuration(receiver: Receiver) -> str:
    """Each event of the one kind goes to two endpoints, each of the other to one that wants them in order."""
    retry = {"initial": 0.3, "max": 2, "max_attempts": 50}
    fields: dict[str, Any] = {"timeout": TIMEOUT_S, "retry": retry}
    endpoints = {name: fields | {"url": receiver.url(f"/{name}")} for name in ("steady", "flaky", "ordered")}
    endpoints["ordered"]["ordering"] = "endpoint"
    kinds = {"steady": "a.*", "flaky": "a.*", "ordered": "o.*"}
    return toml(endpoints, [{"name": name, "event_type": kind, "endpoint": name} for name, kind in kinds.items()])


# -- the site ---------------------------------------------------------------------------------------------------------------


@dataclass
class Site:
    """Two doors, three workers, the scheduler on the first of them, one Postgres, and Redis behind an address of its own."""

    net: Network
    madeira: Madeira
    receiver: Receiver
    folder: Path
    postgres: Postgres
    #: The Redis in charge.
    redis: Valkey
    #: Everything that has to be stopped in the end.
    servers: list[EmbeddedServer]
    apis: list[Host] = field(default_factory=list)
    workers: list[Host] = field(default_factory=list)
    _processes: dict[str, Process] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(12))

    def start(self) -> None:
        """Start the doors, the workers and the scheduler, and wait until they work."""
        self.apis = [self.net.host(f"api{n}", 30 + n) for n in (1, 2)]
        self.workers = [self.net.host(f"worker{n}", 40 + n) for n in (1, 2, 3)]
        for host in self.apis:
            self._start(host, "gunicorn", "-c", "deploy/gunicorn.conf.py", "madeira.api:app")
        for host in self.workers:
            self._start(host, "dramatiq", "madeira.actors", "-p", "1", "-t", str(THREADS))
        for host in self.apis:
            wait_until(lambda door=host.address: self.ready(door)[0] == 200, 120, what=f"the start of {host.name}")
        for host in self.workers:
            process = self._processes[host.name]
            wait_until(lambda p=process: "ready for action" in p.tail(10**7), 120, what=f"the start of {host.name}")
        first = self.workers[0]
        env = self._env(first) | {"MADEIRA_METRICS_PORT": "0"}
        self._processes["scheduler"] = self.madeira.start("scheduler", first.inside("periodiq", "madeira.actors"), env)

    def _start(self, host: Host, *command: str) -> None:
        self._processes[host.name] = self.madeira.start(host.name, host.inside(*command), self._env(host))

    def _env(self, host: Host) -> dict[str, str]:
        data = self.folder / host.name
        return {"MADEIRA_HOST": host.address, "MADEIRA_DATA_DIR": str(data), "MADEIRA_METRICS_PORT": str(METRICS_PORT)}

    def tend(self) -> None:
        """Nothing may end, whatever is cut off."""
        for name, process in self._processes.items():
            assert process.popen.poll() is None, f"{name} ended:\n{process.tail()}"

    def stay(self, seconds: float) -> None:
        """Let time pass, as a supervisor does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.tend()
            threading_wait(0.1)

    def wait(self, predicate: Callable[[], Any], timeout: float, what: str) -> float:
        """Wait for something meanwhile; returns the seconds that it took."""
        started = time.monotonic()

        def tended() -> Any:
            self.tend()
            return predicate()

        wait_until(tended, timeout, what=what, every=0.1)
        return time.monotonic() - started

    def ready(self, door: str) -> tuple[int, float]:
        """What a door answers when it is asked whether it is ready: status and seconds; 0 when nothing."""
        started = time.monotonic()
        connection = http.client.HTTPConnection(door, API_PORT, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status, time.monotonic() - started
        except OSError:
            return 0, time.monotonic() - started
        finally:
            connection.close()

    def hands(self, host: Host) -> frozenset[int]:
        """The deliveries in the hands of a host's worker, as Redis has it."""
        held = self.redis.client().hgetall(f"{self.madeira.namespace}:deliver:held")
        mine = [key for key, note in held.items() if note.split()[1].startswith(f"{host.name}.".encode())]
        return frozenset(int(key.split(b":")[0]) for key in mine)

    def cut(self, kind: str, host: Host, *others: Host) -> Fault:
        """Cut a host off from others."""
        at = time.time()
        for other in others:
            self.net.cut(host, other, *([REDIS] if other is self.redis.host else []))
        # What a worker asked for before may still be handed out to it.
        threading_wait(crash.AFTERLIFE_S)
        return Fault(kind, at, self.hands(host))

    def called_by(self, host: Host, since: float) -> int:
        """How many calls a host's worker began since then, and has recorded."""
        statement = "SELECT count(*) FROM delivery_log WHERE worker LIKE %s AND started_at > to_timestamp(%s)"
        found: int = self.madeira.value(statement, f"{host.name}.%", since)
        return found

    # -- the failover of Redis ----------------------------------------------------------------------------------

    def standby(self, *, replicates: bool) -> Valkey:
        """A second Redis, empty, or one that follows the one in charge and has caught up."""
        number = next(self._numbers)
        host = self.net.host(f"redis{number}", number)
        server = Valkey(host=host, folder=self.folder / host.name, primary=self.redis if replicates else None)
        self.servers.append(server)
        server.start()
        if replicates:
            client = server.client()
            self.wait(lambda: client.info("replication")["master_link_status"] == "up", 30, "the replica to follow")
        return server

    def fail_over(self, server: Valkey) -> None:
        """The one in charge is gone from the network, and `server` takes its address."""
        self.redis.host.unplug()
        self.stay(2.0)
        server.client().replicaof("NO", "ONE")
        self.net.move(REDIS, server.host)
        self.redis.kill()
        self.redis = server

    # -- afterwards ---------------------------------------------------------------------------------------------

    def numbers(self, host: Host, port: int) -> Counter[tuple[str, ...]]:
        """The counters of a host's page: name and values of the labels, in the order of their names."""
        with urlopen(f"http://{host.address}:{port}/metrics", timeout=5) as page:
            text = page.read().decode()
        found: Counter[tuple[str, ...]] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found[(sample.name, *labels)] += sample.value  # type: ignore[assignment]
        return found


@contextlib.contextmanager
def site(tmp_path: Path) -> Iterator[Site]:
    """A site that works; all of it is gone after the block."""
    folder = Path(tempfile.mkdtemp(prefix="madeira-"))
    folder.chmod(0o711)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        net = stack.enter_context(network())
        postgres = Postgres(host=net.host("postgres", 10), folder=folder / "postgres")
        valkey = Valkey(host=net.host("redis11", 11), folder=folder / "redis11")
        servers: list[EmbeddedServer] = [postgres, valkey]
        stack.callback(lambda: [server.stop() for server in servers])
        postgres.start()
        valkey.start()
        net.move(REDIS, valkey.host)
        migrate(postgres.url)
        receiver = stack.enter_context(Receiver(default=receive, host=OUTSIDE))
        madeira = stack.enter_context(
            running(
                folder=tmp_path,
                database_url=postgres.url,
                redis_url=valkey.url.replace(valkey.host.address, REDIS),
                config=configuration(receiver),
                env=SCALED,
            )
        )
        site = Site(net, madeira, receiver, folder, postgres, valkey, servers)
        site.start()
        yield site
