"""`madeira replay` and `madeira reroute`: a person sends again what has ended, or has it routed again.

With an event at once; with a filter instead of one they make a job, which the workers carry out.
"""

from typing import Any

import click

from madeira.broker.queues import ROUTE, Ensure, ensure_delivery
from madeira.cli.acting import no_event, reason_option, refusals, tell, tell_missing
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.cli.jobs import is_of_jobs, job_options, start
from madeira.settings import Settings
from madeira.store import ordering
from madeira.store import replay as store


@click.command()
@click.argument("event_id", metavar="[EVENT_ID]", required=False)
@reason_option
@click.option("--force", is_flag=True, help="Of one event: also what succeeded; its receiver gets it once more.")
@click.option("--unordered", is_flag=True, help="Of many: not one at a time per endpoint, in the order of the events.")
@job_options
@json_option
def replay(event_id: str | None, reason: str, force: bool, unordered: bool, as_json: bool, **asked: Any) -> None:
    """Send dead deliveries again, with a fresh budget of attempts: of one event (with --source), or as a job of many.

    A job keeps the order of the events, endpoint by endpoint, unless told otherwise.
    """
    values = load()
    configure_log(values)
    if event_id is None:
        if force:
            raise click.UsageError("--force is for one event: give EVENT_ID and --source")
        start(values, "replay", asked, reason, ordered=not unordered, as_json=as_json)
        return
    source = _source(asked)
    if unordered:
        raise click.UsageError("--unordered is for many: leave EVENT_ID out")
    _replay_one(values, event_id, source, asked["endpoint"], reason, force=force, as_json=as_json)


def _source(asked: dict[str, Any]) -> str:
    """The source of the one event that a command is about."""
    if asked["source"] is None or is_of_jobs(asked):
        raise click.UsageError("with EVENT_ID goes --source and nothing that narrows many; without it this is a job")
    return str(asked["source"])


def _replay_one(
    values: Settings, event_id: str, source: str, endpoint: str | None, reason: str, *, force: bool, as_json: bool
) -> None:
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
                "missing": result.missing,
            }
        )
    else:
        click.echo(f"event {event_id} is {result.status}: it goes again to {', '.join(result.endpoints)}")
        tell_missing(result.missing)


@click.command()
@click.argument("event_id", metavar="[EVENT_ID]", required=False)
@reason_option
@job_options
@json_option
def reroute(event_id: str | None, reason: str, as_json: bool, **asked: Any) -> None:
    """Have an event (with --source) routed again, after the rules were mended; or as a job many that could not be sent."""
    values = load()
    configure_log(values)
    if event_id is None:
        start(values, "reroute", asked, reason, as_json=as_json)
        return
    if asked["endpoint"] is not None:
        raise click.UsageError("an event is routed as a whole: leave --endpoint out")
    source = _source(asked)
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
