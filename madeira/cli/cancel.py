"""`madeira cancel`: ends what has not ended of an event, or all that waits for an endpoint; with a filter, as a job."""

from typing import Any

import click

from madeira.broker.queues import DELIVER, ROUTE, Queues, delivery_key, ensure_delivery
from madeira.cli.acting import no_event, reason_option, refusals, tell
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.cli.jobs import is_of_jobs, job_options, start
from madeira.records import DeliveryRef
from madeira.settings import Settings
from madeira.store import cancelling, ordering

#: Deliveries of one transaction.
PAGE = 500


@click.command()
@click.argument("event_id", metavar="[EVENT_ID]", required=False)
@click.option("--dead", is_flag=True, help="Of many: what is dead, instead of what has not ended.")
@reason_option
@job_options
@json_option
def cancel(event_id: str | None, dead: bool, reason: str, as_json: bool, **asked: Any) -> None:
    """Cancel what has not ended: an event, its delivery to one endpoint, or all that waits for an endpoint.

    With any other filter, --all or --dead this is a job, which the workers carry out.
    """
    values = load()
    configure_log(values)
    source, endpoint = asked["source"], asked["endpoint"]
    if event_id is None and (dead or is_of_jobs(asked) or source is not None):
        if asked["rate"] is not None:
            raise click.UsageError("--rate is for a replay or a reroute; a cancel calls nobody")
        start(values, "cancel", asked, reason, among="dead" if dead else "unfinished", as_json=as_json)
    elif dead or is_of_jobs(asked):
        raise click.UsageError("with EVENT_ID goes --source and nothing that narrows many; without it this is a job")
    elif event_id is not None and source is not None:
        _event(values, event_id, source, endpoint, reason, as_json)
    elif event_id is None and source is None and endpoint is not None:
        _endpoint(values, endpoint, reason, as_json)
    else:
        raise click.UsageError("give EVENT_ID and --source, or say which ones: by --endpoint, --class and others, or --all")


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
    return f"{cancelled} {'delivery' if cancelled == 1 else 'deliveries'} cancelled{calling}"
