"""The description of the API is true: every address is in it, and the running server does what it says."""

import inspect
from collections.abc import Iterator
from typing import Any

import falcon.inspect
import hypothesis
import pytest
import requests
import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.specs.openapi.checks import negative_data_rejection

from madeira.api import openapi, problems
from madeira.api.app import create
from tests.api import mending
from tests.api.people import ADMIN
from tests.api.serving import Api, signed

#: Cases of one operation that are made up at random, beside those that the description's limits suggest.
EXAMPLES = 5

#: Operations with so many fields that trying each of them takes half a minute or more on a slow machine.
LONG = {
    "postEvent",
    "createEndpoint",
    "updateEndpoint",
    "dryRun",
    "startJob",
    "testEndpoint",
    "showDeadLetter",
    "updateRoute",
    "updateSource",
    "listEvents",
    "listDeadLetters",
    "createSource",
    "createRoute",
}

mending.register()

OPERATIONS = [o["operationId"] for item in openapi.document()["paths"].values() for o in item.values()]


class Signature(requests.auth.AuthBase):
    """Signs what goes out, as a source does."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        body = request.body or b""
        body = body.encode() if isinstance(body, str) else body
        request.headers.update(signed(body) | {"Content-Type": request.headers.get("Content-Type", "")})
        return request


class Bearer(requests.auth.AuthBase):
    """Shows the administrator's token."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers.update(ADMIN)
        return request


def credentials(case: schemathesis.Case) -> requests.auth.AuthBase | None:
    """What lets the case in; nothing where it is about headers that are wrong or missing, those of credentials too."""
    if case.meta is not None and case.meta.is_negative_at(ParameterLocation.HEADER):
        return None
    return Signature() if case.operation.definition.raw["operationId"] in ("postEvent", "postBatch") else Bearer()


@pytest.fixture(scope="module")
def schema() -> Any:
    """The description, with what our answers mean."""
    return schemathesis.openapi.from_dict(
        openapi.document(),
        config=schemathesis.Config.from_dict(
            {
                "checks": {
                    # Whatever says that the client is wrong, also that a text is too large to be read.
                    "negative_data_rejection": {"expected-statuses": ["4xx"]},
                    # A version that is none of the present is well-formed.
                    "positive_data_acceptance": {"expected-statuses": ["2xx", "401", "403", "404", "409", "412", "429"]},
                }
            }
        ),
    )


@pytest.fixture(scope="module")
def described_api(shared_api: Api) -> Api:
    """An API with objects that may be changed."""
    mending.make_what_is_patched(shared_api)
    return shared_api


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


def test_every_address_is_described_and_every_description_has_its_address() -> None:
    """With the same methods."""
    made = create(**dict.fromkeys(inspect.signature(create).parameters))
    served = {
        (method.method.lower(), route.path)
        for route in falcon.inspect.inspect_routes(made)
        for method in route.methods
        # HEAD is GET without its body wherever there is one (RFC 9110, 9.3.2), and no operation of its own.
        if not method.internal and method.method != "HEAD"
    }
    described = {(method, path) for path, item in openapi.document()["paths"].items() for method in item}
    assert served == described


def test_the_description_is_valid_and_served_as_it_is(shared_api: Api, schema: Any) -> None:
    """To everybody; valid by OpenAPI's own schema; each name of an operation stands there once."""
    reply = shared_api.get("/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == openapi.document()
    assert reply.json["openapi"].startswith("3.1")
    schema.validate()
    names = [o["operationId"] for item in reply.json["paths"].values() for o in item.values()]
    assert len(names) == len(set(names))


def test_every_schema_is_used_and_every_reference_leads_somewhere() -> None:
    """Nothing is described that nobody meets."""
    components = openapi.document()["components"]
    led_to = set(_references(openapi.document()))
    there = {f"#/components/{kind}/{name}" for kind in ("schemas", "parameters") for name in components[kind]}
    assert led_to == there


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        for value in part.values():
            yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in OPERATIONS])
def test_the_server_does_what_the_description_says(name: str, schema: Any, described_api: Api, session: requests.Session) -> None:
    """For good and bad requests: statuses, media types and bodies as described, nothing wrong accepted, nothing right refused,
    nobody let in without credentials, and no error inside."""
    url = f"http://127.0.0.1:{described_api.port}"

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    def check(case: schemathesis.Case) -> None:
        if case.meta is not None and case.meta.generation.mode.is_positive:
            mending.mend(case)
        # Of a batch every text is well-formed: what is wrong with its lines is told in the answer.
        excluded = [negative_data_rejection] if case.path == "/v1/events/batch" else []
        case.call_and_validate(base_url=url, session=session, auth=credentials(case), timeout=20, excluded_checks=excluded)

    # What the package's own `parametrize` does for every operation when tests are collected, which each process does: making
    # the cases takes as long as many tests.
    load_all_checks()
    build_operation_test(
        config=schema.config,
        operation=schema.find_operation_by_id(name),
        test_func=check,
        given_kwargs={},
        feedback=FeedbackSources(),
    )()


def test_problem_types_are_stable_names() -> None:
    """Lower case with hyphens, each with a status of an error; the first of a status is what the status alone means."""
    for name, (status, when) in problems.TYPES.items():
        assert name.replace("-", "").isalpha()
        assert name == name.lower()
        assert 400 <= status < 600
        assert when.endswith(".")
    for status in {status for status, _ in problems.TYPES.values()}:
        first = next(name for name, (of, _) in problems.TYPES.items() if of == status)
        assert problems.Problem(status, "").name == first
