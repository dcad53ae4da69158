"""Test calls over HTTP: one marked call to an endpoint, made by this process while the client waits."""

import json
from typing import Any, Final

import falcon

from madeira import trial
from madeira.api import problems, query, validation
from madeira.api.admin import bodies
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.api.problems import Problem
from madeira.egress import Egress
from madeira.errors import NotThere
from madeira.ids import NAME
from madeira.states import Role
from madeira.strict_json import Document
from madeira.trial import Trial, Trials

#: What a test call may be told.
FIELDS: Final = frozenset({"event_type", "payload", "parameters", "target_uri", "routing_key", "reason"})


class TestCall:
    """``POST /v1/endpoints/{name}/test``."""

    def __init__(self, *, auth: Authenticator, trials: Trials, egress: Egress) -> None:
        self._auth = auth
        self._trials = trials
        self._egress = egress

    def on_post(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Call the endpoint once; the answer tells the request, the receiver's answer, and the verdict on it."""
        caller = self._auth.person(req.env, Role.OPERATOR)
        query.none(req, in_body=FIELDS)
        asked, why = self._asked(bodies.document(req.env, optional=True))
        if not NAME.fullmatch(name):
            raise Problem(404, f"there is no endpoint {name[:64]!a}", name="unknown-endpoint")
        role = caller.role or Role.VIEWER
        try:
            tried = self._trials.call(name, asked, who=caller.name, why=why, anywhere=role.suffices(Role.ADMIN))
        except NotThere as e:
            raise Problem(404, str(e), name="unknown-endpoint") from None
        except trial.Elsewhere as e:
            why_not = f"{e}: this needs a token with the role {Role.ADMIN}; yours has the role {role}"
            raise Problem(403, why_not, role=role, needed=Role.ADMIN) from None
        except trial.Unusable as e:
            raise Problem(409, str(e), name="unusable") from None
        except trial.Busy as e:
            raise problems.unavailable(str(e)) from None
        resp.data = json.dumps({"endpoint": name} | tried.shown(), default=jsonable).encode()

    def _asked(self, document: Document) -> tuple[Trial, str | None]:
        """What is to be sent, checked as an event is, and the reason."""
        errors = bodies.unknown(document.values, FIELDS, "a test call")
        why = bodies.reason_if_any(document.values, errors)
        if errors:
            raise problems.invalid(errors)
        values = {"event_type": trial.EVENT_TYPE, "payload": None} | _without_reason(document.values)
        texts = {"payload": trial.PAYLOAD} | document.texts
        whole = Document(values, texts)
        event = validation.new_event(whole, source=trial.SOURCE, raw=b"", environ={}, egress=self._egress)
        return (
            Trial(
                event_type=event.event_type,
                payload=event.payload,
                parameters=event.parameters,
                target_uri=event.target_uri,
                routing_key=event.routing_key,
            ),
            why,
        )


def _without_reason(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "reason"}
