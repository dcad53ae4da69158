"""Commands as a person types them: a process each, in an environment that holds of Madeira what the test says."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

#: What each command begins with.
MADEIRA: Final = (sys.executable, "-m", "madeira.cli")

#: The namespace of commands that have servers of their own.
NAMESPACE: Final = "m"


def environ(**settings: str) -> dict[str, str]:
    """This process's environment, with `settings` in the place of all that Madeira and its metrics read."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("MADEIRA_", "PROMETHEUS_"))} | settings


def beside(database_url: str, redis_url: str, *, folder: Path) -> dict[str, str]:
    """The environment of commands that use these servers, and have `folder` for their data; their lines are not broken."""
    return environ(
        MADEIRA_DATA_DIR=str(folder),
        MADEIRA_DATABASE_URL=database_url,
        MADEIRA_REDIS_URL=redis_url,
        MADEIRA_NAMESPACE=NAMESPACE,
        COLUMNS="200",
    )


def run(environ: Mapping[str, str], *arguments: str, given: str = "", code: int | None = 0) -> "subprocess.CompletedProcess[str]":
    """The command when it has ended, with the exit code `code`; None: with any."""
    done = subprocess.run(
        [*MADEIRA, *arguments], env=environ, cwd=ROOT, input=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done
