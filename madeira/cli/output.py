"""The one log of `madeira up`: every line of every process, with the name of who says it in front."""

import os
import sys
import threading
from typing import Final, TextIO

import click

#: Names are padded to this, so that the lines stand in one column.
_WIDTH: Final = 9

_COLORS: Final = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_yellow")


class Output:
    """Writes whole lines, from any thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()
        self._colors: dict[str, str] = {}

    def line(self, name: str, text: str, *, bold: bool = False) -> None:
        """Write one line that `name` says."""
        with self._lock:
            color = self._colors.setdefault(name, _COLORS[len(self._colors) % len(_COLORS)])
            prefix = click.style(f"{name:<{_WIDTH}}|", fg=color)
            try:
                click.echo(f"{prefix} {click.style(text, bold=True) if bold else text}", file=self._stream)
            except (BrokenPipeError, OSError):
                # Whoever read us is gone; the work goes on without an audience.
                self._stream = open(os.devnull, "w")  # noqa: SIM115
