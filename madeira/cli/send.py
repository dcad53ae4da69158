"""`madeira send`: signs events and posts them to the API."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import click
import httpx
from rich.console import Console
from rich.progress import Progress

from madeira.cli.apply import read
from madeira.cli.common import api_url, json_option, load
from madeira.cli.filters import Whole
from madeira.delivery.signing import sign
from madeira.errors import SettingsError
from madeira.records import Source
from madeira.routing.config import did_you_mean, parse_toml
from madeira.sealing import Sealer
from madeira.settings import Settings, secret_reference

#: Seconds that one answer of the API may take.
_TIMEOUT_S: Final = 10.0

_UNKNOWN: Final = "no configuration file is known (MADEIRA_CONFIG), and what the database has is for the processes only"


@click.command()
@click.argument("event", default="-")
@click.option("--source", help="Source to post as; needed when the configuration has several.")
@click.option(
    "--secret",
    help="Its secret, best as env:NAME: a literal is seen in the list of processes. Absent: that in MADEIRA_CONFIG.",
)
@click.option("--url", help="Base URL of the API. Absent: that of this machine.")
@click.option("--parallel", default=1, show_default=True, type=Whole(1, 64), help="Posts at a time; 1 keeps the order.")
@json_option
def send(event: str, source: str | None, secret: str | None, url: str | None, parallel: int, as_json: bool) -> None:
    """Sign and post events.

    EVENT is a file with one event as JSON, an event itself ('{"event_type": ...}'), or - for one event per line on standard
    input (the default).
    """
    if source and not (source.isascii() and source.isprintable()):
        raise click.BadParameter("the name of a source is of letters, digits, '.', '_' and '-'", param_hint="--source")
    values = load()
    source, secret = _credentials(values, source, secret)
    bodies = list(_bodies(event))
    failed = 0
    limits = httpx.Limits(max_connections=parallel)
    with httpx.Client(base_url=url or api_url(values), timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:
        for answer in _post_all(client, source, secret, bodies, parallel):
            failed += not answer.is_success
            _tell(answer, as_json=as_json)
    if failed:
        raise click.ClickException(f"{failed} of {len(bodies)} events were not accepted")


def post(client: httpx.Client, source: str, secret: str, body: bytes) -> httpx.Response:
    """Sign `body`, one event as JSON, for `source`, and post it."""
    timestamp = str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        "X-Madeira-Source": source,
        "X-Madeira-Timestamp": timestamp,
        "X-Madeira-Signature": sign(secret, timestamp, body),
    }
    return client.post("/v1/events", content=body, headers=headers)


def _post_all(client: httpx.Client, source: str, secret: str, bodies: list[bytes], parallel: int) -> Iterator[httpx.Response]:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal or len(bodies) < 2) as progress:
        task = progress.add_task("posting", total=len(bodies))
        with ThreadPoolExecutor(parallel) as pool:
            try:
                for answer in pool.map(lambda body: post(client, source, secret, body), bodies):
                    progress.advance(task)
                    yield answer
            except httpx.HTTPError as e:
                pool.shutdown(cancel_futures=True)
                raise click.ClickException(f"the API at {client.base_url} cannot be reached: {e}") from None


def _bodies(event: str) -> Iterable[bytes]:
    if event == "-":
        return [line for line in sys.stdin.buffer.read().splitlines() if line.strip()]
    if event.lstrip().startswith("{"):
        return [event.encode()]
    if not event.strip():
        raise click.BadParameter("it is empty: name a file, give an event as JSON, or - for standard input", param_hint="EVENT")
    try:
        with open(event, "rb") as file:
            return [file.read()]
    except OSError as e:
        raise click.BadParameter(f"{event}: {e.strerror}", param_hint="EVENT") from None


def _credentials(values: Settings, source: str | None, secret: str | None) -> tuple[str, str]:
    if source and secret:
        return source, secret_reference(secret, "--secret")
    if secret:
        raise click.UsageError("--secret needs --source")
    sources = _sources(values)
    if source is None and len(sources) == 1:
        source = next(iter(sources))
    if source is None:
        known = f"one of {', '.join(sources)}" if sources else f"and --secret: {_UNKNOWN}"
        raise click.UsageError(f"give --source, {known}")
    if source not in sources:
        why = f"the source {source} is not in {values.config}{did_you_mean(source, sources)}" if values.config else _UNKNOWN
        raise SettingsError(f"{why}; give its --secret")
    return source, sources[source].secrets[0]


def _sources(values: Settings) -> Mapping[str, Source]:
    """Those of the configuration file, if one is known: what the database has is for the processes only."""
    if values.config is None:
        return {}
    return parse_toml(read(values.config), where=str(values.config), sealer=Sealer(values.secret_key)).sources


def _tell(answer: httpx.Response, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"status_code": answer.status_code, **_object(answer)}, ensure_ascii=False))
        return
    told = _object(answer)
    if answer.is_success:
        click.echo(f"{answer.status_code} {told.get('event_id')}{' (duplicate)' if told.get('duplicate') else ''}")
    else:
        click.echo(f"{answer.status_code} {told.get('title', '')}: {told.get('detail', answer.text[:200])}", err=True)


def _object(answer: httpx.Response) -> dict[str, object]:
    try:
        value = answer.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
