"""Keeps the processes of one Madeira running: starts them in order, starts again what ends, stops everything in reverse.

Every program gets a session of its own: a Ctrl-C in the terminal reaches the supervisor only, which then decides the order.
The kernel tells a program when the supervisor is gone, so that a `kill -9` of `up` leaves nothing behind. A program that ends
by itself may leave children that have something in hand (a call, when Dramatiq's master is killed): they are told to end, and get
as long as the program would, beside the new ones.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from madeira.cli.output import Output
from madeira.cli.running import end, members, tell
from madeira.embedded import EmbeddedServer, ServerFailed, die_with_parent

#: Seconds between two looks at what runs.
_LOOK_S: Final = 0.2

#: Seconds to wait before something that ended is started again: the first time, and at most.
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0

#: Seconds of running after which the waits begin afresh.
_STEADY_S: Final = 60.0


class Part(Protocol):
    """Something that runs."""

    name: str

    def start(self) -> None:
        """Start it; raises `ServerFailed` when it does not come up."""

    def ended(self) -> str | None:
        """How it ended, for a person; None while it runs."""

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Stop it in order, or at once as soon as `hurry` says so."""

    def reload(self) -> None:
        """Let it start its processes anew, without a gap."""


class Program:
    """A program of ours as a child process, with its output in the common log.

    `stop_s` is how long it may take to stop; `reload_signal` makes it start its processes anew.
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        cwd: Path,
        output: Output,
        stop_s: float,
        reload_signal: int | None = None,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._environ = dict(environ)
        self._cwd = cwd
        self._output = output
        self._stop_s = stop_s
        self._reload_signal = reload_signal
        self.process: subprocess.Popen[bytes] | None = None
        #: Of which sessions it has left something when it ended, and when that is killed.
        self._left: dict[int, float] = {}

    def start(self) -> None:
        """Start it; from the main thread, whose end would count as ours."""
        self.process = subprocess.Popen(
            self._command,
            env=self._environ,
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        threading.Thread(target=self._copy, args=(self.process,), name=f"log-{self.name}", daemon=True).start()

    @property
    def sessions(self) -> list[int]:
        """Those of which something may run, by their leaders' process ids."""
        return [*self._left, *([self.process.pid] if self.process is not None else [])]

    def ended(self) -> str | None:
        """How it ended; told once, until it is started again."""
        self._end_overdue()
        if self.process is None or self.process.poll() is None:
            return None
        code = self.process.returncode
        if self._leave():
            self._output.line("up", f"{self.name} has ended; what it has left finishes what it has in hand", bold=True)
        return f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def stop(self, hurry: Callable[[], bool]) -> None:
        """SIGTERM, then, when its time is over, SIGKILL to all of its sessions."""
        if self.process is not None:
            self.process.terminate()
        deadline = time.monotonic() + self._stop_s
        while self._runs() and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)
        if self.process is not None:
            self._output.line("up", f"{self.name} does not stop; it is killed")
        for session in self.sessions:
            end(members(session), patience_s=0)
        if self.process is not None:
            self.process.wait()
        self.process = None
        self._left.clear()

    def reload(self) -> None:
        """Pass the wish on, where the program knows it."""
        if self.process is not None and self._reload_signal is not None:
            self.process.send_signal(self._reload_signal)

    def _runs(self) -> bool:
        """Whether anything of it runs."""
        if self.process is not None and self.process.poll() is not None:
            self._leave()
        self._end_overdue()
        return bool(self.sessions)

    def _leave(self) -> bool:
        """Tell what the program, which has ended, has left to end; whether that is anything."""
        assert self.process is not None
        session = self.process.pid
        self.process = None
        left = members(session)
        if left:
            self._left[session] = time.monotonic() + self._stop_s
            tell(left)
        return bool(left)

    def _end_overdue(self) -> None:
        for session, until in list(self._left.items()):
            left = members(session)
            if left and time.monotonic() < until:
                continue
            end(left, patience_s=0)
            del self._left[session]

    def _copy(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._output.line(self.name, line.decode(errors="replace").rstrip())


class Server:
    """An embedded server, as a part."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.name = server.name
        self.server = server

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.server.start()

    def ended(self) -> str | None:
        """How it ended."""
        process = self.server.process
        if process is None:
            return "is not running"
        return None if process.poll() is None else f"ended with exit code {process.returncode}"

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Stop it in order; it needs no hurry, since nobody uses it any more."""
        self.server.stop()

    def reload(self) -> None:
        """Nothing: it serves on."""


class Supervisor:
    """Runs parts until it is told to stop."""

    def __init__(self, output: Output, *, note_sessions: Callable[[Sequence[int]], None] = lambda _: None) -> None:
        self._output = output
        self._note_sessions = note_sessions
        self._parts: list[_Watched] = []
        self._signals = 0
        self._reload = False
        self._wake = threading.Event()

    def handle_signals(self) -> None:
        """SIGINT and SIGTERM stop everything (a second one in a hurry), SIGHUP lets the parts start their processes anew."""
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)

    def ask_to_stop(self) -> None:
        """What SIGINT and SIGTERM do."""
        self._signals += 1
        self._wake.set()

    def ask_to_reload(self) -> None:
        """What SIGHUP does."""
        self._reload = True
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._signals > 0

    def start(self, part: Part) -> None:
        """Start `part` and look after it from now on."""
        watched = _Watched(part)
        self._parts.append(watched)
        watched.start()
        self._note()

    def run(self) -> None:
        """Look after the parts until told to stop."""
        while not self.stopping:
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            if self._reload:
                self._reload = False
                self._output.line("up", "SIGHUP: API and workers start their processes anew")
                for watched in self._parts:
                    watched.part.reload()
            for watched in self._parts:
                if self.stopping:
                    return
                self._look(watched)

    def stop(self) -> None:
        """Stop everything, in the reverse order of the starts."""
        self._output.line("up", "stopping; what is being delivered is finished first (Ctrl-C again: do not wait)")
        while self._parts:
            watched = self._parts.pop()
            watched.part.stop(lambda: self._signals > 1)
        self._note()
        self._output.line("up", "everything is stopped")

    def _look(self, watched: "_Watched") -> None:
        if watched.start_at is None:
            how = watched.part.ended()
            if how is not None:
                wait_s = watched.plan_restart()
                self._output.line("up", f"{watched.part.name} {how}; it is started again in {wait_s:g} s", bold=True)
        elif time.monotonic() >= watched.start_at:
            self._restart(watched)

    def _restart(self, watched: "_Watched") -> None:
        try:
            watched.start()
        except (ServerFailed, OSError) as e:
            wait_s = watched.plan_restart()
            self._output.line("up", f"{watched.part.name} does not start: {e}; the next try is in {wait_s:g} s", bold=True)
            return
        self._output.line("up", f"{watched.part.name} is started again (restart number {watched.restarts})")
        self._note()

    def _note(self) -> None:
        self._note_sessions([session for w in self._parts if isinstance(w.part, Program) for session in w.part.sessions])

    def _on_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self.ask_to_stop()

    def _on_reload(self, _signal: int, _frame: FrameType | None) -> None:
        self.ask_to_reload()


class _Watched:
    def __init__(self, part: Part) -> None:
        self.part = part
        self.restarts = 0
        self.start_at: float | None = None
        self._wait_s = _FIRST_WAIT_S
        self._started = 0.0

    def start(self) -> None:
        if self.start_at is not None:
            self.restarts += 1
        self._started = time.monotonic()
        self.part.start()
        self.start_at = None

    def plan_restart(self) -> float:
        if time.monotonic() - self._started > _STEADY_S:
            self._wait_s = _FIRST_WAIT_S
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        self.start_at = time.monotonic() + wait_s
        return wait_s


def python(*arguments: str) -> list[str]:
    """The command line that runs a module with this very Python."""
    return [sys.executable, "-m", *arguments]
