"""`madeira cancel`: ends what has not ended of an event, or all that waits for an endpoint."""

import click

from madeira.broker.queues import DELIVER, ROUTE, Queues, delivery_key, ensure_delivery
from madeira.cli.acting import no_event, reason_option, refusals, tell
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.records import DeliveryRef
from madeira.settings import Settings
from madeira.store import cancelling, ordering

#: Deliveries of one transaction.
PAGE = 500


@click.command()
@click.argument("event_id", metavar="[EVENT_ID]", required=False)
@click.option("--source", help="Source of the event.")
@click.option("--endpoint", help="Only the delivery to this endpoint; without an event: all that waits for it.")
@reason_option
@json_option
def cancel(event_id: str | None, source: str | None, endpoint: str | None, reason: str, as_json: bool) -> None:
    """Cancel what has not ended: an event, its delivery to one endpoint, or all that waits for an endpoint."""
    values = load()
    configure_log(values)
    if event_id is not None and source is not None:
        _event(values, event_id, source, endpoint, reason, as_json)
    elif event_id is None and source is None and endpoint is not None:
        _endpoint(values, endpoint, reason, as_json)
    else:
        raise click.UsageError("give EVENT_ID and --source, or --endpoint alone")


def _event(values: Settings, event_id: str, source: str, endpoint: str | None, reason: str, as_json: bool) -> None:
    with database(values) as db:
        with refusals(), db.connection() as conn:
            result = cancelling.cancel(conn, source, event_id, person(), reason, endpoint)
        if result is None:
            raise no_event(event_id, source, endpoint)
        with db.connection() as conn:
            following = ordering.following(conn, result.cancelled)

    def forget(queues: Queues) -> None:
        queues.ensure([ensure_delivery(ref) for ref in following])
        queues.forget(ROUTE, [str(result.seq)])
        queues.forget(DELIVER, [delivery_key(ref) for ref in result.cancelled])

    tell(values, forget)
    counts = {"cancelled": len(result.cancelled), "requested": result.requested}
    if as_json:
        print_json({"event_id": event_id, "source": source, "status": result.status, **counts})
    else:
        click.echo(f"event {event_id} is {result.status}: {_told(**counts)}")


def _endpoint(values: Settings, endpoint: str, reason: str, as_json: bool) -> None:
    sweep = cancelling.Sweep(endpoint, person(), reason)
    ended: list[DeliveryRef] = []
    with database(values) as db:
        while not sweep.complete:
            with db.connection() as conn:
                ended += sweep.go_on(conn, PAGE)
        with db.connection() as conn:
            following = ordering.of_endpoint(conn, endpoint, PAGE)
    if not sweep.known:
        raise click.ClickException(f"there is no endpoint {endpoint}, and nothing waits for one of this name")

    def forget(queues: Queues) -> None:
        queues.ensure([ensure_delivery(ref) for ref in following])
        queues.forget(DELIVER, [delivery_key(ref) for ref in ended])

    tell(values, forget)
    counts = {"cancelled": sweep.cancelled, "requested": sweep.requested}
    if as_json:
        print_json({"endpoint": endpoint, **counts})
    else:
        click.echo(f"endpoint {endpoint}: {_told(**counts)}")


def _told(cancelled: int, requested: int) -> str:
    calling = f", {requested} being called now and asked to end" if requested else ""
    return f"{cancelled} deliveries cancelled{calling}"
