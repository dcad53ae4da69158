"""`madeira keygen` and `madeira reencrypt`: the keys of MADEIRA_SECRET_KEY."""

import click

from madeira import sealing
from madeira.cli.acting import maybe_reason_option
from madeira.cli.common import configurator, json_option, load, person, print_json


@click.command()
@json_option
def keygen(as_json: bool) -> None:
    """Make a key for MADEIRA_SECRET_KEY.

    To change keys put the new one in front of the old one (new,old) in every process, start them anew, run `madeira reencrypt`,
    and then take the old one away.
    """
    key = sealing.generate()
    if as_json:
        print_json({"key": key})
    else:
        click.echo(key)


@click.command()
@maybe_reason_option
@json_option
def reencrypt(reason: str | None, as_json: bool) -> None:
    """Seal all secrets anew that the first key of MADEIRA_SECRET_KEY has not sealed.

    Every process of the API and the workers must have that key before: one that lacks it loses the use of all sealed secrets.
    This cannot be checked here.

    The exit code is 1 when there are some that no key opens; those are named and left as they are.
    """
    with configurator(load()) as found:
        done, problems = found.reencrypt(who=person(), why=reason or None)
    if as_json:
        left = [{"field": p.field, "detail": p.detail} for p in problems]
        print_json({"reencrypted": list(done), "unopened": left})
    else:
        for label in done:
            click.echo(f"~ {label}")
        for problem in problems:
            click.echo(f"{problem.field}: {problem.detail}", err=True)
        if done or not problems:
            click.echo(f"{len(done)} sealed anew" if done else "nothing to do")
    if problems:
        raise click.ClickException(
            f"{len(problems)} of the secrets are left as they are: add the keys that open them to MADEIRA_SECRET_KEY, or set "
            "them anew"
        )
