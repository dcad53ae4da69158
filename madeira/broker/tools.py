"""What the actors of one worker process work with: connections, group commits, rules, the HTTP client.

Opened when the worker boots, after it was forked, and closed when it has ended. The sizes are computed from the number
of threads, so that connections have an upper limit however long the backlog is.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from dramatiq import Broker, Worker, get_broker
from dramatiq.middleware import CurrentMessage

from madeira import spans
from madeira.broker import exposition, master
from madeira.broker.broker import MadeiraBroker
from madeira.broker.exposition import StandIn
from madeira.broker.hands import Hand
from madeira.broker.pulse import Pulse
from madeira.broker.rebuild import Stopper
from madeira.delivery.client import Caller
from madeira.egress import Egress
from madeira.errors import MadeiraError
from madeira.lanes.pace import endpoint_of
from madeira.records import Claimed, Endpoint, Refused, Settled
from madeira.routing.follow import RulesFollower
from madeira.settings import Settings
from madeira.store import claims, deliveries
from madeira.store.claims import ClaimRequest
from madeira.store.database import Database
from madeira.store.deliveries import SettleRequest
from madeira.store.group_commit import GroupCommit

if TYPE_CHECKING:
    from madeira.spans.record import Spans

#: Pooled connections of a worker process to Postgres, beside the two that commit claims and settles, and the one that
#: follows the rules.
POOL: Final = 2

#: Seconds that a worker waits at its start for the rules to be read.
FIRST_RULES_S: Final = 3.0

#: Seconds that a group of claims or settles may fill under load; a lone one never waits. Measured with 2 processes of 24
#: threads: four deliveries where three went without, at little more than half the CPU per delivery.
GATHER_S: Final = 0.004

#: Connections of a worker process to Redis: one that waits to be woken, and those that consumers, the heartbeat and whoever
#: else has a question share.
REDIS_CONNECTIONS: Final = 12


@dataclass
class Tools:
    """The tools of one process. `open` and `close` are called by the life span of the worker."""

    settings: Settings
    broker: MadeiraBroker
    database: Database
    rules: RulesFollower
    pulse: Pulse
    caller: Caller
    egress: Egress
    claims: GroupCommit[ClaimRequest, Claimed | Refused]
    settles: GroupCommit[SettleRequest, Settled]
    #: Ends the waits of a rebuild when the process ends.
    stopped: Stopper
    #: Records traces, from `open` on; None: nobody wants them.
    spans: "Spans | None" = None
    #: Serves the workers' page when nobody else does, from `open` on; None: there is none.
    stand_in: StandIn | None = None

    def open(self, worker: Worker) -> None:
        """Open connections and start threads, in the forked worker."""
        master.end_with_it()
        self.broker.worker = worker
        self.spans = spans.start(self.settings, "worker")
        self.database.open()
        self.rules.start()
        if not self.rules.wait(FIRST_RULES_S):
            # Asks for work once they are there.
            self.broker.gate.close(self.rules.missing or "the rules are being read")
        self.claims.start()
        self.settles.start()
        self.pulse.start()
        self.stand_in = exposition.stand_in(self.settings)

    def close(self) -> None:
        """Close everything; the last finishes were sent."""
        self.stopped.stop()
        if self.stand_in:
            self.stand_in.stop()
        self.pulse.stop()
        self.claims.stop(timeout_s=5.0)
        self.settles.stop(timeout_s=5.0)
        self.rules.stop()
        self.caller.close()
        self.database.close()
        self.broker.wire.close()
        if self.spans:
            self.spans.close()

    def hand(self) -> Hand:
        """The grants of the message that this thread works on.

        Raises:
            MadeiraError: there is none; the middleware should have refused the message.
        """
        message = CurrentMessage.get_current_message()
        hand = self.broker.hands.get(message.options.get("redis_message_id")) if message else None
        if hand is None:
            raise MadeiraError("a keyed actor runs without a grant: is the idempotency middleware missing?")
        return hand

    def endpoint(self, lane: str) -> Endpoint | None:
        """The endpoint of a lane, as it is now; None when there is none, or it cannot be called from here."""
        rules = self.rules.current
        return rules.endpoint(endpoint_of(lane)) if rules else None


def group_commits(
    database: Database,
) -> tuple[GroupCommit[ClaimRequest, Claimed | Refused], GroupCommit[SettleRequest, Settled]]:
    """The committing threads of a worker process; both may run again what they do not know the outcome of."""
    commit = partial(GroupCommit, database=database, rerun_unknown=True, gather_s=GATHER_S)
    return commit(name="claim", run=claims.claim), commit(name="settle", run=deliveries.settle)


def current() -> Tools:
    """The tools of this process.

    Raises:
        MadeiraError: the global broker is not Madeira's.
    """
    broker: Broker = get_broker()
    tools = getattr(broker, "tools", None)
    if not isinstance(tools, Tools):
        raise MadeiraError("import madeira.actors first: it builds the broker that the actors belong to")
    return tools
