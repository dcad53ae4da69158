"""A running Madeira, as somebody sees it who has addresses, a token and a terminal: what all ways of running it have in common.

Which one is said by the environment; where it says nothing, `madeira up` is started for the test.

============================ =========================================================================================
``JOURNEY_API``              address of the API
``JOURNEY_TOKEN``            its administrator's token
``JOURNEY_METRICS``          addresses of the workers' metrics pages, with spaces between them
``JOURNEY_MADEIRA``          the command that is ``madeira`` beside it, such as ``docker exec -i madeira-api-1 madeira``
``JOURNEY_STOP``             the command that sends SIGTERM to all of Madeira's own processes and waits for their end
``JOURNEY_START``            the command that starts them again
``JOURNEY_LISTEN``           address of this machine at which the workers find the test's receiver (default 127.0.0.1)
============================ =========================================================================================
"""

import hashlib
import hmac
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from madeira.embedded import free_port
from tests import terminal
from tests.system.harness import ROOT, wait_until

#: Seconds for everything that may take a while: a container that starts, a schedule that comes round.
PATIENCE_S = 90.0

#: One for all: to make one costs more than to ask.
_HTTP = httpx.Client(timeout=15, trust_env=False)


@dataclass(kw_only=True)
class Place:
    """Where a Madeira is."""

    api: str
    token: str
    metrics: Sequence[str]
    madeira: Sequence[str]
    listen: str = "127.0.0.1"
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def begin_to_stop(self) -> subprocess.Popen[bytes]:
        """Tell it to stop; the process ends when it has stopped, with 0 if all went well."""
        return subprocess.Popen(shlex.split(self.environ["JOURNEY_STOP"]), stdout=subprocess.DEVNULL)

    def start(self) -> None:
        """Start it again."""
        subprocess.run(shlex.split(self.environ["JOURNEY_START"]), stdout=subprocess.DEVNULL, check=True)

    # -- what one does with it --------------------------------------------------------------------------------------

    def run(self, *arguments: str, stdin: str = "") -> str:
        """One command of `madeira`; its standard output."""
        done = subprocess.run(
            [*self.madeira, *arguments],
            env=self.environ,
            cwd=ROOT,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def post(self, source: str, secret: str, body: Mapping[str, Any]) -> httpx.Response:
        """Post an event as the README does it."""
        raw = json.dumps(body).encode()
        now = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "X-Madeira-Source": source,
            "X-Madeira-Timestamp": now,
            "X-Madeira-Signature": hmac.new(secret.encode(), f"{now}\n".encode() + raw, hashlib.sha256).hexdigest(),
        }
        return _HTTP.post(f"{self.api}/v1/events", content=raw, headers=headers)

    def ask(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """Ask the API as the administrator."""
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = _HTTP.request(method, f"{self.api}{path}", params=query, json=body, headers=headers)
        assert answer.is_success, f"{answer.status_code} {answer.text}"
        return answer.json()

    def event(self, source: str, event_id: str, *statuses: str) -> Any:
        """The event, once it is in one of `statuses`."""

        def look() -> Any:
            found = self.ask("GET", f"/v1/events/{event_id}", source=source)
            return found if found["status"] in statuses else None

        return wait_until(look, PATIENCE_S, what=f"{event_id} {statuses}", every=0.1)

    def count(self, pages: Sequence[str], name: str, **labels: str) -> float:
        """What a counter is over some metrics pages."""
        total = 0.0
        for page in pages:
            for line in _HTTP.get(page).text.splitlines():
                found = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
                if found and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', found[1])).items():
                    total += float(found[2])
        return total

    def ready(self) -> bool:
        """Whether the API says that it can work, and the workers show their numbers."""
        return all(_answers(page) for page in (f"{self.api}/readyz", *self.metrics))

    def workers_have_heard(self) -> bool:
        """Whether SIGTERM has reached the workers: their metrics pages end at once, what they have in hand does not."""
        return not any(_answers(page) for page in self.metrics)


def _answers(page: str) -> bool:
    try:
        return _HTTP.get(page).is_success
    except httpx.HTTPError:
        return False


def given() -> Place | None:
    """The Madeira that the environment names; None when it names none."""
    if not os.environ.get("JOURNEY_API"):
        return None
    return Place(
        api=os.environ["JOURNEY_API"].rstrip("/"),
        token=os.environ["JOURNEY_TOKEN"],
        metrics=os.environ["JOURNEY_METRICS"].split(),
        madeira=shlex.split(os.environ["JOURNEY_MADEIRA"]),
        listen=os.environ.get("JOURNEY_LISTEN", "127.0.0.1"),
    )


class Up(Place):
    """A `madeira up` of the test's own, in a folder."""

    def __init__(self, folder: Path) -> None:
        port, metrics = free_port(), free_port()
        environ = terminal.environ()
        environ |= {
            "MADEIRA_DATA_DIR": str(folder),
            "MADEIRA_PORT": str(port),
            "MADEIRA_METRICS_PORT": str(metrics),
            "MADEIRA_PROCESSES": "1",
            "MADEIRA_THREADS": "8",
            "MADEIRA_ADMIN_TOKEN": "the-token-of-the-journey",
            "MADEIRA_EGRESS_ALLOW": "127.0.0.1",
        }
        super().__init__(
            api=f"http://127.0.0.1:{port}",
            token=environ["MADEIRA_ADMIN_TOKEN"],
            metrics=[f"http://127.0.0.1:{metrics}/metrics"],
            madeira=[sys.executable, "-m", "madeira.cli"],
            environ=environ,
        )
        self._log = folder / "up.log"
        self._process: subprocess.Popen[bytes] | None = None

    def begin_to_stop(self) -> subprocess.Popen[bytes]:
        """SIGTERM; what ends is `up` itself."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process

    def start(self) -> None:
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [*self.madeira, "up"], env=self.environ, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def end(self) -> None:
        """Stop it for good, and show what it has said."""
        if self._process is not None and self._process.poll() is None:
            self.begin_to_stop().wait(60)
        print(self._log.read_text())
