"""What `madeira up --demo` adds: a configuration with a sample receiver, four events, and a view of what happens to them."""

import json
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx

from madeira.cli.common import program
from madeira.cli.listen import one_line
from madeira.cli.output import Output
from madeira.cli.send import post
from madeira.errors import SettingsError, StoreUnavailable
from madeira.settings import Settings
from madeira.store import timeline
from madeira.store.database import Database

#: Name and secret of the source that may post to the demo. No secret at all: the demo listens on this machine only.
SOURCE: Final = "demo"
SOURCE_SECRET: Final = "demo-secret"  # noqa: S105

#: The secret that calls of the sample receiver are signed with.
RECEIVER_SECRET: Final = "whsec_c2FtcGxlLXJlY2VpdmVyLXNlY3JldC1vZi1kZW1v"  # noqa: S105

#: The port that the sample receiver prefers.
RECEIVER_PORT: Final = 8900

#: Seconds between two looks at the tables.
_LOOK_S: Final = 0.2

#: Seconds to wait while they cannot be read.
_AWAY_S: Final = 2.0

#: Seconds between two questions whether the API is up.
_READY_S: Final = 0.05

#: Seconds that the API gets to come up.
_API_S: Final = 60.0

_CONFIG: Final = """\
# Written by `madeira up --demo` at each start.
# The times between attempts are scaled to seconds, so that you can watch; without this section they are 60 s to 30 min.

[[source]]
name = "{source}"
secrets = ["{source_secret}"]

[[endpoint]]
name = "sample"
url = "http://127.0.0.1:{port}/"
timeout = 5.0
secrets = ["{receiver_secret}"]
[endpoint.retry]
initial = 1
max = 8
max_attempts = 5

[[route]]
name = "everything"
endpoint = "sample"
"""

#: The sample events: what their receiver does about them, by their type.
_SAMPLES: Final = (
    ("good", "sample.good", "is taken at once"),
    ("shaky", "sample.shaky", "is answered 503 twice, then taken"),
    ("refused", "sample.refused", "is refused with 400"),
    ("unwelcome", "sample.unwelcome", 'is answered 200 with {"success": false} each time'),
)


def check(values: Settings) -> None:
    """Refuse a configuration file of one's own: the demo brings another.

    Raises:
        SettingsError: MADEIRA_CONFIG is set, or the API would be open to other machines.
    """
    if values.config is not None:
        raise SettingsError("--demo brings its own configuration file; unset MADEIRA_CONFIG, or leave out --demo")
    if values.host not in ("127.0.0.1", "::1", "localhost"):
        raise SettingsError(
            f"--demo uses a secret that everybody knows, and does not listen on {values.host}; unset MADEIRA_HOST"
        )


def write_config(folder: Path, port: int) -> Path:
    """Write the configuration of the demo; `port` is the sample receiver's."""
    file = folder / "demo.toml"
    text = _CONFIG.format(source=SOURCE, source_secret=SOURCE_SECRET, port=port, receiver_secret=RECEIVER_SECRET)
    file.write_text(text)
    return file


class Show:
    """Posts the sample events and tells what happens to all events, in a thread of its own, until it is stopped.

    `url` is the API's; `started_at` is the Unix time at which the person began to wait.
    """

    def __init__(self, values: Settings, url: str, output: Output, started_at: float) -> None:
        self._url = url
        self._output = output
        self._started_at = started_at
        self._database = Database(url=values.database_url, application="madeira-demo", pool_max=1)
        self._statuses: dict[int, str] = {}
        self._attempts: set[int] = set()
        self._delivered = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; nothing is said afterwards."""
        self._stopped.set()
        self._thread.join()
        self._database.close()

    def _run(self) -> None:
        self._database.open()
        if not self._wait_for_api():
            return
        since = self._now()
        self._post_samples()
        while not self._stopped.wait(_LOOK_S):
            try:
                self._look(since)
            except StoreUnavailable:
                self._say("the tables cannot be read; this view goes on when they are back")
                self._stopped.wait(_AWAY_S)

    def _wait_for_api(self) -> bool:
        deadline = time.monotonic() + _API_S
        while time.monotonic() < deadline and not self._stopped.wait(_READY_S):
            try:
                if httpx.get(f"{self._url}/readyz", timeout=2, trust_env=False).status_code == httpx.codes.OK:
                    return True
            except httpx.HTTPError:
                # It does not listen yet.
                continue
        if not self._stopped.is_set():
            self._say("the API did not come up; its lines above say why")
        return False

    def _now(self) -> datetime:
        with self._database.connection() as conn:
            now: datetime = timeline.now(conn)
            return now

    def _post_samples(self) -> None:
        self._say("four sample events are posted; their receiver is `receiver`, and the times between its attempts are")
        self._say("scaled to seconds here (in earnest they begin at 60 s and grow to 30 min)")
        run = time.strftime("%H%M%S", time.localtime(self._started_at))
        with httpx.Client(base_url=self._url, timeout=10, trust_env=False) as client:
            for name, kind, what in _SAMPLES:
                event = {"event_id": f"demo-{run}-{name}", "event_type": kind, "payload": {"amount": 42, "about": what}}
                answer = post(client, SOURCE, SOURCE_SECRET, json.dumps(event).encode())
                if not answer.is_success:
                    self._say(f"{name}: the API answered {answer.status_code}: {one_line(answer.text)}")

    def _look(self, since: datetime) -> None:
        with self._database.connection() as conn:
            events, attempts = timeline.recent(conn, since)
        names = {event["seq"]: f"{one_line(event['event_id']):<22}" for event in events}
        told = [(e["created_at"], names[e["seq"]], _accepted(e)) for e in events if e["seq"] not in self._statuses]
        told += [(a["recorded_at"], names[a["seq"]], _attempt(a)) for a in attempts if a["id"] not in self._attempts]
        told.sort(key=lambda t: t[0])
        told += [(e["updated_at"], names[e["seq"]], end) for e in events if (end := self._end(e))]
        for at, name, text in told:
            self._say(f"{at.astimezone():%H:%M:%S}.{at.microsecond // 1000:03} {name} {text}")
        self._statuses.update((e["seq"], e["status"]) for e in events)
        self._attempts.update(a["id"] for a in attempts)
        self._tell_first(attempts)

    def _end(self, event: Mapping[str, Any]) -> str | None:
        status = event["status"]
        if status in ("pending", "delivering") or self._statuses.get(event["seq"]) == status:
            return None
        if status == "succeeded":
            return f"SUCCEEDED after {_retries(event['retry_count'])}" if event["retry_count"] else "SUCCEEDED"
        why = f": {event['reason']}" if event["reason"] else ""
        return f"{status.upper()}{why} ({program()} trace {one_line(event['event_id'])})"

    def _tell_first(self, attempts: list[dict[str, Any]]) -> None:
        first = next((a for a in attempts if a["outcome"] == "succeeded"), None)
        if self._delivered or first is None:
            return
        self._delivered = True
        seconds = first["recorded_at"].timestamp() - self._started_at
        self._say(f"the first event was delivered {seconds:.1f} s after the start")

    def _say(self, text: str) -> None:
        self._output.line("timeline", text)


def _retries(count: int) -> str:
    return "1 retry" if count == 1 else f"{count} retries"


def _accepted(event: Mapping[str, Any]) -> str:
    return f"accepted ({one_line(event['event_type'])})"


def _attempt(attempt: Mapping[str, Any]) -> str:
    parts = [f"attempt {attempt['attempt']}:", attempt["outcome"]]
    if attempt["status_code"]:
        parts.append(f"(HTTP {attempt['status_code']})")
    elif attempt["error_code"]:
        parts.append(f"({attempt['error_code']})")
    if attempt["settled_as"] == "pending" and attempt["is_latest"]:
        parts.append(f"-> again in {max(0.0, attempt['next_in_s']):.1f} s")
    elif attempt["settled_as"] == "dead":
        parts.append("-> given up")
    if attempt["reason"]:
        parts.append(f"[{one_line(attempt['reason'])}]")
    return " ".join(parts)
