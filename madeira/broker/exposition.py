"""The /metrics pages of workers and scheduler.

That of the workers has a process of its own beside them, which Dramatiq starts as a fork of the master. It adds up the files
that the worker processes write, so it answers for all of them, and also while one of them is stopped or busy. The scheduler is
one process; a thread of it serves its page.
"""

import errno
import signal
import threading
from typing import NoReturn

from madeira import settings as _settings
from madeira.settings import Settings


def serve() -> int:
    """Serve the workers' page until the process is told to stop; never returns by itself."""
    values = _settings.load()
    if values.metrics_port:
        _settings.multiproc_dir(values, "worker")
        from madeira import log

        log.configure(values, "metrics")
        log.catch()
        start(values, values.metrics_port)
    _wait()


def start(values: Settings, port: int) -> None:
    """Serve the page of this family of processes on `port`, from a thread; 0: serve none.

    Where the port is taken nothing is served: several workers on one machine write into one folder, and one page tells of all.
    Where the address cannot be bound for another reason nobody serves it; the work goes on, and a warning says so.
    """
    if not port:
        return
    from madeira import log, metrics_page

    try:
        server = metrics_page.serve(values.host, port, token=values.metrics_token)
    except (OSError, UnicodeError) as e:
        logger = log.get(__name__)
        if getattr(e, "errno", None) == errno.EADDRINUSE:
            logger.info("metrics.not_served", port=port, reason=str(e), detail="another process serves the page")
        else:
            logger.warning("metrics.not_served", host=values.host, port=port, reason=str(e), detail="nobody serves the page")
        return
    threading.Thread(target=server.serve_forever, daemon=True, name="madeira-metrics").start()


def _wait() -> NoReturn:
    while True:
        signal.pause()
