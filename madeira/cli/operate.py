"""`madeira migrate` and `madeira reconcile`: what an operator runs by hand."""

import click

from madeira import settings
from madeira.cli.common import configure_log, database, json_option, load, print_json
from madeira.store.migrate import migrate as run_migrations


@click.command()
@json_option
def migrate(as_json: bool) -> None:
    """Bring the tables up to date; safe to run from several hosts at once."""
    values = load()
    settings.require(values, "database_url")
    applied = run_migrations(values.database_url)
    if as_json:
        print_json({"applied": applied})
        return
    for name in applied:
        click.echo(f"applied {name}")
    if not applied:
        click.echo("the tables are up to date")


@click.command()
@json_option
def reconcile(as_json: bool) -> None:
    """Compare Postgres with the broker now, and mend the difference; the exit code is 1 when nothing could be compared."""
    values = load()
    settings.require(values, "database_url", "redis_url")
    configure_log(values)
    # Imported here: no other command needs the actors, and they need a broker to be there first.
    import dramatiq

    from madeira.broker import build

    broker = build(values)
    dramatiq.set_broker(broker)
    from actors.reconcile import NotRun, run

    try:
        with database(values) as db:
            counts = run(broker.wire, db, period_s=values.reconcile_s, force=True)
    except NotRun as e:
        if as_json:
            print_json({"ran": False, "reason": str(e), "differences": {}})
        raise click.ClickException(f"nothing was compared: {e}") from None
    finally:
        broker.wire.close()
    if as_json:
        print_json({"ran": True, "reason": None, "differences": dict(counts)})
        return
    found = {kind: n for kind, n in counts.items() if n}
    click.echo(", ".join(f"{kind}: {n}" for kind, n in found.items()) or "no differences")
