"""Loads a library without another one that it would load only because it is there.

redis-py takes OpenTelemetry's metrics wherever that is installed, though it uses them only when told to; httpx takes what colours
the output of its program. Each costs every process, and every command, about a tenth of a second of processor time.
"""

import importlib
import sys


def load(name: str, *, without: str) -> None:
    """Import the library `name` as if `without` were not installed; does nothing where either is imported already."""
    if name in sys.modules or without in sys.modules:
        return
    sys.modules[without] = None  # type: ignore[assignment]
    try:
        importlib.import_module(name)
    finally:
        del sys.modules[without]
