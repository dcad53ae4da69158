"""What the commands that act on events share: how the queues hear of it, and how a refusal is told."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, TypeVar

import click

from madeira import reasons
from madeira.broker.queues import Queues
from madeira.errors import BrokerUnavailable, IllegalTransition
from madeira.settings import Settings

T = TypeVar("T")

#: Seconds that Redis gets.
REDIS_S: Final = 2.0


class Reason(click.ParamType[str]):
    """A reason, held to what the API asks of one; `needed` is one that must say something."""

    name = "text"

    def __init__(self, *, needed: bool) -> None:
        self._check = reasons.check_needed if needed else reasons.check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it is."""
        try:
            return self._check(value)
        except ValueError as e:
            self.fail(str(e), param, ctx)


#: An option of commands that nobody runs without a reason.
reason_option = click.option("--reason", type=Reason(needed=True), required=True, help="Why; it stands in the audit.")

#: The same where it may be left out.
maybe_reason_option = click.option("--reason", type=Reason(needed=False), help="Why; it stands in the audit.")


@contextmanager
def refusals() -> Iterator[None]:
    """Tells what the state of an event does not allow in one line, with exit code 1."""
    try:
        yield
    except IllegalTransition as e:
        raise click.ClickException(f"{e} [{e.code}]") from None


def tell(values: Settings, work: Callable[[Queues], object]) -> None:
    """Tell the queues what was committed; should Redis be away, reconcile finds it."""
    if not values.redis_url:
        click.echo("the queues were not told (MADEIRA_REDIS_URL is not set): reconcile does it within a minute", err=True)
        return
    queues = Queues(redis_url=values.redis_url, namespace=values.namespace, timeout_s=REDIS_S)
    try:
        work(queues)
    except BrokerUnavailable as e:
        click.echo(f"the queues were not told ({e}): reconcile does it within a minute", err=True)
    finally:
        queues.close()


def ask(values: Settings, work: Callable[[Queues], T], unknown: str) -> T | None:
    """What the queues say; where Redis cannot tell, None, and a line that begins with what is `unknown`."""
    if not values.redis_url:
        click.echo(f"{unknown} (MADEIRA_REDIS_URL is not set)", err=True)
        return None
    queues = Queues(redis_url=values.redis_url, namespace=values.namespace, timeout_s=REDIS_S)
    try:
        return work(queues)
    except BrokerUnavailable as e:
        click.echo(f"{unknown}: {e}", err=True)
        return None
    finally:
        queues.close()


def so_already(since: datetime | None, by: str | None) -> str:
    """What is told of a state that was there before somebody asked for it: since when, and by whom, where that is known."""
    return " already" + (f", since {since.astimezone():%F %T %z}" if since else "") + (f" by {by}" if by else "")


def tell_missing(endpoints: Sequence[str], *, err: bool = False) -> None:
    """Say which endpoints of a replay were removed, if any were."""
    if endpoints:
        click.echo(f"not configured: {', '.join(endpoints)}; what goes there waits until it is, or is cancelled", err=err)


def no_event(event_id: str, source: str, endpoint: str | None = None) -> click.ClickException:
    """The event, or its delivery, is not there."""
    where = f" that goes to {endpoint}" if endpoint else ""
    return click.ClickException(f"there is no event {event_id} of {source}{where}")
