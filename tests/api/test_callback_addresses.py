"""Callback addresses at the door: what would never be called is refused with 422, before anything is kept."""

from collections.abc import Callable, Iterator

import pytest

from tests.api.serving import Api, event
from tests.delivery.test_guard import DENIED_HOSTS, NO_HOSTS

#: Beside what is denied anyway.
POLICY = {"MADEIRA_EGRESS_ALLOW": "169.254.7.7", "MADEIRA_EGRESS_DENY": "10.66.0.0/16,*.evil.test"}

OPEN = ["partner.test", "10.0.0.1", "8.8.8.8", "[2600::1]", "169.254.7.7", "[64:ff9b::808:808]", "evil.test"]
DENIED = ["10.66.1.1", "a.evil.test", "A.EVIL.TEST.", "[::ffff:10.66.1.1]", *DENIED_HOSTS]


@pytest.fixture
def strict_api(serve: Callable[..., Api], database_url: str, redis_url: str) -> Iterator[Api]:
    """An API with a policy of its own."""
    return serve(database_url, redis_url, **POLICY).start()


def test_what_would_never_be_called_is_refused_at_the_door(strict_api):
    """Each with 422 that names the field; no id is used up by it, and the good ones are accepted."""
    for host in (*DENIED, *NO_HOSTS):
        reply = strict_api.post(event("the-same-id", target_uri=f"http://{host}/x"))
        assert reply.status == 422, (host, reply.body)
        assert [e["field"] for e in reply.json["errors"]] == ["target_uri"], host
    reply = strict_api.post(event("the-same-id", target_uri="http://127.0.0.1:8080/"))
    assert "MADEIRA_EGRESS_ALLOW=127.0.0.1" in reply.json["errors"][0]["detail"]
    for number, host in enumerate(OPEN):
        assert strict_api.post(event(f"good-{number}", target_uri=f"http://{host}/x")).status == 202, host
    assert strict_api.post(event("the-same-id", target_uri="http://partner.test/x")).status == 202
