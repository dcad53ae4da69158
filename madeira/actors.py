"""What ``dramatiq madeira.actors`` and ``periodiq madeira.actors`` load: builds the broker, then imports the actors.

Before anything imports prometheus-client its folder must be in the environment, so that comes first.
"""

import signal
import sys
from pathlib import Path
from types import FrameType

from madeira import process
from madeira import settings as _settings
from madeira.errors import SettingsError

#: ``periodiq`` imports this module too; its few numbers do not mix with those of the workers.
_FAMILY = "scheduler" if Path(sys.argv[0]).name == "periodiq" else "worker"

try:
    _values = _settings.load()
    _settings.multiproc_dir(_values, _FAMILY)

    from madeira import log

    # Already what is imported next may have something to say: that there is no room for its numbers.
    log.configure(_values, _FAMILY)
    log.catch()

    import dramatiq

    from madeira import spans
    from madeira.broker import build, exposition

    if _FAMILY == "worker":
        spans.load(_values)
    broker = build(_values, of_scheduler=_FAMILY == "scheduler")
except SettingsError as _error:
    sys.exit(f"madeira: {_error}")

if _FAMILY == "scheduler":

    def _stop(_signal: int, _frame: FrameType | None) -> None:
        # Its next alarm would kill it while it ends.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        sys.exit(0)

    # The kernel keeps from the first process of a container what it does not handle, and periodiq handles no SIGTERM.
    signal.signal(signal.SIGTERM, _stop)

dramatiq.set_broker(broker)

if _FAMILY == "scheduler":
    exposition.start(_values, _values.scheduler_metrics_port)

import actors.dead_letter  # noqa: E402
import actors.deliver  # noqa: E402
import actors.jobs  # noqa: E402
import actors.notify  # noqa: E402
import actors.reconcile  # noqa: E402
import actors.retention  # noqa: E402
import actors.rollup  # noqa: E402
import actors.route  # noqa: E402, F401

process.prepare()
