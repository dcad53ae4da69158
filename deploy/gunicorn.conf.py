"""How gunicorn runs the API: ``gunicorn -c deploy/gunicorn.conf.py madeira.api:app``.

Everything follows from the settings (``MADEIRA_…``). Threads, since one request waits for a commit that it shares with
others, and since the threaded worker answers what it has accepted when it is told to stop. Connections are opened in the
processes, never in the master; so ``--preload`` is safe.
"""

import sys
from pathlib import Path

from madeira import log as _log
from madeira import process as _process
from madeira import settings as _settings
from madeira.errors import SettingsError

try:
    # At a reload the settings are there: the environment of a process does not change.
    _is_reload = "madeira.api" in sys.modules
    _s = sys.modules["madeira.api"].app.settings if _is_reload else _settings.load()
    # Before anything imports prometheus-client, as the next line does.
    _metrics_folder = _settings.multiproc_dir(_s, "api")
    if not _is_reload:
        # Already what is imported next may have something to say: that there is no room for its numbers.
        _log.configure(_s, "api")
    from madeira.api import app as _app

    _app.prepare()
except SettingsError as e:
    sys.exit(f"madeira: {e}")

_process.prepare()

bind = f"[{_s.host}]:{_s.port}" if ":" in _s.host else f"{_s.host}:{_s.port}"
workers = _s.processes
threads = _s.threads
worker_class = "madeira.api.server.Worker"
logger_class = "madeira.api.server_log.Logger"
proc_name = "madeira-api"

#: A request may wait for its body (10 s, more for a large one) and its commit; what is in hand at SIGTERM ends within this.
graceful_timeout = 30
#: Silence of a worker's main loop after which the master kills it; requests run in other threads.
timeout = 60
#: Longer than the minute after which load balancers close idle connections, so that they do it, not we.
keepalive = 75
#: Of a process; the other half of the files that it may have open is for all else. When there are as many, idle ones make room.
worker_connections = max(threads + 1, min(2000, _process.descriptors() // 2))
backlog = 2048
#: What is sent goes the way of all answers, which holds no thread.
sendfile = False
#: The heartbeat file does not wait for a disk.
worker_tmp_dir = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
#: Its place is the user's home: two Madeiras on one machine would fight for it.
control_socket_disable = True


#: Seconds for which a port that is in use is tried again, as gunicorn does: the processes of one that was killed have it a while.
_PORT_PATIENCE_S = 5.0


def on_starting(server):
    """Say in one line where it cannot listen, which gunicorn does in twelve; and forget the numbers of a former run.

    A reload (SIGHUP) does not come here, so counters go on.
    """
    from madeira import metrics_files

    _require_addresses(server)
    metrics_files.clear(_metrics_folder)


def _require_addresses(server):
    from gunicorn import systemd

    from madeira import binding

    if server.master_pid or systemd.listen_fds(unset_environment=False) or server.cfg.reuse_port:
        # It is handed its sockets, or shares them.
        return
    for address in (address for address in server.cfg.address if isinstance(address, tuple)):
        # An address that is not of the settings was given to gunicorn itself.
        of_host, of_port = ("MADEIRA_HOST", "MADEIRA_PORT") if address == (_s.host.lower(), _s.port) else ("--bind", "--bind")
        try:
            binding.require(*address, of_port, of_host, patience_s=_PORT_PATIENCE_S)
        except SettingsError as e:
            sys.exit(f"madeira: {e}")


def when_ready(server):
    """At a stop, cut off nobody who has just connected."""
    from madeira.api import closing

    closing.refuse_new_at_stop(server)


def post_worker_init(worker):
    """Open connections and threads, now that the process is forked; a setting that does not suffice stops the start."""
    worker.wsgi.open()


def worker_exit(_server, worker):
    """Commit what waits, close connections."""
    if worker.booted:
        worker.wsgi.close()


def child_exit(_server, worker):
    """Drop the gauges of a process that is gone; its counters stay. No connections are left to it any more."""
    from prometheus_client import multiprocess

    from madeira.api import server as _server_of_ours

    _server_of_ours.shares.end(worker.age)
    multiprocess.mark_process_dead(worker.pid)
