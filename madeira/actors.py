"""What ``dramatiq madeira.actors`` and ``periodiq madeira.actors`` load: builds the broker, then imports the actors.

Before anything imports prometheus-client its folder must be in the environment, so that comes first.
"""

import sys
from pathlib import Path

from madeira import settings as _settings
from madeira.errors import SettingsError

#: ``periodiq`` imports this module too; its few numbers must not mix with those of the workers.
_FAMILY = "scheduler" if Path(sys.argv[0]).name == "periodiq" else "worker"

try:
    _values = _settings.load()
    _settings.multiproc_dir(_values, _FAMILY)

    import dramatiq

    from madeira import log
    from madeira.broker import build

    log.configure(_values, _FAMILY)
    broker = build(_values)
except SettingsError as _error:
    sys.exit(f"madeira: {_error}")

dramatiq.set_broker(broker)

import actors.dead_letter  # noqa: E402
import actors.deliver  # noqa: E402
import actors.jobs  # noqa: E402
import actors.notify  # noqa: E402
import actors.reconcile  # noqa: E402
import actors.retention  # noqa: E402
import actors.rollup  # noqa: E402
import actors.route  # noqa: E402, F401
