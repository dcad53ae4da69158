"""`madeira replay` and `madeira reroute`: a person sends again what has ended, or has it routed again."""

import click

from madeira.broker.queues import ROUTE, Ensure, ensure_delivery
from madeira.cli.acting import no_event, reason_option, refusals, source_option, tell
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.store import ordering
from madeira.store import replay as store


@click.command()
@click.argument("event_id", metavar="EVENT_ID")
@source_option
@reason_option
@click.option("--endpoint", help="Only the delivery to this endpoint.")
@click.option("--force", is_flag=True, help="Also what succeeded: its receiver gets it once more.")
@json_option
def replay(event_id: str, source: str, reason: str, endpoint: str | None, force: bool, as_json: bool) -> None:
    """Send the dead deliveries of an event again, with a fresh budget of attempts."""
    values = load()
    configure_log(values)
    with database(values) as db:
        with refusals(), db.connection() as conn:
            result = store.replay(conn, source, event_id, person(), reason, endpoint=endpoint, force=force)
        if result is None:
            raise no_event(event_id, source, endpoint)
        with db.connection() as conn:
            first = ordering.leading(conn, result.refs)
    tell(values, lambda queues: queues.ensure([ensure_delivery(ref) for ref in first]))
    if as_json:
        print_json(
            {
                "event_id": event_id,
                "source": source,
                "status": result.status,
                "replayed": len(result.refs),
                "endpoints": result.endpoints,
            }
        )
    else:
        click.echo(f"event {event_id} is {result.status}: it goes again to {', '.join(result.endpoints)}")


@click.command()
@click.argument("event_id", metavar="EVENT_ID")
@source_option
@reason_option
@json_option
def reroute(event_id: str, source: str, reason: str, as_json: bool) -> None:
    """Have an event routed again, after the rules were mended."""
    values = load()
    configure_log(values)
    with database(values) as db, refusals(), db.connection() as conn:
        result = store.reroute(conn, source, event_id, person(), reason)
    if result is None:
        raise no_event(event_id, source)
    tell(values, lambda queues: queues.ensure([Ensure(ROUTE, str(result.seq))]))
    if as_json:
        print_json({"event_id": event_id, "source": source, "status": "pending", "removed": result.endpoints})
    else:
        removed = f"; taken away: {', '.join(result.endpoints)}" if result.endpoints else ""
        click.echo(f"event {event_id} is pending and will be routed again{removed}")
