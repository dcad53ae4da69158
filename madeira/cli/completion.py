"""`madeira completion`: what makes a shell complete commands, options and their choices.

The script is click's own: at each press of the key the shell asks the command itself, so it always fits what is installed.
"""

from typing import Final

import click
from click.shell_completion import get_completion_class

SHELLS: Final = ("bash", "zsh", "fish")

#: The variable by which the script asks; named as click names it by itself.
_VARIABLE: Final = "_MADEIRA_COMPLETE"

_PROGRAM: Final = "madeira"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete `madeira`.

    For bash add `eval "$(madeira completion bash)"` to ~/.bashrc, for zsh the same with zsh to ~/.zshrc; for fish write the
    output to ~/.config/fish/completions/madeira.fish.
    """
    found = get_completion_class(shell)
    assert found is not None, shell
    root = ctx.find_root().command
    made = found(root, {}, _PROGRAM, _VARIABLE)
    click.echo(made.source_template % made.source_vars())
