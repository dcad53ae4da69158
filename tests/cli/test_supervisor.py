import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from madeira.cli import common
from madeira.cli.output import Output
from madeira.cli.running import AlreadyRunning, DataFolder, Note, members
from madeira.cli.supervisor import Program, Supervisor
from tests.system.harness import wait_until


class Recorder(Output):
    """Keeps the lines, so that a test can wait for one."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.lines: list[str] = []
        self._came = threading.Condition()

    def line(self, name: str, text: str, *, bold: bool = False) -> None:
        with self._came:
            self.lines.append(f"{name}: {text}")
            self._came.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> str:
        def found() -> list[str]:
            return [line for line in self.lines if re.search(pattern, line)]

        with self._came:
            assert self._came.wait_for(lambda: len(found()) >= count, timeout=20), f"{pattern!r} not in {self.lines}"
            return found()[count - 1]


#: A program that says its process id and ends by SIGTERM.
PLAIN = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"

#: One with a child that goes on when its parent is killed.
WITH_CHILD = (
    "import os, signal\n"
    "child = os.fork()\n"
    "if child: print('pid', os.getpid(), 'child', child, flush=True)\n"
    "else: signal.signal(signal.SIGTERM, signal.SIG_IGN) if IGNORES else None\n"
    "while True: signal.pause()\n"
)

#: One with a child that, when it is told to end, first finishes what it has in hand: waits for a file.
WITH_WORK = (
    "import os, signal, time\n"
    "say = lambda text: os.write(1, (text + chr(10)).encode())\n"
    "child = os.fork()\n"
    "if child: say(f'pid {os.getpid()} child {child}')\n"
    "else: signal.signal(signal.SIGTERM, lambda *_: say('told'))\n"
    "while child: signal.pause()\n"
    "signal.pause()\n"
    "while not os.path.exists('go'): time.sleep(0.01)\n"
    "say('finished')\n"
)

#: One that does not stop when it is told to.
DEAF = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid', os.getpid(), flush=True)\n"
    "while True: signal.pause()"
)

#: One that says so when it is to read its configuration again, and when it stops.
TALKATIVE = (
    "import os, signal, sys\n"
    # Written, not printed: a signal may come in the middle of a print, which refuses to be entered twice.
    "say = lambda text: os.write(1, (text + chr(10)).encode())\n"
    "signal.signal(signal.SIGHUP, lambda *_: say('reads again'))\n"
    "signal.signal(signal.SIGTERM, lambda *_: (say('stops'), os._exit(0)))\n"
    "say(f'pid {os.getpid()}')\n"
    "while True: signal.pause()"
)


@pytest.fixture
def output() -> Recorder:
    return Recorder()


@pytest.fixture
def supervisor(output: Recorder) -> Iterator[Supervisor]:
    supervisor = Supervisor(output)
    yield supervisor
    supervisor.ask_to_stop()
    supervisor.stop()


@pytest.fixture
def program(output: Recorder, tmp_path: Path) -> Callable[..., Program]:
    def make(name: str, code: str, stop_s: float = 10.0) -> Program:
        return Program(
            name=name,
            command=[sys.executable, "-c", code],
            environ=os.environ,
            cwd=tmp_path,
            output=output,
            stop_s=stop_s,
            reload_signal=signal.SIGHUP,
        )

    return make


@pytest.fixture
def running(supervisor: Supervisor) -> Iterator[Callable[[], None]]:
    """Lets the supervisor look after its parts, in a thread that lives as long as the test."""
    thread = threading.Thread(target=supervisor.run)
    yield thread.start
    supervisor.ask_to_stop()
    thread.join()


def number(line: str, word: str = "pid") -> int:
    found = re.search(rf"{word} (\d+)", line)
    assert found
    return int(found.group(1))


def test_what_ends_is_started_again(
    supervisor: Supervisor, program: Callable[..., Program], output: Recorder, running: Callable[[], None]
) -> None:
    """A program that was killed runs again soon, and the log says how it ended."""
    supervisor.start(program("a", PLAIN))
    running()
    os.kill(number(output.wait_for("a: pid")), signal.SIGKILL)
    output.wait_for("a was killed by signal SIGKILL; it is started again")
    output.wait_for("a: pid", count=2)


def test_what_ends_again_and_again_is_tried_at_longer_intervals(
    supervisor: Supervisor, program: Callable[..., Program], output: Recorder, running: Callable[[], None]
) -> None:
    """The supervisor never gives up, and never spins."""
    supervisor.start(program("a", "raise SystemExit(3)"))
    running()
    waits = [float(output.wait_for("a ended with exit code 3", n).split(" in ")[1].removesuffix(" s")) for n in (1, 2, 3)]
    assert waits == [0.5, 1.0, 2.0]


def test_children_that_a_killed_program_left_are_ended(
    supervisor: Supervisor, program: Callable[..., Program], output: Recorder, running: Callable[[], None]
) -> None:
    supervisor.start(program("a", WITH_CHILD.replace("IGNORES", "False")))
    running()
    line = output.wait_for("a: pid")
    os.kill(number(line), signal.SIGKILL)
    output.wait_for("a: pid", count=2)
    wait_until(lambda: not members(number(line)))


@pytest.mark.parametrize("stops", [False, True])
def test_children_that_a_killed_program_left_finish_what_they_have_in_hand(
    supervisor: Supervisor,
    program: Callable[..., Program],
    output: Recorder,
    running: Callable[[], None],
    tmp_path: Path,
    stops: bool,
) -> None:
    """They are told once to end, and get as long as the program would: beside the new ones, and where everything is stopped."""
    supervisor.start(program("a", WITH_WORK))
    running()
    os.kill(number(output.wait_for("a: pid")), signal.SIGKILL)
    output.wait_for("a has ended; what it has left finishes what it has in hand")
    output.wait_for("a: told")
    output.wait_for("a: pid", count=2)
    if stops:
        supervisor.ask_to_stop()
        stopping = threading.Thread(target=supervisor.stop)
        stopping.start()
        output.wait_for("stopping")
    (tmp_path / "go").touch()
    output.wait_for("a: finished")
    if stops:
        stopping.join(10)
        assert not stopping.is_alive()
    assert output.lines.count("a: told") == 1 + stops


def test_what_a_killed_program_left_and_does_not_end_is_killed(
    supervisor: Supervisor, program: Callable[..., Program], output: Recorder, running: Callable[[], None]
) -> None:
    """After the time that the program would get."""
    supervisor.start(program("a", WITH_WORK, stop_s=0.5))
    running()
    line = output.wait_for("a: pid")
    os.kill(number(line), signal.SIGKILL)
    output.wait_for("a was killed by signal SIGKILL; it is started again")
    assert members(number(line))
    wait_until(lambda: not members(number(line)))


def test_parts_are_stopped_in_reverse_order(supervisor: Supervisor, program: Callable[..., Program], output: Recorder) -> None:
    """What was started last, and needs the others, stops first; nothing is left."""
    for name in ("first", "second", "third"):
        supervisor.start(program(name, TALKATIVE))
        output.wait_for(f"{name}: pid")
    pids = [number(line) for line in output.lines if "pid" in line]
    supervisor.stop()
    output.wait_for("first: stops")
    assert [line for line in output.lines if "stops" in line] == ["third: stops", "second: stops", "first: stops"]
    assert not any(members(pid) for pid in pids)


def test_what_does_not_stop_is_killed(supervisor: Supervisor, program: Callable[..., Program], output: Recorder) -> None:
    """A program has a limited time to stop, and its children with it."""
    supervisor.start(program("deaf", DEAF, stop_s=0.2))
    pid = number(output.wait_for("deaf: pid"))
    supervisor.stop()
    output.wait_for("deaf does not stop; it is killed")
    assert not members(pid)


def test_a_second_signal_does_not_wait(supervisor: Supervisor, program: Callable[..., Program], output: Recorder) -> None:
    """Whoever is in a hurry presses Ctrl-C again."""
    supervisor.start(program("deaf", DEAF, stop_s=100))
    pid = number(output.wait_for("deaf: pid"))
    supervisor.ask_to_stop()
    supervisor.ask_to_stop()
    begun = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - begun < 20
    assert not members(pid)


def test_a_reload_reaches_the_programs(
    supervisor: Supervisor, program: Callable[..., Program], output: Recorder, running: Callable[[], None]
) -> None:
    """SIGHUP is passed on to what understands it."""
    supervisor.start(program("a", TALKATIVE))
    output.wait_for("a: pid")
    running()
    supervisor.ask_to_reload()
    output.wait_for("a: reads again")


def test_only_one_up_has_the_data_folder(tmp_path: Path) -> None:
    """The second is refused with the first one's process id, and may have the folder when the first is gone."""
    first, second = DataFolder(tmp_path), DataFolder(tmp_path)
    first.lock()
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_the_note_is_private_and_counts_only_while_up_runs(tmp_path: Path) -> None:
    """Passwords are in it, and what an ended `up` wrote leads nowhere."""
    folder = DataFolder(tmp_path)
    folder.lock()
    folder.write(Note(pid=1, database_url="d", redis_url="r", api_url="a"))
    assert (tmp_path / "up.json").stat().st_mode & 0o077 == 0
    other = DataFolder(tmp_path)
    assert other.running() == Note(pid=1, database_url="d", redis_url="r", api_url="a")
    assert folder._lock is not None
    folder._lock.close()
    assert other.running() is None


def test_a_command_may_call_where_the_running_up_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its own environment says otherwise; the note of an older `up` says nothing of it."""
    for name in ("MADEIRA_EGRESS_ALLOW", "MADEIRA_DATABASE_URL", "MADEIRA_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MADEIRA_DATA_DIR", str(tmp_path))
    folder = DataFolder(tmp_path)
    folder.lock()
    folder.write(Note(pid=1, database_url="d", redis_url="r", api_url="a", egress_allow=["127.0.0.1"], egress_deny=["10.0.0.9"]))
    assert (common.load().egress_allow, common.load().egress_deny) == (("127.0.0.1",), ("10.0.0.9",))
    monkeypatch.setenv("MADEIRA_EGRESS_ALLOW", "10.0.0.1")
    assert common.load().egress_allow == ("10.0.0.1",)
    (tmp_path / "up.json").write_text(
        '{"pid": 1, "database_url": "d", "redis_url": "r", "api_url": "a", "config": null, "sessions": []}'
    )
    monkeypatch.delenv("MADEIRA_EGRESS_ALLOW")
    assert (common.load().database_url, common.load().egress_allow) == ("d", ())
    folder.unlock()


@pytest.mark.parametrize(
    ("called", "found", "told"),
    [
        (".venv/bin/madeira", None, ".venv/bin/madeira"),
        (".venv/bin/madeira", "/usr/bin/madeira", "madeira"),
        ("-m", None, "madeira"),
    ],
)
def test_a_person_is_told_a_command_that_his_shell_finds(
    called: str, found: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setattr(common, "which", lambda _name: found)
    assert common.program() == told


def test_leftovers_of_a_killed_up_are_ended(program: Callable[..., Program], output: Recorder, tmp_path: Path) -> None:
    """The next `up` ends the sessions that the last one noted, also where only a child is left."""
    left = program("left", "# madeira\n" + WITH_CHILD.replace("IGNORES", "False"))
    left.start()
    line = output.wait_for("left: pid")
    os.kill(number(line), signal.SIGKILL)
    assert left.process is not None
    left.process.wait()
    folder = DataFolder(tmp_path)
    folder.lock()
    folder.write(Note(pid=1, database_url="", redis_url="", api_url="", sessions=[number(line)]))
    assert folder.end_leftovers() == 1
    assert not members(number(line))
    folder.unlock()
