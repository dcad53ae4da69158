"""The one log of `madeira up`: every line of every process, with the name of who says it in front."""

import json
import os
import sys
import threading
from typing import Final, TextIO

import click

#: Names are padded to this, so that the lines stand in one column.
_WIDTH: Final = 9

_COLORS: Final = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_yellow")


class Output:
    """Writes whole lines, from any thread; with `as_json` each as an object that says who says what."""

    def __init__(self, stream: TextIO | None = None, *, as_json: bool = False) -> None:
        self._stream = stream or sys.stdout
        self._as_json = as_json
        self._lock = threading.Lock()
        self._colors: dict[str, str] = {}

    def line(self, name: str, text: str, *, bold: bool = False) -> None:
        """Write one line that `name` says."""
        with self._lock:
            color = self._colors.setdefault(name, _COLORS[len(self._colors) % len(_COLORS)])
            prefix = click.style(f"{name:<{_WIDTH}}|", fg=color)
            told = f"{prefix} {click.style(text, bold=True) if bold else text}"
            try:
                click.echo(json.dumps({"from": name, "text": text}) if self._as_json else told, file=self._stream)
            except (BrokenPipeError, OSError):
                # Whoever read us is gone; the work goes on without an audience.
                self._stream = open(os.devnull, "w")  # noqa: SIM115
