"""The command `madeira` itself."""

import click

from madeira import __version__


@click.group()
@click.version_option(__version__, prog_name="madeira")
def main() -> None:
    """Event delivery that loses nothing."""
