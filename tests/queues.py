"""The queues that the actors declare, asked of the program itself, in a process of its own: it builds the broker at import."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from madeira import settings

ROOT = Path(__file__).parents[1]

_ASK = "import json, madeira.actors; print(json.dumps(sorted(madeira.actors.broker.get_declared_queues())))"


@functools.cache
def declared() -> list[str]:
    """Their names."""
    with TemporaryDirectory() as folder:
        environ = settings.environment(
            MADEIRA_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none",
            MADEIRA_REDIS_URL="redis://127.0.0.1:1/0",
            MADEIRA_DATA_DIR=folder,
            PROMETHEUS_MULTIPROC_DIR=None,
        )
        done = subprocess.run([sys.executable, "-c", _ASK], env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found
