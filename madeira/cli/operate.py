"""`madeira migrate`, `madeira reconcile` and `madeira retention`: what an operator runs by hand."""

import math
import time
from collections import Counter

import click

from madeira import settings
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.errors import BrokerUnavailable, MadeiraError
from madeira.settings import Settings
from madeira.store import retention as store
from madeira.store.database import Database
from madeira.store.migrate import ahead
from madeira.store.migrate import migrate as run_migrations


@click.command()
@json_option
def migrate(as_json: bool) -> None:
    """Bring the tables up to date; safe to run from several hosts at once."""
    values = load()
    settings.require(values, "database_url")
    applied = run_migrations(values.database_url)
    if why := ahead(values.database_url):
        raise MadeiraError(why)
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
    except (NotRun, BrokerUnavailable) as e:
        remedy = "; see that it runs and that MADEIRA_REDIS_URL names it" if isinstance(e, BrokerUnavailable) else ""
        reason = f"{e}{remedy}"
        if as_json:
            print_json({"ran": False, "reason": reason, "differences": {}})
        raise click.ClickException(f"nothing was compared: {reason}") from None
    finally:
        broker.wire.close()
    if as_json:
        print_json({"ran": True, "reason": None, "differences": dict(counts)})
        return
    found = {kind: n for kind, n in counts.items() if n}
    click.echo(", ".join(f"{kind}: {n}" for kind, n in found.items()) or "no differences")


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go now.")
@click.option("--wait", is_flag=True, help="Wait for events whose ids were noted just now, and remove them too.")
@json_option
def retention(dry_run: bool, wait: bool, as_json: bool) -> None:
    """Remove now what is kept no longer. An event goes a while after its id was noted: in the next run, or with --wait."""
    values = load()
    settings.require(values, "database_url", "redis_url")
    configure_log(values)
    ages = store.ages_of(values)
    with database(values) as db:
        if dry_run:
            with db.connection() as conn:
                # It reads all events; that is what is asked for.
                conn.execute("SET LOCAL statement_timeout = 0")
                conn.limit_s = math.inf
                counts = Counter(store.would_go(conn, ages))
        else:
            counts = _remove(values, db, ages, wait=wait)
    if as_json:
        print_json({"dry_run": dry_run, "counts": dict(counts)})
        return
    told = ", ".join(f"{kind}: {n}" for kind, n in counts.items() if n)
    click.echo(f"{'would go: ' if dry_run and told else ''}{told or 'nothing to remove'}")


def _remove(values: Settings, db: Database, ages: store.Ages, *, wait: bool) -> Counter[str]:
    """Run until nothing is left, with `wait` also what has to wait first."""
    # Imported here: no other command needs the actors, and they need a broker to be there first.
    import dramatiq

    from madeira.broker import build

    dramatiq.set_broker(build(values))
    from actors.retention import NotRun, run

    counts: Counter[str] = Counter()
    while True:
        try:
            counts += run(db, ages, who=person(), turn_s=math.inf)
        except NotRun as e:
            raise MadeiraError(f"nothing was removed: {e}") from None
        with db.connection() as conn:
            left_s = store.waits_s(conn) if wait else None
        if left_s is None:
            return counts
        time.sleep(left_s + 0.1)
