"""The terminal door: the program `madeira`, one file per group of commands."""

from madeira.cli.main import main

__all__ = ["main"]
