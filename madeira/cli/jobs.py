"""`madeira jobs`: what is being done with many at once, how far it has come, and how it is held or ended.

`madeira replay`, `madeira cancel` and `madeira reroute` make jobs, when they are given a filter instead of an event (`start`).
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from madeira.broker.waking import wake_jobs
from madeira.cli.acting import maybe_reason_option, reason_option, refusals, so_already, tell, tell_missing
from madeira.cli.common import configure_log, database, json_option, load, person, print_json
from madeira.cli.filters import CLASS, MOMENT, Key, Number, Whole
from madeira.errors import AlreadyThere, SelectionInvalid
from madeira.settings import Settings
from madeira.states import ErrorCode, JobState
from madeira.store import jobs as store
from madeira.store import selection
from madeira.store.database import Database
from madeira.store.jobs import NewJob

#: Seconds between two looks at a job that is followed.
LOOK_S: Final = 0.25

#: Options that say which ones; their names are those of a selection.
_FILTERS: Final = ("source", "endpoint", "event_type", "failure_class", "error", "since", "until", "text")

#: As they are typed.
_OPTION: Final = {name: f"--{name}" for name in _FILTERS} | {"event_type": "--type", "failure_class": "--class"}

#: Options that only a job has.
_OF_JOBS: Final = (
    "event_type",
    "failure_class",
    "error",
    "since",
    "until",
    "text",
    "everything",
    "rate",
    "dry_run",
    "follow",
    "key",
)

_COLORS: Final = {"running": "cyan", "paused": "yellow", "done": "green", "cancelled": "yellow", "failed": "red"}


@click.group()
def jobs() -> None:
    """Replays, cancels and reroutes of many at once."""


@jobs.command("list")
@click.option("--state", type=click.Choice([state.value for state in JobState]), help="Only jobs in this state.")
@click.option("--limit", type=Whole(1, 1000), default=20, show_default=True, help="How many at most.")
@json_option
def list_jobs(state: str | None, limit: int, as_json: bool) -> None:
    """List jobs, the latest first."""
    values = load()
    configure_log(values)
    with database(values) as db, db.connection() as conn:
        found = store.page(conn, limit=limit, state=state)
    if as_json:
        print_json(found)
        return
    for job in found:
        _print(job)
    if not found:
        click.echo("there is no job" + (f" that is {state}" if state else ""))


@jobs.command()
@click.argument("job_id", metavar="JOB", type=Whole())
@json_option
def show(job_id: int, as_json: bool) -> None:
    """Show a job: what it is about, why, by whom, and how far it has come."""
    values = load()
    configure_log(values)
    with database(values) as db:
        job = _found(db, job_id)
    if as_json:
        print_json(job)
        return
    _print(job)
    for name in ("filter", "reason", "who", "ordered", "rate", "skips", "error", "created_at", "finished_at"):
        if job[name] not in (None, {}):
            click.echo(f"  {name}: {_shown(job[name])}")
    tell_missing(job["missing"])


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | dict) else str(value)


@jobs.command()
@click.argument("job_id", metavar="JOB", type=Whole())
@json_option
def follow(job_id: int, as_json: bool) -> None:
    """Wait for the end of a job; the exit code is 1 unless everything was done."""
    values = load()
    configure_log(values)
    with database(values) as db:
        _follow(db, job_id, as_json=as_json)


def _steer(steer: str, about: str, *, needs_reason: bool) -> click.Command:
    @click.command(steer, help=about)
    @click.argument("job_id", metavar="JOB", type=Whole())
    @(reason_option if needs_reason else maybe_reason_option)
    @json_option
    def command(job_id: int, reason: str | None, as_json: bool) -> None:
        values = load()
        configure_log(values)
        with database(values) as db, refusals(), db.connection() as conn:
            done = store.steer(conn, job_id, steer, person(), reason or None)
        if done is None:
            raise _no_job(job_id)
        tell(values, wake_jobs)
        if as_json:
            print_json(done.document)
            return
        _print(done.job)
        if done.already:
            click.echo(f"it is {done.job['state']}{so_already(done.since, done.by)}")

    return command


jobs.add_command(_steer("pause", "Pause a job: it begins nothing more; what it has begun goes on.", needs_reason=True))
jobs.add_command(_steer("resume", "Let a paused job go on from where it was.", needs_reason=False))
jobs.add_command(_steer("cancel", "End a job: it begins nothing more, and nothing that it did is undone.", needs_reason=True))


# -- making one ---------------------------------------------------------------------------------------------------


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that makes a job, when it is given no event."""
    for option in reversed(
        (
            click.option("--source", help="Source of the event; without an event: only those of this source."),
            click.option("--endpoint", help="Only what goes to this endpoint."),
            click.option("--type", "event_type", help="Only this type, or with a star at its end all that begin so."),
            click.option("--class", "failure_class", type=CLASS, help="Only of this failure class."),
            click.option("--error", help=f"Only with this code of the last failure: http_503, {ErrorCode.DNS}, ..."),
            click.option("--since", type=MOMENT, help="Only what died at this time or later (local, unless it names its zone)."),
            click.option("--until", type=MOMENT, help="Only what died before this time."),
            click.option("--text", help="Only with this in the words of the last failure, or in the event's id."),
            click.option("--all", "everything", is_flag=True, help="All that there are, without any other filter."),
            click.option("--rate", type=Number(*store.RATES), help="How many a second, at most."),
            click.option("--key", type=Key(), help="Makes a command that is given twice one job."),
            click.option("--dry-run", is_flag=True, help="Only count, and show a few."),
            click.option("--follow", is_flag=True, help="Wait for the end; the exit code is 1 unless everything was done."),
        )
    ):
        command = option(command)
    return command


def is_of_jobs(asked: Mapping[str, Any]) -> bool:
    """Whether anything is asked for that only a job has."""
    # An empty text is one too: of `--type "$TYPE"` without a value, all of an endpoint must not be what is left.
    return any(asked[name] is not None and asked[name] is not False for name in _OF_JOBS)


def start(
    values: Settings,
    action: Any,
    asked: Mapping[str, Any],
    reason: str,
    *,
    among: str = "dead",
    ordered: bool = True,
    as_json: bool,
) -> None:
    """Make the job that the options `asked` (of `job_options`) describe, or tell what it would be about."""
    job = NewJob(action, _selection(asked), reason, among=among, ordered=ordered, rate=asked["rate"], key=asked["key"])
    with database(values) as db:
        if asked["dry_run"]:
            _preview(db, job, as_json=as_json)
            return
        try:
            with refusals(), db.connection() as conn:
                made, is_new = store.create(conn, job, person())
        except AlreadyThere as e:
            raise click.ClickException(str(e)) from None
        if is_new:
            tell(values, wake_jobs)
        if asked["follow"]:
            _follow(db, made["id"], as_json=as_json)
        elif as_json:
            print_json(made)
        else:
            click.echo(f"job {made['id']} is about {made['total']}; see `madeira jobs follow {made['id']}`")
            tell_missing(made["missing"])


def _selection(asked: Mapping[str, Any]) -> selection.Selection:
    given = {name: asked[name] for name in _FILTERS if asked[name] is not None}
    if not given and not asked["everything"]:
        raise click.UsageError("give EVENT_ID and --source, or say which ones: by --endpoint, --class and others, or --all")
    if given and asked["everything"]:
        raise click.UsageError(f"--all is without any other filter, and there is {_OPTION[next(iter(given))]}")
    document = {name: _as_text(value) for name, value in given.items()}
    try:
        return selection.from_document(document)
    except SelectionInvalid as e:
        raise click.UsageError(str(e)) from None


def _as_text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _preview(db: Database, job: NewJob, *, as_json: bool) -> None:
    with db.connection() as conn:
        preview = store.preview(conn, job)
    if as_json:
        print_json({"dry_run": True, "total": preview.total, "sample": preview.sample, "missing": preview.missing})
        return
    if not preview.total:
        click.echo(f"nothing matches: {store.nothing(job)}")
        return
    click.echo(f"a {job.action} would be about {preview.total}, for example:")
    for one in preview.sample:
        where = f" to {one['endpoint']}" if one["endpoint"] else ""
        click.echo(f"  {one['at'].astimezone():%F %T}  {one['source']}/{one['event_id']}{where}  {one['last_error'] or ''}")
    tell_missing(preview.missing)


# -- showing one --------------------------------------------------------------------------------------------------


def _found(db: Database, job_id: int) -> dict[str, Any]:
    with db.connection() as conn:
        job = store.find(conn, job_id)
    if job is None:
        raise _no_job(job_id)
    return job


def _no_job(job_id: int) -> click.ClickException:
    return click.ClickException(f"there is no job {job_id}")


def _print(job: Mapping[str, Any]) -> None:
    state = click.style(f"{job['state']:<9}", fg=_COLORS[job["state"]])
    click.echo(f"{job['id']:>6}  {state}  {job['action']:<7}  {_counts(job)}")


def _counts(job: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{job[name]} {name}" for name in ("done", "failed", "skipped", "begun", "left") if job[name])
    return f"{job['total']} in all" + (f": {counts}" if counts else "")


def _follow(db: Database, job_id: int, *, as_json: bool) -> None:
    job = _found(db, job_id)
    tell_missing(job["missing"], err=True)
    if as_json or not sys.stdout.isatty():
        while job["finished_at"] is None:
            time.sleep(LOOK_S)
            job = _found(db, job_id)
    else:
        job = _show_progress(db, job)
    if as_json:
        print_json(job)
    else:
        _print(job)
    if job["state"] != JobState.DONE or job["failed"]:
        sys.exit(1)


def _show_progress(db: Database, job: dict[str, Any]) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(), transient=True) as progress:
        task = progress.add_task("", total=job["total"])
        while job["finished_at"] is None:
            completed = job["done"] + job["failed"] + job["skipped"]
            about = f"job {job['id']} ({job['action']}, {job['state']})"
            progress.update(task, description=about, completed=completed, total=job["total"])
            time.sleep(LOOK_S)
            job = _found(db, job["id"])
    return job
