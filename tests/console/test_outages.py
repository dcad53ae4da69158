"""What is told while a store is away."""

import uuid
from collections.abc import Callable

import psycopg
import pytest

from madeira.embedded import free_port
from madeira.states import Role
from tests.api.serving import ADMIN_TOKEN, Api
from tests.console.browser import Browser, administrator
from tests.console.scenes import died
from tests.store import making


def test_without_redis_pages_say_so_and_acts_go_through(serve: Callable[..., Api], database_url: str) -> None:
    """Postgres decides; the queues learn of it later."""
    api = serve(database_url, f"redis://127.0.0.1:{free_port()}").start()
    browser = administrator(api)
    with psycopg.connect(database_url, autocommit=True) as c:
        event_id, waiting = died(c), uuid.uuid4().hex
        making.routed(c, ("sink",), event_id=waiting)
    assert "Redis cannot be reached" in browser.get("/console").root.one(id="said").text
    assert "not known" in browser.get("/console/endpoints/sink").root.one(id="state").text
    assert "Redis cannot be reached" in browser.get(f"/console/events/{waiting}?source=shop").text
    seen = browser.submit(browser.get(f"/console/events/{event_id}?source=shop"), "/replay", reason="mended")
    assert "Sent again to sink" in seen.root.one(id="done").text
    seen = browser.submit(browser.get("/console/endpoints/sink"), "/pause", reason="until it is back")
    assert "paused until it is back" in seen.root.one(id="state").text
    with psycopg.connect(database_url, autocommit=True) as c:
        died(c)
    seen = browser.submit(browser.get("/console/jobs/new?action=replay"), "/console/jobs", reason="all of them")
    assert "is made" in seen.root.one(id="done").text
    assert "0 of 1" in seen.root.one(id="progress").text


@pytest.mark.long
def test_without_postgres_a_page_says_so_in_words_and_leaks_nothing(serve: Callable[..., Api], redis_url: str) -> None:
    """Only the administrator of the settings can sign in then: of no other token anybody knows whether it holds."""
    port = free_port()
    api = serve(f"postgresql://somebody:a-password@127.0.0.1:{port}/x", redis_url, config=None).start()
    browser = Browser(api)
    token = f"mdr_{'0' * 12}_{'a' * 43}"
    assert browser.sign_in(token).status == 503
    assert browser.sign_in(ADMIN_TOKEN).status == 503
    seen = browser.get("/console/events")
    assert seen.status == 503
    assert "Postgres cannot be reached" in seen.text
    assert seen.reply.headers["retry-after"] == "2"
    assert "a-password" not in seen.reply.body.decode()
    assert str(port) not in seen.reply.body.decode()
    assert Role.ADMIN in seen.root.one("header").text
