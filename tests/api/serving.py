"""The API as it is run: gunicorn with its configuration file, on a port of its own, and clients that sign."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from madeira.delivery.signing import sign
from madeira.embedded import free_port
from tests.system.harness import KEY, START_S, configure, wait_until
from tests.terminal import environ

ROOT = Path(__file__).parent.parent.parent
SECRET = "a-secret-of-the-tests"
ADMIN_TOKEN = "a-token-of-the-tests"

#: Two sources, so that one can try to see what belongs to the other; one is rotating its secret.
CONFIG = f"""
[[source]]
name = "shop"
secrets = ["{SECRET}"]

[[source]]
name = "other"
secrets = ["another-secret-new", "another-secret-old"]

[[endpoint]]
name = "sink"
url = "http://127.0.0.1:9/"

[[route]]
name = "all"
endpoint = "sink"
"""


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    duration_s: float
    #: The lines of ``Set-Cookie``, of which there may be several.
    cookies: tuple[str, ...] = ()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def signed(body: bytes, *, source: str = "shop", secret: str = SECRET, at: float | None = None) -> dict[str, str]:
    """The headers of a well-made post of `body`."""
    timestamp = str(int(time.time() if at is None else at))
    return {
        "Content-Type": "application/json",
        "X-Madeira-Source": source,
        "X-Madeira-Timestamp": timestamp,
        "X-Madeira-Signature": sign(secret, timestamp, body),
    }


def event(event_id: str | None = None, **fields: Any) -> bytes:
    """The body of a small event."""
    return json.dumps({"event_type": "order.paid", "payload": {"n": 1}, "event_id": event_id} | fields).encode()


class Api:
    """One gunicorn with its workers."""

    def __init__(self, *, folder: Path, database_url: str, redis_url: str, config: str | None = CONFIG, **env: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.database_url = database_url
        self.port = free_port()
        self.log = folder / "api.log"
        self.env = environ() | {
            "MADEIRA_DATABASE_URL": database_url,
            "MADEIRA_REDIS_URL": redis_url,
            "MADEIRA_SECRET_KEY": KEY,
            "MADEIRA_DATA_DIR": str(folder / "data"),
            "MADEIRA_PORT": str(self.port),
            "MADEIRA_PROCESSES": "2",
            "MADEIRA_EGRESS_ALLOW": "127.0.0.0/8,::1",
            "MADEIRA_THREADS": "16",
            "MADEIRA_ADMIN_TOKEN": ADMIN_TOKEN,
            **env,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.config = config or ""
        if config is not None:
            self.configure(config)

    def configure(self, config: str) -> None:
        """Make the configuration what the TOML text `config` says, and nothing else."""
        self.config = config
        configure(self.database_url, config)

    @property
    def pid(self) -> int:
        """Process id of the master."""
        assert self._process is not None
        return self._process.pid

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, oldest first."""
        return [int(p) for p in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def start(self, *args: str, files: int | None = None) -> "Api":
        """Start, with further arguments of gunicorn and a limit of open files, and wait until it answers."""
        command = [sys.executable, "-m", "gunicorn", "-c", "deploy/gunicorn.conf.py", *args, "madeira.api:app"]
        if files is not None:
            command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=log, stderr=log)
        wait_until(self._alive, START_S, what=f"an answer of the API, whose log is {self.log}")
        return self

    def terminate(self) -> None:
        """SIGTERM to the master."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float = 40) -> int:
        """Wait for the end; the exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """Stop in order."""
        if self._process is not None and self._process.poll() is None:
            self.terminate()
            self.wait()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout_s: float = 20
    ) -> Reply:
        """One request on a connection of its own."""
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            content = answer.read()
        headers = {k.lower(): v for k, v in answer.getheaders()}
        cookies = tuple(answer.headers.get_all("Set-Cookie", ()))
        return Reply(answer.status, headers, content, time.perf_counter() - started, cookies)

    def post(self, body: bytes, headers: Mapping[str, str] | None = None, **signing: Any) -> Reply:
        """Post `body` as an event, signed, with `headers` over those of the signature."""
        return self.request("POST", "/v1/events", body, signed(body, **signing) | dict(headers or {}))

    def get(self, path: str, *, admin: bool = False, source: str | None = None) -> Reply:
        """Read, as a stranger, the administrator, or a source."""
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"} if admin else signed(b"", source=source) if source else {}
        return self.request("GET", path, None, headers)

    def raw(self, data: bytes) -> Reply:
        """Send bytes as they are and read the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as s:
            s.sendall(data)
            answer = http.client.HTTPResponse(s)
            answer.begin()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read(), 0.0)

    def _alive(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"gunicorn ended: {self.log.read_text()}"
        with contextlib.suppress(OSError):
            return self.request("GET", "/healthz").status == 200
        return False


def rows(database_url: str, what: str = "event") -> int:
    """How many rows a table has."""
    with psycopg.connect(database_url) as c:
        return c.execute(f"SELECT count(*) FROM {what}").fetchone()[0]


def check(reply: Reply, status: int, *fields: str) -> None:
    """The status, and a problem document that names exactly `fields`."""
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/problem+json"
    problem = reply.json
    assert problem["status"] == status
    assert problem["type"].startswith("urn:madeira:problem:")
    assert problem["title"]
    assert problem["detail"]
    assert "Traceback" not in reply.body.decode()
    assert {e["field"] for e in problem.get("errors", [])} == set(fields)
