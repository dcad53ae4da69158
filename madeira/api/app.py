"""The HTTP door: a factory that takes its parts, and `app`, which makes the parts from the settings.

`app` is what ``gunicorn madeira.api:app`` serves. It makes nothing when it is imported: connections and threads do not
survive a fork, so each process opens its own when its server says so (``deploy/gunicorn.conf.py``) or at its first request.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import falcon

from madeira import log, metrics, spans
from madeira.api import health, openapi, problems
from madeira.api.actions import Cancel, CancelEndpoint, Erase, Replay, Reroute
from madeira.api.admin.audit import Audit
from madeira.api.admin.dry_run import DryRun, NewestRules
from madeira.api.admin.lanes import ACTIONS, Hold
from madeira.api.admin.log_level import LogLevel
from madeira.api.admin.objects import Object, Objects
from madeira.api.admin.tokens import Token, Tokens
from madeira.api.admin.trial import TestCall
from madeira.api.auth import Authenticator
from madeira.api.batch import Batch
from madeira.api.dead_letters import DeadLetter, DeadLetters, Groups
from madeira.api.enqueue import Enqueue
from madeira.api.events import Events
from madeira.api.intake import Intake, Outcomes
from madeira.api.jobs import STEERS, Job, Jobs, Steer
from madeira.api.known_tokens import KnownTokens
from madeira.api.limits import Limits
from madeira.api.listing import Event, Listing
from madeira.api.numbers import Numbers, PoolWatch
from madeira.api.patience import Patience
from madeira.api.reconcile import Reconcile
from madeira.broker.memory import warn_of_eviction
from madeira.broker.queues import Queues
from madeira.delivery.client import Caller
from madeira.egress import Egress
from madeira.records import Accepted, NewEvent
from madeira.routing.config import Rules
from madeira.routing.fields import KINDS
from madeira.routing.follow import RulesFollower
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.settings import Settings, load, require
from madeira.store import events as store
from madeira.store.database import Database
from madeira.store.group_commit import GroupCommit
from madeira.store.replica import Lists
from madeira.trial import CALLS, Trials

if TYPE_CHECKING:
    from madeira.spans.record import Spans

#: Seconds that one call of Redis may take at intake: an accepted event must not wait for it.
REDIS_S: Final = 0.2

#: Seconds that an event may wait for its commit; the answer is 503 after that.
COMMIT_S: Final = 1.2

#: The same for an event that tries alone, after others have waited in vain.
TRY_S: Final = 0.5

#: Seconds that a group may fill under load. Measured with 32 clients and 2 processes: groups grow by half, and a third
#: more events are accepted in the same time; half the time costs a twentieth more CPU per event end to end.
GATHER_S: Final = 0.006

#: Connections to Postgres of a process for what is no intake: reads, cancels, probes.
POOL_MAX: Final = 4

#: Connections of a process to a replica.
LISTS_MAX: Final = 2

#: Seconds that one statement may take: a caller has gone by then.
STATEMENT_S: Final = 3.0

#: Seconds that a process waits at its start for the rules to be read.
FIRST_RULES_S: Final = 3.0

#: Seconds that a stopping process gives its last group to be committed.
STOP_S: Final = 5.0

_log = log.get(__name__)

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def create(
    *,
    current: Callable[[], Rules],
    patience: Patience,
    enqueue: Enqueue,
    database: Database,
    lists: Lists,
    queues: Queues,
    tokens: KnownTokens,
    egress: Egress,
    configurator: Configurator,
    trials: Trials,
    rules: NewestRules,
    max_body: int,
    admin_token: str,
    silence_s: float,
    metrics_token: str,
    traces: "Spans | None",
) -> "falcon.App[falcon.Request, falcon.Response]":
    """The WSGI application.

    `lists` reads what may be some seconds old, `current` gives the rules that this process goes by at that moment, `rules` newer
    ones where there are any, `patience` waits for the commits of new events, `enqueue` queues those of batches, `tokens` knows
    the tokens that hold, `max_body` is in bytes, and `admin_token` is one more, of an administrator, unless it is empty. A worker
    counts as gone after `silence_s` seconds without a sign of life; the numbers are shown to whoever has `metrics_token`, unless
    it is empty. `traces` records those of posts, if anybody wants them.
    """
    api = falcon.App()
    problems.install(api)
    auth = Authenticator(rules=current, tokens=tokens, admin_token=admin_token)
    intake: dict[str, Any] = {
        "auth": auth,
        "limits": Limits(sources=lambda: current().sources, queues=queues),
        "checks": Intake(egress=egress),
        "outcomes": Outcomes(auth=auth),
        "spans": traces,
    }
    shared: dict[str, Any] = {"auth": auth, "database": database}
    acting: dict[str, Any] = {**shared, "queues": queues}
    event = Event(**acting)
    routes: dict[str, object] = {
        "/v1/events": Events(**intake, patience=patience, max_body=max_body, listing=Listing(auth=auth, lists=lists)),
        "/v1/events/batch": Batch(**intake, database=database, after=enqueue, max_line=max_body, event=event),
        "/v1/events/{event_id}": event,
        "/v1/dead-letters": DeadLetters(auth=auth, lists=lists),
        "/v1/dead-letters/groups": Groups(auth=auth, lists=lists),
        "/v1/endpoints/{name}/test": TestCall(auth=auth, trials=trials, egress=egress),
        "/v1/dry-run": DryRun(auth=auth, rules=rules, egress=egress),
        "/openapi.json": openapi.Description(),
        "/healthz": health.Alive(),
        "/readyz": health.Ready(database=database, queues=queues),
        "/metrics": Numbers(database=database, lists=lists, queues=queues, silence_s=silence_s, token=metrics_token),
        **{f"/v1/{kind}s": Objects(auth=auth, configurator=configurator, kind=kind) for kind in KINDS},
        **{f"/v1/{kind}s/{{name}}": Object(**acting, configurator=configurator, kind=kind) for kind in KINDS},
        **_actions(acting),
        **_plain(shared),
    }
    for path, resource in routes.items():
        api.add_route(path, resource)
    return api


def _actions(acting: Mapping[str, Any]) -> dict[str, object]:
    """What a person or a program does with what is there: path -> resource; `acting` is what all of them work with."""
    return {
        "/v1/events/{event_id}/cancel": Cancel(**acting),
        "/v1/events/{event_id}/replay": Replay(**acting),
        "/v1/events/{event_id}/reroute": Reroute(**acting),
        "/v1/events/{event_id}/erase": Erase(**acting),
        "/v1/endpoints/{name}/cancel": CancelEndpoint(**acting),
        **{f"/v1/endpoints/{{name}}/{action}": Hold(**acting, action=action) for action in ACTIONS},
        "/v1/jobs": Jobs(**acting),
        "/v1/jobs/{id}": Job(auth=acting["auth"], database=acting["database"]),
        **{f"/v1/jobs/{{id}}/{steer}": Steer(**acting, steer=steer) for steer in STEERS},
    }


def _plain(shared: Mapping[str, Any]) -> dict[str, object]:
    """What takes nothing but a caller and Postgres: path -> resource."""
    return {
        "/v1/dead-letters/{delivery_id}": DeadLetter(**shared),
        "/v1/reconcile": Reconcile(**shared),
        "/v1/log-level": LogLevel(**shared),
        "/v1/tokens": Tokens(**shared),
        "/v1/tokens/{name}": Token(**shared),
        "/v1/audit": Audit(**shared),
    }


class Application:
    """A WSGI application that makes its parts from the settings, once in each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts = ExitStack()
        self._api: WsgiApp | None = None
        self._console: Callable[[], WsgiApp] | None = None
        self._settings: Settings | None = None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        api = self._api or self.open()
        if self._console is not None and f"{environ['PATH_INFO']}/".startswith("/console/"):
            return self._console()(environ, start_response)
        return api(environ, start_response)

    @property
    def settings(self) -> Settings:
        """The settings, read once."""
        if self._settings is None:
            settings = load()
            require(settings, "database_url", "redis_url")
            self._settings = settings
        return self._settings

    def prepare(self) -> None:
        """Read the settings before the processes are forked.

        Raises:
            SettingsError: something is missing or wrong.
        """
        spans.load(self.settings)

    def open(self) -> WsgiApp:
        """Make the parts, unless it was done, and return the application proper; call it after the fork.

        After `close` nothing is made any more.

        Raises:
            SettingsError: the settings do not suffice.
        """
        with self._lock:
            if self._api is None:
                self._api = self._make(self.settings)
            return self._api

    def close(self) -> None:
        """Commit what waits and close all connections; whoever asks for something after that is refused."""
        with self._lock:
            self._api, self._console = _refuse, None
            self._parts.close()

    def _make(self, s: Settings) -> WsgiApp:
        traces = spans.start(s, "api")
        if traces:
            self._parts.callback(traces.close)
        queues = Queues(redis_url=s.redis_url, namespace=s.namespace, timeout_s=REDIS_S)
        self._parts.callback(queues.close)
        warn_of_eviction(queues.client)
        database = Database(url=s.database_url, application="madeira-api", pool_max=POOL_MAX, statement_timeout_s=STATEMENT_S)
        database.open()
        self._parts.callback(database.close)
        pools = PoolWatch(database=database, queues=queues)
        pools.start()
        self._parts.callback(pools.stop)
        # Without Postgres there are no rules yet, and posts are counted as nobody's.
        metrics.expect_sources(())
        rules = self._follow(database, s)
        tokens = KnownTokens(database=database)
        self._parts.callback(tokens.stop)
        enqueue = Enqueue(queues=queues)
        commits: GroupCommit[NewEvent, Accepted] = GroupCommit(
            name="intake", database=database, run=store.insert, after=enqueue, gather_s=GATHER_S, rerun_unknown=False
        )
        commits.start()
        self._parts.callback(commits.stop, STOP_S)
        egress = Egress(allow=s.egress_allow, deny=s.egress_deny)
        shared: dict[str, Any] = {
            "database": database,
            "lists": self._lists(database, s),
            "queues": queues,
            "tokens": tokens,
            "egress": egress,
            "configurator": Configurator(database=database, sealer=Sealer(s.secret_key), egress=egress),
            "trials": self._trials(database, egress, s),
            "rules": NewestRules(database=database, sealer=Sealer(s.secret_key), followed=lambda: rules.current),
            "admin_token": s.admin_token,
        }
        self._console = _once(partial(_console, **shared, current=rules.need, sealer=Sealer(s.secret_key)))
        return create(
            **shared,
            current=rules.need,
            patience=Patience(commits=commits, last_commit=lambda: enqueue.last_commit, wait_s=COMMIT_S, try_s=TRY_S),
            enqueue=enqueue,
            max_body=s.max_body,
            silence_s=s.silence_s,
            metrics_token=s.metrics_token,
            traces=traces,
        )

    def _lists(self, database: Database, s: Settings) -> Lists:
        replica = None
        if s.replica_url:
            replica = Database(
                url=s.replica_url, application="madeira-lists", pool_max=LISTS_MAX, statement_timeout_s=STATEMENT_S, writes=False
            )
        lists = Lists(primary=database, replica=replica)
        lists.start()
        self._parts.callback(lists.stop)
        return lists

    def _trials(self, database: Database, egress: Egress, s: Settings) -> Trials:
        caller = Caller(max_connections=CALLS, egress=egress)
        self._parts.callback(caller.close)
        return Trials(database=database, sealer=Sealer(s.secret_key), caller=caller)

    def _follow(self, database: Database, s: Settings) -> RulesFollower:
        rules = RulesFollower(database=database, sealer=Sealer(s.secret_key), on_change=_expect)
        rules.start()
        self._parts.callback(rules.stop)
        # Until they are there every post is answered 503.
        if rules.wait(FIRST_RULES_S) and not rules.need().names_a_source:
            _log.warning(
                "api.no_sources", remedy="make sources with `madeira apply` or the API; until then every event is refused"
            )
        return rules


def _refuse(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answers for a process that has ended its work, where a request reaches it all the same."""
    body = problems.parts(503, "this process ends; nothing was confirmed, send the request again")
    headers = [
        ("Content-Type", problems.MEDIA_TYPE),
        ("Content-Length", str(len(body))),
        ("Retry-After", str(problems.RETRY_AFTER_S)),
    ]
    start_response(f"503 {problems.title(503)}", headers)
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def _expect(rules: Rules) -> None:
    metrics.expect_sources(rules.sources)


def _console(*, current: Callable[[], Rules], tokens: KnownTokens, admin_token: str, **parts: Any) -> WsgiApp:
    """The console; it is loaded with its first page, since many processes never serve one."""
    from madeira import console

    auth = Authenticator(rules=current, tokens=tokens, admin_token=admin_token)
    return console.create(**parts, auth=auth, tokens=tokens, admin_token=admin_token)


def _once(make: Callable[[], WsgiApp]) -> Callable[[], WsgiApp]:
    """Makes it at the first call, whichever thread that is, and gives the same ever after."""
    lock = threading.Lock()
    made: list[WsgiApp] = []

    def get() -> WsgiApp:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get


#: What ``gunicorn madeira.api:app`` serves.
app: Final = Application()
