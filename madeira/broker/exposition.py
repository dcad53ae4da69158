"""The /metrics pages of workers and scheduler.

That of the workers has a process of its own beside them, which Dramatiq starts as a fork of the master. It adds up the files
that the worker processes write, so it answers for all of them, and also while one of them is stopped or busy. The scheduler is
one process; a thread of it serves its page. Dramatiq starts the workers' page once: when its process is killed, a worker process
serves it from then on. When the master is killed its page ends with it, and the place is free for the next one's.

Several workers on one machine may write into one folder: one of them serves the page of all, and the others wait for its place.
Those that write into different folders need different ports, else the numbers of all but one are never read.
"""

import errno
import signal
import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Final

from madeira import log
from madeira import settings as _settings
from madeira.broker import master
from madeira.settings import Settings

_log = log.get(__name__)

#: Seconds between two tries to serve the page; shorter than the usual distance of two scrapes.
PERIOD_S: Final = 5.0

#: Signals that the main thread handles. While it cannot take one, which is so after the process has stood still, the kernel gives
#: it to any other thread that does not block it.
_FOR_MAIN: Final = (signal.SIGALRM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

_SHARED: Final = "another process serves the page of this folder; this one takes its place when it ends"
_OTHERS: Final = "the page that is served there tells the numbers of another folder; nobody serves this one's"
_STRANGE: Final = "nothing that listens there answers as a page of numbers of Madeira's; nobody serves this one's"
_NOBODY: Final = "nobody serves the page"

#: What to do about each that is a mistake.
_REMEDIES: Final = {
    _OTHERS: "give each a metrics port of its own, or, where they run on one machine and in no containers, one MADEIRA_DATA_DIR",
    _STRANGE: "set another metrics port, or end what listens there; then it is served without a restart",
    _NOBODY: "set MADEIRA_HOST to an address of this machine, and a metrics port that this user may listen at",
}


def serve() -> int:
    """Serve the workers' page until the process is told to stop, or the master has gone."""
    values = _settings.load()
    if values.metrics_port:
        _settings.multiproc_dir(values, "worker")
        log.configure(values, "metrics")
        log.catch()
        start(values, values.metrics_port)
    master.wait()
    return 0


def start(values: Settings, port: int) -> None:
    """Serve the page of this family of processes on `port`, from a thread; 0: serve none.

    While that cannot be done the work goes on, the log says why, and it is tried again.
    """
    if port:
        Exposition(host=values.host, port=port, token=values.metrics_token, folder=_settings.metrics_folder()).start()


def stand_in(values: Settings) -> "StandIn | None":
    """Be ready, in a worker process, to serve the workers' page when nobody else does; None when there is none."""
    if not values.metrics_port:
        return None
    folder = _settings.metrics_folder()
    found = StandIn(host=values.host, port=values.metrics_port, token=values.metrics_token, folder=folder)
    found.start()
    return found


class Exposition:
    """Serves the page of `folder` as soon as the address is free, and tells why it does not.

    It is tried every `period_s` seconds. What keeps it is told when it was found twice, since one look may meet an owner that
    is about to end, and again when it has changed.
    """

    def __init__(self, *, host: str, port: int, token: str, folder: Path | None, period_s: float = PERIOD_S) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._folder = folder
        self._period_s = period_s
        self._server: ThreadingHTTPServer | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="madeira-metrics")

    def start(self) -> None:
        """Begin, in a thread that takes no signal: what waits in the main one, as the scheduler does, would not wake for it."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_MAIN)
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def stop(self) -> None:
        """Let go of the port, and end the thread."""
        with self._lock:
            self._stopped.set()
        if self._server:
            self._server.shutdown()
        self._thread.join()

    def _run(self) -> None:
        found = told = None
        while not self._stopped.is_set():
            try:
                with self._bound() as server:
                    self._serve(server, was_kept=told is not None)
            except (OSError, UnicodeError) as e:
                before, found = found, self._obstacle(e)
                if found == before != told:
                    self._tell(found, e)
                    told = found
                self._stopped.wait(self._period_s)

    def _bound(self) -> ThreadingHTTPServer:
        from madeira import metrics_page

        return metrics_page.serve(self._host, self._port, folder=self._folder, token=self._token)

    def _serve(self, server: ThreadingHTTPServer, *, was_kept: bool) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            self._server = server
        if was_kept:
            _log.info("metrics.served", port=self._port)
        server.serve_forever()

    def _obstacle(self, error: OSError | UnicodeError) -> str:
        from madeira import metrics_page

        if getattr(error, "errno", None) != errno.EADDRINUSE:
            return _NOBODY
        mark = metrics_page.mark_at(self._host, self._port)
        if mark is None:
            return _STRANGE
        return _SHARED if mark == metrics_page.mark(self._folder) else _OTHERS

    def _tell(self, obstacle: str, error: OSError | UnicodeError) -> None:
        line = {"host": self._host, "port": self._port, "reason": str(error), "detail": obstacle}
        if obstacle == _SHARED:
            _log.info("metrics.not_served", **line)
        else:
            _log.warning("metrics.not_served", **line, remedy=_REMEDIES[obstacle])


class StandIn(Exposition):
    """Serves the page of `folder` once it was missed twice: whose place it is may be just about to begin.

    Why it cannot, if so, is told by the process that was to serve it.
    """

    def _run(self) -> None:
        from madeira import metrics_page

        missed = 0
        while not self._stopped.wait(self._period_s):
            missed = 0 if metrics_page.mark_at(self._host, self._port) else missed + 1
            if missed > 1:
                with suppress(OSError, UnicodeError), self._bound() as server:
                    self._serve(server, was_kept=True)
