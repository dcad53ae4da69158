"""`madeira up` as a person runs it: the real program, embedded servers, and a terminal's signals."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from madeira.cli.running import DataFolder, members
from madeira.embedded import free_port
from tests import terminal
from tests.system.harness import wait_until


class Up:
    """A running `madeira up`, whose lines can be waited for."""

    def __init__(self, *arguments: str, environ: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._came = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            [*terminal.MADEIRA, "up", *arguments],
            env=environ,
            cwd=terminal.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._came:
                self.lines.append(line.rstrip())
                self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> str:
        def found() -> str | None:
            return next((line for line in self.lines if re.search(pattern, line)), None)

        with self._came:
            self._came.wait_for(lambda: found() or self._ended, timeout=timeout_s)
        line = found()
        assert line, f"no line has {pattern!r}:\n" + "\n".join(self.lines)
        return line

    def end(self, sig: int = signal.SIGINT) -> int:
        self.process.send_signal(sig)
        code = self.process.wait(60)
        self._reader.join(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Place:
    """A data folder and ports for one Madeira, and the commands that run beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = terminal.environ(
            MADEIRA_DATA_DIR=str(folder),
            MADEIRA_PORT=str(free_port()),
            MADEIRA_METRICS_PORT="0",
            MADEIRA_SCHEDULER_METRICS_PORT="0",
            MADEIRA_PROCESSES="1",
            MADEIRA_EGRESS_ALLOW="127.0.0.1",
            MADEIRA_BEAT_S="0.5",
        )
        self._ups: list[Up] = []

    def up(self, *arguments: str) -> Up:
        self._ups.append(Up(*arguments, environ=self.environ))
        return self._ups[-1]

    def run(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        done = terminal.run(self.environ, *arguments, given=stdin, code=code)
        return done.stdout + done.stderr

    def trace(self, identifier: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("trace", "--json", identifier))
        return found

    def accepts(self, event_id: str, *options: str) -> bool:
        event = {"event_id": event_id, "event_type": "order.created", "payload": 1}
        try:
            return event_id in self.run("send", *options, json.dumps(event))
        except AssertionError:
            return False

    def sessions(self) -> list[int]:
        note = DataFolder(self.folder).running()
        assert note is not None
        return list(note.sessions)

    def servers(self) -> list[int]:
        files = (self.folder / "postgres/data/postmaster.pid", self.folder / "valkey/data/valkey.pid")
        return [int(file.read_text().split()[0]) for file in files]

    def end(self) -> None:
        for up in self._ups:
            if up.process.poll() is None:
                up.end()


@pytest.fixture
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="madeira-up-"))
    place = Place(folder)
    yield place
    place.end()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[Place, Up]]:
    """A running demo, for tests that do not disturb it."""
    folder = Path(tempfile.mkdtemp(prefix="madeira-up-"))
    place = Place(folder)
    up = place.up("--demo")
    up.wait_for("the first event was delivered")
    yield place, up
    place.end()
    shutil.rmtree(folder)


def test_the_demo_tells_its_four_stories(demo: tuple[Place, Up]) -> None:
    """A newcomer sees four events taken, retried, refused and given up."""
    _, up = demo
    up.wait_for(r"the first event was delivered \d+\.\d s after the start")
    up.wait_for("scaled to")
    up.wait_for(r"demo-\d+-good +SUCCEEDED$")
    up.wait_for(r"demo-\d+-shaky +attempt 1: retryable \(HTTP 503\) -> again in")
    up.wait_for(r"demo-\d+-shaky +SUCCEEDED after 2 retries")
    up.wait_for(r"demo-\d+-refused +attempt 1: permanent \(HTTP 400\) -> given up")
    up.wait_for(r"demo-\d+-unwelcome +attempt 1: business \(HTTP 200\) -> again in")
    up.wait_for(r"demo-\d+-unwelcome +DEAD")
    up.wait_for(r"receiver.*attempt 3, signature good, answered 200.*-shaky")
    assert not [line for line in up.lines if "WRONG" in line]


@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("openssl")) and not os.environ.get("CI"), reason="needs curl and openssl"
)
def test_the_readme_s_own_event_arrives(demo: tuple[Place, Up]) -> None:
    """What a newcomer copies from the README is accepted, arrives verified, and is known when it is posted again."""
    place, up = demo
    (script,) = re.findall(r"```sh\n(BODY=.*?)```", (terminal.ROOT / "README.md").read_text(), re.DOTALL)
    script = script.replace(":8000/", f":{place.environ['MADEIRA_PORT']}/")
    assert "202 Accepted" in subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    up.wait_for("receiver.*signature good, answered 200.*order-1")
    up.wait_for("order-1 +SUCCEEDED")
    again = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert "200 OK" in again
    assert '"duplicate": true' in again


@pytest.mark.long
def test_the_commands_find_a_running_up(demo: tuple[Place, Up]) -> None:
    """send, trace, events, reconcile, migrate and doctor need no setting beside a running `up`."""
    place, up = demo
    assert "202 order-2" in place.run("send", '{"event_id": "order-2", "event_type": "order.created", "payload": 1}')
    up.wait_for("order-2 +SUCCEEDED")
    (event,) = place.trace("order-2")
    assert event["status"] == "succeeded"
    assert [a["outcome"] for d in event["deliveries"] for a in d["attempts"]] == ["succeeded"]
    assert "order-2" in place.run("trace", event["trace_id"])
    assert json.loads(place.run("events", "show", "--json", "order-2"))["payload"] == "1"
    assert "no event" in place.run("trace", "nothing", code=1)
    assert json.loads(place.run("migrate", "--json")) == {"applied": []}
    assert json.loads(place.run("reconcile", "--json"))["ran"] is True
    findings = json.loads(place.run("doctor", "--json"))
    assert not [f for f in findings if f["level"] == "error"]
    assert not [f for f in findings if f["what"] == "addresses" and f["level"] == "warning"], "its own receiver may be called"
    assert "answer 200" in place.run("endpoints", "test", "sample")
    assert {f["what"] for f in findings} >= {"postgres", "encoding", "standby", "migrations", "redis", "redis memory"}


def test_send_posts_every_line_and_tells_what_was_refused(demo: tuple[Place, Up]) -> None:
    """Lines on standard input are posted in order; one that is refused fails the command and spoils no other."""
    place, _ = demo
    lines = [json.dumps({"event_id": f"line-{i}", "event_type": "bulk.line", "payload": i}) for i in range(20)]
    lines.insert(7, '{"event_type": "not a name"}')
    told = place.run("send", "--parallel", "4", stdin="\n".join(lines), code=1)
    assert "1 of 21 events were not accepted" in told
    assert told.count("202 line-") == 20
    assert "422" in told


def test_a_second_up_is_refused(demo: tuple[Place, Up]) -> None:
    """Two of them on one data folder would be two masters of one set of servers."""
    place, up = demo
    told = place.run("up", code=1)
    assert f"process {up.process.pid}" in told
    assert "MADEIRA_DATA_DIR" in told
    assert "Traceback" not in told


@pytest.mark.long
def test_a_killed_up_leaves_nothing_and_loses_nothing(place: Place) -> None:
    """After kill -9 of `up` its processes end by themselves, and the next one goes on with the same data."""
    up = place.up("--demo")
    up.wait_for("the first event was delivered")
    place.run("send", '{"event_id": "kept-1", "event_type": "order.created", "payload": 1}')
    processes = [*place.sessions(), *place.servers()]
    up.end(signal.SIGKILL)
    wait_until(lambda: not [pid for pid in processes if members(pid)], 60, what="the end of what `up` had started")
    again = place.up("--demo")
    again.wait_for("the first event was delivered")
    assert place.trace("kept-1")[0]["event_id"] == "kept-1"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_is_killed_is_started_again(place: Place) -> None:
    """Whichever part is killed, `up` starts it again and events go on."""
    up = place.up("--demo")
    up.wait_for("the first event was delivered")
    for victim in ("workers", "api", "scheduler", "postgres", "valkey"):
        sessions = dict(zip(("receiver", "api", "workers", "scheduler"), place.sessions(), strict=True))
        pids = sessions | dict(zip(("postgres", "valkey"), place.servers(), strict=True))
        os.kill(pids[victim], signal.SIGKILL)
        up.wait_for(f"{victim} is started again")
        assert not members(pids[victim])
        wait_until(lambda: place.accepts(f"after-{victim}"), 60, what=f"the acceptance after the end of {victim}")  # noqa: B023
        up.wait_for(f"after-{victim} +SUCCEEDED")


@pytest.mark.long
def test_a_mistake_stops_the_start_with_one_line(place: Place) -> None:
    """Settings and the configuration file are checked before anything is left running."""
    place.environ["MADEIRA_PRT"] = "8000"
    told = place.run("up", code=1)
    assert told.splitlines() == ["Error: MADEIRA_PRT is not a setting of Madeira; did you mean MADEIRA_PORT?"]
    del place.environ["MADEIRA_PRT"]
    config = place.folder / "wrong.toml"
    config.write_text("[[endpoint]]\nname = 'e'\nurl = 'ftp://h'\n")
    place.environ["MADEIRA_CONFIG"] = str(config)
    told = place.run("up", code=1)
    assert "wrong.toml: endpoint[e].url: must be" in told
    assert "Traceback" not in told
    assert not [pid for pid in self_and_servers(place) if members(pid)]


def test_a_taken_port_is_told(place: Place) -> None:
    """The line names the setting that chooses another port."""
    import socket

    with socket.create_server(("127.0.0.1", int(place.environ["MADEIRA_PORT"]))):
        told = place.run("up", code=1)
    assert "set MADEIRA_PORT to another one" in told


@pytest.mark.long
def test_a_configuration_is_applied_at_the_start_and_changed_while_it_runs(place: Place) -> None:
    """The file of MADEIRA_CONFIG counts at the start; then `apply` changes it, in every process, and a restart keeps that."""
    config = place.folder / "rules.toml"
    text = '[[source]]\nname = "{}"\nsecrets = ["a-secret"]\n'
    config.write_text(text.format("one"))
    place.environ["MADEIRA_CONFIG"] = str(config)
    up = place.up()
    key_file = Path(re.sub(r".* is in (\S+);.*", r"\1", up.wait_for("a key for secrets was made")))
    assert key_file.stat().st_mode & 0o777 == 0o600
    up.wait_for("rules.toml is applied: 1 added")
    url = re.sub(r".*(http://\S+);.*", r"\1", up.wait_for("the API listens"))
    wait_until(lambda: _ready(url), 60, what="the start of the API")
    assert place.accepts("e-0", "--source", "one")

    other = place.folder / "other.toml"
    other.write_text(text.format("two"))
    assert "+ source two" in place.run("apply", "--dry-run", str(other))
    assert "two" not in place.run("export")
    assert json.loads(place.run("apply", "--json", str(other)))["added"] == ["source two"]
    wait_until(
        lambda: place.accepts("e-1", "--source", "two", "--secret", "a-secret"), 5, what="the acceptance by the new source"
    )
    told = place.run(
        "apply", "-", "--prune", stdin="[[source]]\nname = 'two'\n[[endpoint]]\nname = 'e'\nurl = 'ftp://h'\n", code=1
    )
    assert "source[two].secrets: is missing" in told
    assert "endpoint[e].url: must be" in told
    exported = place.run("export")
    assert 'name = "two"' in exported
    assert "sealed:" in exported
    assert "2 unchanged" in place.run("apply", "-", stdin=exported)

    up.process.send_signal(signal.SIGHUP)
    up.wait_for("SIGHUP: API and workers start their processes anew")
    wait_until(lambda: place.accepts("e-2", "--source", "two", "--secret", "a-secret"), 60, what="the acceptance after SIGHUP")
    processes = [*place.sessions(), *place.servers()]
    assert up.end() == 0
    assert not [line for line in up.lines if "is started again" in line]
    assert "everything is stopped" in up.lines[-1]
    assert not [pid for pid in processes if members(pid)]
    again = place.up()
    again.wait_for("rules.toml is applied: 1 unchanged, 1 not in the file and kept")
    assert not [line for line in again.lines if "a key for secrets was made" in line]


@pytest.mark.long
def test_what_workers_had_counted_outlasts_an_up(place: Place) -> None:
    """A deployment stops everything and starts it again: as after a restart of the workers alone, they count on."""
    config = place.folder / "rules.toml"
    config.write_text(
        '[[source]]\nname = "one"\nsecrets = ["a-secret"]\n'
        f'[[endpoint]]\nname = "away"\nurl = "http://127.0.0.1:{free_port()}/"\nretry = {{max_attempts = 1}}\n'
        '[[route]]\nname = "all"\nendpoint = "away"\n'
    )
    page = f"http://127.0.0.1:{free_port()}/metrics"
    place.environ |= {"MADEIRA_CONFIG": str(config), "MADEIRA_METRICS_PORT": page.split(":")[2].split("/")[0]}

    def attempts() -> list[str]:
        try:
            text = httpx.get(page).text
        except httpx.TransportError:
            return []
        return re.findall(r'madeira_delivery_attempts_total\{endpoint="away",outcome="retryable"\} (\S+)', text)

    up = place.up()
    up.wait_for("the API listens")
    wait_until(lambda: place.accepts("e-0", "--source", "one"), 60, what="the acceptance")
    wait_until(lambda: attempts() == ["1.0"], 60, what="the first attempt")
    up.end()
    again = place.up()
    again.wait_for("the API listens")
    wait_until(lambda: place.accepts("e-1", "--source", "one"), 60, what="the acceptance by the next one")
    again.wait_for("delivery.attempted .*event_id=e-1")
    assert wait_until(attempts, 60, what="the page of the next one") == ["2.0"]


@pytest.mark.long
def test_keys_are_changed_from_the_terminal(place: Place) -> None:
    """`keygen` makes a key, `reencrypt` brings everything under it, and then the old one is not needed any more."""
    config = place.folder / "rules.toml"
    config.write_text('[[source]]\nname = "one"\nsecrets = ["a-secret"]\n')
    place.environ["MADEIRA_CONFIG"] = str(config)
    old, new = place.run("keygen").strip(), place.run("keygen").strip()
    place.environ["MADEIRA_SECRET_KEY"] = old
    up = place.up()
    up.wait_for("rules.toml is applied")
    place.environ["MADEIRA_SECRET_KEY"] = f"{new},{old}"
    assert "~ source one" in place.run("reencrypt")
    assert "nothing to do" in place.run("reencrypt")
    place.environ["MADEIRA_SECRET_KEY"] = old
    assert "no key in MADEIRA_SECRET_KEY opens it" in place.run("reencrypt", code=1)
    place.environ["MADEIRA_SECRET_KEY"] = new
    assert "1 unchanged" in place.run("apply", str(config))


def self_and_servers(place: Place) -> list[int]:
    """Process ids that a stopped `up` has left in its folder, if any."""
    files = list(place.folder.glob("*/data/*.pid"))
    return [int(file.read_text().split()[0]) for file in files]


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False).is_success
    except httpx.HTTPError:
        return False
