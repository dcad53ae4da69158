"""Many events in one request: one signature over the whole body, one event a line, an answer for each that is not accepted.

Each line goes the way of a single post (``madeira.api.events``) and is the same event as if it had been one: it is checked by
the same code, and its digest is over its own bytes. The lines are committed in their order, some at a time, so that a batch of
ten megabytes needs no more than its own size of memory and nobody waits behind it. Should the store go away in the middle, what
was committed stays: the same batch, sent again, tells it as duplicates.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import falcon
import psycopg

from madeira import log
from madeira.api import intake, problems, query, reading, validation
from madeira.api.auth import Authenticator
from madeira.api.intake import Intake, Outcomes
from madeira.api.limits import MOST_AHEAD, Limits
from madeira.api.listing import Event
from madeira.api.problems import Problem
from madeira.errors import StoreUnavailable
from madeira.metrics import IngressOutcome
from madeira.records import Accepted, NewEvent
from madeira.store import events as store
from madeira.store.database import Database
from madeira.strict_json import Document

if TYPE_CHECKING:
    from madeira.spans.record import Post, Spans

#: Its address, for traces.
ROUTE: Final = "/v1/events/batch"

#: Media type of a batch.
NDJSON: Final = "application/x-ndjson"

#: Bytes of a batch.
MAX_BYTES: Final = 10 * 1024 * 1024

#: Lines of a batch, empty ones included.
MAX_LINES: Final = MOST_AHEAD

#: Events that are committed together.
CHUNK: Final = 200

#: Characters of the detail of one rejected line: a batch of nonsense must not be answered by many times its size.
MAX_DETAIL: Final = 500

_log = log.get(__name__)


class Commits(Protocol):
    """What follows the commit of some events; see `madeira.api.enqueue`."""

    def __call__(self, events: Sequence[NewEvent], accepted: Sequence[Accepted], /) -> None:
        """Queue them."""
        ...


class Batch:
    """``POST /v1/events/batch``; ``GET`` shows the event that has this id, as `event` shows any other."""

    def __init__(
        self,
        *,
        auth: Authenticator,
        limits: Limits,
        checks: Intake,
        outcomes: Outcomes,
        database: Database,
        after: Commits,
        max_line: int,
        event: Event,
        spans: "Spans | None",
    ) -> None:
        self._auth = auth
        self._limits = limits
        self._checks = checks
        self._outcomes = outcomes
        self._database = database
        self._after = after
        self._max_line = max_line
        self._event = event
        self._spans = spans

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show the event whose id is the last part of this address."""
        self._event.on_get(req, resp, "batch")

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Accept the events of a batch."""
        tally: Counter[IngressOutcome] = Counter()
        outcome: IngressOutcome = "failed"
        status = 500
        post = intake.begun(self._spans, ROUTE, req.env) if self._spans else None
        try:
            resp.data = self._accept(req, tally, post)
            status, outcome = 200, "accepted"
        except Problem as e:
            status, outcome = e.status_code, intake.outcome_of(e)
            tally[outcome] += 1
            raise
        except BaseException:
            tally["failed"] += 1
            raise
        finally:
            if post:
                post.end(status, outcome)
            for outcome, events in tally.items():
                self._outcomes.count(req.env, outcome, events)

    def _accept(self, req: falcon.Request, tally: "Counter[IngressOutcome]", post: "Post | None") -> bytes:
        environ: dict[str, Any] = req.env
        reading.only(environ, NDJSON)
        raw = reading.body(environ, limit=MAX_BYTES)
        source = self._auth.source(environ, raw)
        if post:
            post.source = source
        query.none(req)
        count = raw.count(b"\n") + (not raw.endswith(b"\n"))
        if count > MAX_LINES:
            raise Problem(
                422,
                f"the batch has {count} lines; send at most {MAX_LINES} in one request, empty ones included",
                name="too-many-lines",
            )
        self._limits.take(source, sum(1 for _ in _lines(raw)))
        run = _Run(self, environ, source, tally, post)
        for number, line in _lines(raw):
            run.add(number, line)
        run.commit()
        return run.answer()

    def check(self, line: bytes, source: str, environ: dict[str, Any]) -> "NewEvent | _Rejected":
        """The event of a line, or why it is none."""
        if len(line) > self._max_line:
            return _Rejected(Problem(413, f"the line is larger than {self._max_line} bytes"), None)
        document: Document | None = None
        try:
            document = reading.parsed(line)
            return self._checks.event(document, source=source, raw=line, environ=environ)
        except Problem as e:
            given = document.values.get("event_id") if document else None
            known = isinstance(given, str) and validation.is_event_id(given)
            return _Rejected(e, str(given) if known else None)

    def commit(self, events: Sequence[NewEvent]) -> list[Accepted]:
        """Commit some events together, and queue them.

        Raises:
            StoreUnavailable: it cannot be said whether they were committed.
            psycopg.Error: what Postgres will not take; nothing was committed.
        """
        with self._database.connection() as connection:
            accepted = store.insert(connection, events)
        self._after(events, accepted)
        return accepted


class _Rejected:
    """Why a line is not accepted."""

    def __init__(self, problem: Problem, event_id: str | None) -> None:
        self.problem = problem
        self.event_id = event_id


class _Run:
    """One batch on its way."""

    def __init__(
        self, batch: Batch, environ: dict[str, Any], source: str, tally: "Counter[IngressOutcome]", post: "Post | None"
    ) -> None:
        self._batch = batch
        self._environ = environ
        self._source = source
        self._tally = tally
        self._post = post
        self._chunk: list[tuple[int, NewEvent]] = []
        self._rejected: list[dict[str, Any]] = []

    def add(self, number: int, line: bytes) -> None:
        """Check the line of this number; with enough of them they are committed."""
        event = self._batch.check(line, self._source, self._environ)
        if isinstance(event, _Rejected):
            self._reject(number, event)
            return
        if self._post:
            event = self._post.line(number, event)
        self._chunk.append((number, event))
        if len(self._chunk) == CHUNK:
            self.commit()

    def commit(self) -> None:
        """Commit what was added.

        Raises:
            Problem: 503, the store is away.
        """
        chunk, self._chunk = self._chunk, []
        if not chunk:
            return
        try:
            accepted = self._batch.commit([event for _, event in chunk])
        except StoreUnavailable as e:
            raise self._unavailable(chunk[0][0], e) from None
        except psycopg.Error:
            self._commit_singly(chunk)
            return
        for (number, event), answer in zip(chunk, accepted, strict=True):
            self._note(number, event, answer)

    def _commit_singly(self, chunk: list[tuple[int, NewEvent]]) -> None:
        """Commit events one by one, so that only the one that Postgres will not take is rejected."""
        for number, event in chunk:
            try:
                [answer] = self._batch.commit([event])
            except StoreUnavailable as e:
                raise self._unavailable(number, e) from None
            except psycopg.Error as e:
                _log.error("intake.refused_by_store", source=event.source, event_id=event.event_id, exc_info=e)
                problem = Problem(500, "an error inside Madeira; it is in the log")
                self._reject(number, _Rejected(problem, event.event_id))
            else:
                self._note(number, event, answer)

    def _note(self, number: int, event: NewEvent, answer: Accepted) -> None:
        if self._post:
            self._post.line_ended(number, answer)
        if answer.conflict:
            problem = Problem(409, "an event with this id was accepted before, with other content; it is unchanged")
            self._reject(number, _Rejected(problem, event.event_id))
        else:
            self._tally["duplicate" if answer.duplicate else "accepted"] += 1

    def _reject(self, number: int, rejected: _Rejected) -> None:
        problem = rejected.problem
        self._tally[intake.outcome_of(problem)] += 1
        told = {"line": number, "type": problem.name, "detail": (problem.description or "")[:MAX_DETAIL]}
        self._rejected.append(told | ({"event_id": rejected.event_id} if rejected.event_id else {}))

    def _unavailable(self, number: int, error: StoreUnavailable) -> Problem:
        _log.warning("intake.unavailable", reason=str(error), source=self._source, line=number)
        return problems.unavailable(
            f"the store cannot be reached; nothing is promised from line {number} on. Send the whole batch again: what was "
            "committed before is told as duplicates"
        )

    def answer(self) -> bytes:
        """What became of the lines."""
        self._rejected.sort(key=lambda told: int(told["line"]))
        return json.dumps(
            {"accepted": self._tally["accepted"], "duplicates": self._tally["duplicate"], "rejected": self._rejected}
        ).encode()


def _lines(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, without their ends (LF or CRLF), and their numbers from 1, empty ones counted too."""
    number = at = 0
    while at < len(raw):
        end = raw.find(b"\n", at)
        end = len(raw) if end < 0 else end
        number += 1
        line = raw[at:end].removesuffix(b"\r")
        at = end + 1
        if line.strip(b" \t\r"):
            yield number, line
