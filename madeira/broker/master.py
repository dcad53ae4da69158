"""The end of Dramatiq's master, as the processes notice it that it has started.

Left to Dramatiq they do not: they go on for ever, the old version of everything, beside all that is started anew, or until the
pipe is full by which the master took their lines for the log, and they stand still. So each of them watches its master and ends
with it, as if it had been told to.

The kernel could send a signal (``PR_SET_PDEATHSIG``), but a worker takes a second SIGTERM for "at once", and whoever ends what is
left of a killed master (systemd, `madeira up`, a person) sends one too: the calls under way would be broken off. So no signal is
sent, and the first that comes from outside after the master has gone says what is known already. (It would also be sent when the
thread ends that has forked, and never when the master is gone before it is asked for.)
"""

import functools
import multiprocessing
import multiprocessing.synchronize
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from madeira import log

#: Seconds between two looks where the kernel cannot tell when a process ends.
_LOOK_S: Final = 1.0

#: What Dramatiq's worker takes as the wish that it ends.
_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)

_Handler = Callable[[int, FrameType | None], Any]

_log = log.get(__name__)


def wait() -> None:
    """Wait until the process is gone that has started this one; for ever, where `multiprocessing` has started none."""
    master = multiprocessing.parent_process()
    while master is None or master.pid is None:
        signal.pause()
    _wait_for(master.pid)


def end_with_it() -> None:
    """Have this worker process end as at SIGTERM when its master has gone; called in the main thread, when it boots.

    Where no master of Dramatiq's has started it, nothing is done.
    """
    master = multiprocessing.parent_process()
    handlers = {number: signal.getsignal(number) for number in _ENDINGS}
    if master is not None and master.pid is not None and all(callable(handler) for handler in handlers.values()):
        _Watch(master.pid, handlers).start()


class _Watch:
    """Ends this process by Dramatiq's own `handlers` of signals, once, when the process `master` has gone."""

    def __init__(self, master: int, handlers: "dict[signal.Signals, Any]") -> None:
        self._master = master
        self._handlers: dict[int, _Handler] = {int(number): handler for number, handler in handlers.items()}
        # A handler may be interrupted by another one.
        self._lock = threading.RLock()
        self._is_ending = False
        #: Whether the next signal tells only that the master has gone.
        self._is_known = False
        #: Set when the master has heard that this process has booted, or never will.
        self._is_heard = threading.Event()

    def start(self) -> None:
        for number in self._handlers:
            signal.signal(number, self._on_signal)
        for part in getattr(multiprocessing.current_process(), "_args", ()):
            if isinstance(part, multiprocessing.synchronize.Event):
                part.set = functools.partial(self._say, part.set)  # type: ignore[method-assign]
        threading.Thread(target=self._run, name="madeira-master", daemon=True).start()

    def _say(self, booted: Callable[[], None]) -> None:
        """Tell the master that this process has `booted`, unless it has gone.

        An event that is set waits until all have woken that waited for it. A master that was killed meanwhile never does: this
        process would stand there for ever, with all its threads at work, and not come to look whether it is to end.
        """

        def say() -> None:
            booted()
            self._is_heard.set()

        threading.Thread(target=say, name="madeira-booted", daemon=True).start()
        self._is_heard.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        with self._lock:
            is_known, self._is_known = self._is_known, False
            self._is_ending = True
        if not is_known:
            self._handlers[number](number, frame)

    def _run(self) -> None:
        _wait_for(self._master)
        with self._lock:
            is_ending, self._is_ending, self._is_known = self._is_ending, True, True
        # What goes to the master's pipe nobody reads any more.
        log.write_to_own_stderr()
        _log.warning("worker.master_gone", detail="this process finishes what it has begun, and ends")
        if not is_ending:
            self._handlers[signal.SIGTERM](signal.SIGTERM, None)
        self._is_heard.set()


def _wait_for(pid: int) -> None:
    """Wait until the process that has started this one is gone."""
    try:
        found = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # Not Linux, one from before 5.3, or a container that does not allow it.
        while os.getppid() == pid:
            time.sleep(_LOOK_S)
        return
    try:
        poll = select.poll()
        poll.register(found, select.POLLIN)
        poll.poll()
    finally:
        os.close(found)
