"""The terminal door: the program `madeira`, one file per group of commands."""

import gc
import signal
import threading

# Whoever interrupts while the commands are imported, which takes half a second or more, is not shown where it was.
_asked = signal.getsignal(signal.SIGINT)
_is_ours = _asked is signal.default_int_handler and threading.current_thread() is threading.main_thread()
if _is_ours:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from madeira.cli.main import main  # noqa: E402

if _is_ours:
    signal.signal(signal.SIGINT, _asked)

__all__ = ["main"]

# What was imported lives as long as the process: to look through it at the end is a quarter of the time of a short command.
gc.freeze()
