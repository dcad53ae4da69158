"""How far is it? Jobs and their progress; and before one is made, what exactly it would do to how many."""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import falcon

from madeira import strict_json
from madeira.api import jobs as api
from madeira.api import problems, query
from madeira.api.problems import FieldError, Problem, invalid
from madeira.console import asking, fields, forms, picking, words
from madeira.console.house import House, Page, acting, session_of
from madeira.errors import AlreadyThere, IllegalTransition
from madeira.states import JobState, Role
from madeira.store import jobs as store
from madeira.store.jobs import NewJob
from madeira.strict_json import NotStrictJson

#: Jobs of a page.
PAGE: Final = 25

#: Seconds for which a job must have gone on before it is told how quick it is.
_EARLIEST_S: Final = 2.0

#: Endpoints whose pace a preview tells.
_PACES: Final = 8

_DONE: Final = {
    "pause": "is paused; what it has begun goes on to its end",
    "resume": "goes on",
    "cancel": "begins nothing more; what it has begun goes on to its end, and nothing is undone",
}

#: What each would do.
_WOULD: Final = {
    "pause": "Begins nothing more until somebody resumes it; what it has begun goes on to its end.",
    "resume": "Goes on from where it was.",
    "cancel": "Begins nothing more for good: what is left stays as it is, what it has begun goes on to its end.",
}

#: Why some are passed over, as one says it.
_SKIPS: Final = {
    "no_longer": "somebody else was first",
    "born_dead": "never had a body or an address: mend the rules and reroute",
    "erased": "the payload was erased",
    "not_routed": "about to be routed again",
    "cancelled": "cancelled meanwhile",
    "succeeded": "succeeded meanwhile",
    "dead": "dead already",
    "gone": "removed meanwhile",
}

#: What stays of a job: action -> what its counts are called.
_COUNTED: Final = {"replay": "delivered", "cancel": "cancelled", "reroute": "to be routed again"}


def add(app: "falcon.App[falcon.Request, falcon.Response]", house: House) -> None:
    """Add the pages."""
    app.add_route("/console/jobs", JobsPage(house))
    app.add_route("/console/jobs/new", NewPage(house))
    app.add_route("/console/jobs/{id}", JobPage(house))
    for steer in api.STEERS:
        app.add_route(f"/console/jobs/{{id}}/{steer}", Steer(house, steer))


class JobsPage(Page):
    """``/console/jobs``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show a page of them, the latest first."""
        checks = {"state": query.choice(*JobState), "action": query.choice(*api.ACTIONS), "before": query.whole(1, 10**18)}
        asked = asking.read(req, checks)
        with self.house.database.connection() as connection:
            found = store.page(connection, limit=PAGE + 1, **asked.values)
        older = asked.address("jobs", before=found[PAGE - 1]["id"]) if len(found) > PAGE else None
        self.house.show(
            req,
            resp,
            "jobs.html",
            title="Jobs",
            asked=asked,
            chips=asked.chips("jobs", names={"state": "state", "action": "action"}),
            jobs=[_told(job) for job in found[:PAGE]],
            older=older,
            newest=asked.address("jobs", before=None),
            states=list(JobState),
            actions=api.ACTIONS,
        )

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Make the job that a preview has shown."""
        session, form = acting(req)
        job = _asked(form)
        try:
            made, is_new = self.house.acting.start_job(job, who=session.who)
        except AlreadyThere:
            said = "this form has made a job already, which asks for something else: load the preview again"
            raise Problem(409, said, name="already-there") from None
        except IllegalTransition as e:
            raise Problem(409, str(e), name=e.code) from None
        number = made["id"]
        told = "is made; the workers go on with it" if is_new else "was made by this form before; there is no second one"
        self.acted(req, resp, words.address("jobs", str(number)), f"Job {number} {told}.", what=f"job {number}")


def _asked(form: Mapping[str, str]) -> NewJob:
    """The job that a form asks for, checked as the API does.

    Raises:
        Problem: 422.
    """
    if not form.get("key"):
        # Without it a double click would make two.
        raise invalid([FieldError("key", "is missing, which makes a form that is sent twice one job: load the preview again")])
    values: dict[str, Any] = {"action": form.get("action"), "reason": forms.reason(form), "key": form.get("key")}
    try:
        # As strictly as the API: a field that is named twice must not be one that the preview has not shown.
        read = strict_json.parse(form.get("filter", "").encode())
    except NotStrictJson:
        raise invalid([FieldError("filter", "cannot be read: load the preview again")]) from None
    values["filter"] = None if read is None else read.values
    if values["action"] == "cancel":
        values["among"] = form.get("among", "dead")
    if values["action"] == "replay":
        values["ordered"] = form.get("ordered") != "0"
    if rate := form.get("rate", "").strip():
        values["rate"] = fields.number(rate)
    return api.asked(values)[0]


class NewPage(Page):
    """``/console/jobs/new``: what a job would do, and the form that makes it."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Count, show three, and ask why."""
        session = session_of(req)
        if not session.may_act:
            raise problems.forbidden(session.role, Role.OPERATOR)
        ids = picking.ticked(req)
        checks = {
            **picking.CHECKS,
            "action": query.choice(*api.ACTIONS),
            "among": query.choice(*api.AMONG),
            "ticked": asking.flag,
        }
        asked = asking.read(req, checks)
        if "ticked" in asked.values and not ids:
            raise invalid([FieldError("id", "is missing: tick at least one row, or take all that match")])
        if "action" not in asked.values:
            raise invalid([FieldError("action", f"is missing in the address: one of {', '.join(api.ACTIONS)}")])
        action, among = asked.values["action"], asked.values.get("among", "dead")
        if among != "dead" and action != "cancel":
            raise invalid([FieldError("among", f"is for a cancel; a {action} is about what is dead")])
        job = NewJob(action=action, selection=picking.wanted(asked.values, ids), reason="", among=among)
        with self.house.database.connection() as connection:
            found = store.preview(connection, job)
            skips = store.skips(connection, job, found)
        left = found.total - sum(skips.values())
        document = job.selection.as_document()
        self.house.show(
            req,
            resp,
            "job_new.html",
            title=f"{job.action.title()} {words.plural(found.total, *_noun(job))}?" if found.total else "Nothing matches",
            action=job.action,
            filter=json.dumps(document),
            told=picking.told(document, among=among),
            among=among,
            found=found,
            skips=_reasons(skips),
            left=left,
            button=f"{job.action.title()} {words.plural(left, *_noun(job))}",
            nothing=store.nothing(job),
            waits=words.waits(found.missing),
            paces=self._paces([endpoint for kind, endpoint in found.parts if kind == "dead"]),
            key=f"console-{secrets.token_urlsafe(16)}",
            back=words.address(
                "dead-letters" if among == "dead" else "events",
                **{name: asked.given[name] for name in picking.CHECKS if name in asked.given},
            ),
        )

    def _paces(self, endpoints: Sequence[str]) -> list[str]:
        """What each endpoint allows a second, in words."""
        configured = self.house.rules.read().endpoints if endpoints else {}
        there = [configured[name] for name in endpoints if name in configured]
        told = [f"{one.name} {f'takes {one.rate:g}/s' if one.rate else 'has no limit of its own'}" for one in there[:_PACES]]
        return told + [f"and {words.plural(len(there) - _PACES, 'more endpoint')}"] * (len(there) > _PACES)


def _noun(job: NewJob) -> tuple[str, str]:
    if job.action == "reroute":
        return "event", "events"
    return ("dead letter", "dead letters") if job.among == "dead" else ("unfinished delivery", "unfinished deliveries")


class JobPage(Page):
    """``/console/jobs/{id}``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:  # the name in the address
        """Show it."""
        asking.read(req, {})
        with self.house.database.connection() as connection:
            found = store.find(connection, api.number(id))
        if found is None:
            raise api.unknown(id)
        state = JobState(found["state"])
        self.house.show(
            req,
            resp,
            "job.html",
            title=f"Job {found['id']}: {found['action']}",
            job=_told(found),
            skips=_reasons(found["skips"]),
            waits=words.waits(found["missing"]),
            counted=_COUNTED[found["action"]],
            steers=[name for name, (allowed, _) in store.STEERS.items() if state in allowed],
            told=_WOULD,
            needed=api.STEERS,
        )


class Steer(Page):
    """``/console/jobs/{id}/pause``, ``resume`` and ``cancel``."""

    def __init__(self, house: House, steer: str) -> None:
        super().__init__(house)
        self._steer = steer

    def on_get(self, _req: falcon.Request, _resp: falcon.Response, id: str) -> None:
        """Nothing is done by a link: lead to the job."""
        raise falcon.HTTPSeeOther(words.address("jobs", id))

    def on_post(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:
        """Pause, resume or cancel it."""
        session, form = acting(req)
        why = forms.reason(form, required=api.STEERS[self._steer])
        try:
            found = self.house.acting.steer_job(api.number(id), self._steer, who=session.who, why=why)
        except IllegalTransition as e:
            raise Problem(409, str(e), name=e.code) from None
        if found is None:
            raise api.unknown(id)
        number, state = found.job["id"], found.job["state"]
        done = f"is {state}{words.already(found.since, found.by)}" if found.already else _DONE[self._steer]
        self.acted(req, resp, words.address("jobs", str(number)), f"Job {number} {done}.", what=f"job {number}")


def _reasons(skips: Mapping[str, int]) -> list[tuple[int, str]]:
    """How many are passed over, and why, in words; the most first."""
    found = [(count, _SKIPS.get(reason, reason)) for reason, count in skips.items() if count]
    return sorted(found, key=lambda one: (-one[0], one[1]))


def _told(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job with what a page tells beside its counts."""
    over = job["done"] + job["failed"] + job["skipped"]
    left = job["begun"] + job["left"]
    until = job["finished_at"] or datetime.now(UTC)
    lasted = (until - job["created_at"]).total_seconds()
    pace = over / lasted if over and lasted >= _EARLIEST_S else None
    goes_on = job["state"] == JobState.RUNNING and pace and left and not job["missing"]
    return {
        **job,
        "told": picking.told(job["filter"], among=job["among"]),
        "over": over,
        "share": _share(over, job["total"]),
        "bar": _bar(job),
        "pace": _pace(pace) if pace else None,
        "ends": until + timedelta(seconds=left / pace) if goes_on and pace and left / pace < 10**8 else None,
        "lasted_s": lasted,
    }


def _share(part: int, total: int) -> str:
    """A part in percent; 100 only when nothing is left."""
    return "100 %" if part >= total else f"{min(99, 100 * part // total)} %"


def _bar(job: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """The parts of the progress bar: what they are, where they begin, and how long they are, in percent."""
    bar, before = [], 0
    for name in ("done", "failed", "skipped", "begun"):
        if job[name]:
            bar.append((name, round(100 * before / job["total"], 2), round(100 * job[name] / job["total"], 2)))
        before += job[name]
    return bar


def _pace(pace: float) -> str:
    return f"{pace:,.1f}/s" if pace >= 1 else f"{pace * 60:,.1f}/min"
