"""The terminal door: the program `madeira`, one file per group of commands."""

import gc

from madeira.cli.main import main

__all__ = ["main"]

# What was imported lives as long as the process: to look through it at the end is a quarter of the time of a short command.
gc.freeze()
