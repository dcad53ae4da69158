"""The workers' /metrics page, in a process of its own beside them.

Dramatiq starts it as a fork of the master. It adds up the files that the worker processes write, so it answers for all
of them, and also while one of them is stopped or busy.
"""

import signal
import threading

from madeira import settings as _settings


def serve() -> int:
    """Serve the page until the process is told to stop; returns its exit code."""
    values = _settings.load()
    if values.metrics_port == 0:
        return _wait()
    _settings.multiproc_dir(values, "worker")
    from madeira import log, metrics

    log.configure(values, "metrics")
    logger = log.get(__name__)
    try:
        server = metrics.serve(values.host, values.metrics_port)
    except OSError as e:
        # Several workers on one machine write into one folder; one page tells of all of them.
        logger.info("metrics.not_served", port=values.metrics_port, reason=str(e), detail="another process serves the page")
        return _wait()
    threading.Thread(target=server.serve_forever, daemon=True, name="metrics").start()
    return _wait()


def _wait() -> int:
    while True:
        signal.pause()
