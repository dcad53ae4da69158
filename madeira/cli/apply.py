"""`madeira apply` and `madeira export`: sources, endpoints and routes from a file, and back into one."""

import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from madeira import settings
from madeira.cli.acting import maybe_reason_option
from madeira.cli.common import configurator, json_option, load, person, print_json
from madeira.cli.filters import File
from madeira.errors import ConfigurationInvalid, SettingsError
from madeira.routing.apply import Difference


@click.command()
@click.argument("file", type=File())
@click.option("--dry-run", is_flag=True, help="Check the file and print the difference; change nothing.")
@click.option("--prune", is_flag=True, help="Remove what the file does not name.")
@click.option(
    "--replace-secrets",
    is_flag=True,
    help="Seal secrets with the key here although it does not open what is stored. Every process must have that key.",
)
@maybe_reason_option
@json_option
def apply(file: Path, dry_run: bool, prune: bool, replace_secrets: bool, reason: str | None, as_json: bool) -> None:
    """Bring sources, endpoints and routes to what FILE (TOML; - for standard input) says, all or nothing.

    What FILE does not name stays, unless --prune is given. API and workers go by it within two seconds.
    """
    text = read(file)
    with configurator(load()) as found:
        try:
            difference = found.apply(
                text, prune=prune, dry_run=dry_run, replace_secrets=replace_secrets, who=person(), why=reason or None
            )
        except ConfigurationInvalid as e:
            lines = "\n".join(f"  {p.field}: {p.detail}" if p.field else f"  {p.detail}" for p in e.problems)
            raise click.ClickException(f"{file}: nothing was changed:\n{lines}") from None
    unset = [name for name in difference.variables if not settings.is_set(name)]
    if as_json:
        print_json({"dry_run": dry_run, **asdict(difference), "unset": unset})
        return
    for line in told(difference, dry_run=dry_run):
        click.echo(line)
    if unset:
        text = "not set here (env:); see that every process of the API and the workers has what it uses"
        click.echo(f"warning: {', '.join(unset)}: {text}", err=True)


@click.command()
@json_option
def export(as_json: bool) -> None:
    """Print sources, endpoints and routes as a file that `apply` takes back; secrets stay sealed.

    The JSON says the same, and `apply` does not take it.
    """
    with configurator(load()) as found:
        text = found.export()
    if as_json:
        print_json(tomllib.loads(text))
    else:
        click.echo(text, nl=False)


def read(file: Path) -> str:
    """The text of a configuration file.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        with click.open_file(str(file), "rb") as stream:
            content: bytes = stream.read()
        return content.decode()
    except OSError as e:
        raise SettingsError(f"{file}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{file}: is not UTF-8") from None


def told(difference: Difference, *, dry_run: bool = False) -> Iterator[str]:
    """A difference for people, a line per object that changed and one for all others."""
    for sign, labels in (("+", difference.added), ("~", difference.changed), ("-", difference.removed)):
        for label in labels:
            fields = difference.fields.get(label)
            yield f"{sign} {label}{': ' + ', '.join(fields) if fields else ''}"
    if difference.reordered:
        yield "~ the order of the routes"
    counts = [
        f"{len(labels)} {what}"
        for what, labels in (
            ("added", difference.added),
            ("changed", difference.changed),
            ("removed", difference.removed),
            ("unchanged", difference.unchanged),
            ("not in the file and kept", difference.kept),
        )
        if labels
    ]
    yield f"{'would be: ' if dry_run else ''}{', '.join(counts) or 'nothing to do'}"
