"""What is done with events and endpoints, by whichever door it is asked for.

Postgres decides, in one transaction with its row in the audit. What follows in the queues is told after the commit; should
Redis be away then, reconcile, routing or the claim see to it, and every process learns of a held endpoint from Postgres.
"""

from collections.abc import Sequence
from typing import Any

from madeira import log
from madeira.broker.queues import DELIVER, ROUTE, Ensure, Queues, delivery_key, ensure_delivery
from madeira.broker.waking import wake_jobs
from madeira.errors import BrokerUnavailable
from madeira.lanes.state import hold_of
from madeira.records import DeliveryRef
from madeira.store import cancelling, holding, jobs, ordering, replay
from madeira.store.cancelling import CancelResult
from madeira.store.database import Database
from madeira.store.holding import Action, Changed
from madeira.store.jobs import NewJob, Steered
from madeira.store.replay import ReplayResult, RerouteResult

_log = log.get(__name__)


class Acting:
    """Acts in `database` and tells `queues`.

    Every method gives None when what it names is not there, and may raise `StoreUnavailable`.
    """

    def __init__(self, *, database: Database, queues: Queues) -> None:
        self._database = database
        self._queues = queues

    def cancel(
        self, source: str, event_id: str, *, who: str, why: str | None, endpoint: str | None = None
    ) -> CancelResult | None:
        """Cancel what is unfinished of an event, or its delivery to `endpoint`.

        Raises:
            IllegalTransition: there is nothing that could be cancelled.
        """
        with self._database.connection() as connection:
            result = cancelling.cancel(connection, source, event_id, who, why, endpoint)
        if result is not None:
            self._forget(ROUTE, [str(result.seq)])
            self._go_on_after(result.cancelled)
            self.forget(result.cancelled)
        return result

    def replay(
        self, source: str, event_id: str, *, who: str, why: str, endpoint: str | None = None, force: bool = False
    ) -> ReplayResult | None:
        """Send the dead deliveries of an event again, or the one to `endpoint`; with `force` those that succeeded too.

        Raises:
            IllegalTransition: there is nothing to replay.
        """
        with self._database.connection() as connection:
            result = replay.replay(connection, source, event_id, who, why, endpoint=endpoint, force=force)
        if result is not None:
            with self._database.connection() as connection:
                first = ordering.leading(connection, result.refs)
            self.ensure(first)
        return result

    def reroute(self, source: str, event_id: str, *, who: str, why: str) -> RerouteResult | None:
        """Have a dead event routed again.

        Raises:
            IllegalTransition: there is nothing to route again.
        """
        with self._database.connection() as connection:
            result = replay.reroute(connection, source, event_id, who, why)
        if result is not None:
            self._ensure([Ensure(ROUTE, str(result.seq))])
        return result

    def hold(self, name: str, action: Action, *, who: str, why: str | None) -> Changed | None:
        """Hold an endpoint, or let it go.

        Raises:
            IllegalTransition: its state does not allow it.
        """
        with self._database.connection() as connection:
            changed = holding.change(connection, name, action, who=who, why=why)
        if changed is not None and changed.version is not None:
            try:
                self._queues.hold(name, changed.version, hold_of(changed.now.state))
            except BrokerUnavailable as e:
                _log.warning("endpoint.not_told", reason=str(e), endpoint=name)
        return changed

    def start_job(self, job: NewJob, *, who: str) -> tuple[dict[str, Any], bool]:
        """Make a job; it, and whether it is new: with a key that was given before it is the job of then.

        Raises:
            AlreadyThere: another job was made under this key.
            IllegalTransition: there is nothing that it would be about.
        """
        with self._database.connection() as connection:
            made, is_new = jobs.create(connection, job, who)
        if is_new:
            self._wake_jobs()
        return made, is_new

    def steer_job(self, job_id: int, steer: str, *, who: str, why: str | None) -> Steered | None:
        """``pause``, ``resume`` or ``cancel`` a job.

        Raises:
            IllegalTransition: the job has ended.
        """
        with self._database.connection() as connection:
            found = jobs.steer(connection, job_id, steer, who, why)
        if found is not None:
            self._wake_jobs()
        return found

    def ensure(self, refs: Sequence[DeliveryRef]) -> None:
        """Queue deliveries that are to go; should that fail, reconcile does."""
        self._ensure([ensure_delivery(ref) for ref in refs])

    def forget(self, refs: Sequence[DeliveryRef]) -> None:
        """Take cancelled deliveries out of the queue; should that fail, the claim refuses them later."""
        self._forget(DELIVER, [delivery_key(ref) for ref in refs])

    def _go_on_after(self, ended: Sequence[DeliveryRef]) -> None:
        """Queue what follows on ended deliveries in their order. Before these are forgotten: a key that is still queued when this
        process dies makes its claim see to it.
        """
        with self._database.connection() as connection:
            following = ordering.following(connection, ended)
        if following:
            self.ensure(following)

    def _wake_jobs(self) -> None:
        try:
            wake_jobs(self._queues)
        except BrokerUnavailable as e:
            _log.warning("job.not_woken", reason=str(e), detail="a worker looks within a minute")

    def _ensure(self, keys: Sequence[Ensure]) -> None:
        try:
            self._queues.ensure(keys)
        except BrokerUnavailable as e:
            _log.warning("action.not_queued", reason=str(e), keys=len(keys))

    def _forget(self, queue: str, keys: Sequence[str]) -> None:
        try:
            self._queues.forget(queue, keys)
        except BrokerUnavailable as e:
            _log.warning("cancel.not_forgotten", reason=str(e), keys=len(keys))
