"""An open breaker and a wish of the receiver end with what they were about: a person lets go, or there is another receiver."""

from collections.abc import Callable
from typing import Any

import pytest

from madeira.lanes import settings_of
from madeira.routing.follow import rules_of
from madeira.sealing import Sealer
from madeira.store import configuration, holding
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Receiver
from tests.system.harness import KEY, configure, toml, wait_until

BREAKER: dict[str, Any] = {"enabled": True, "hold": 600, "max": 600}


def apply(process: InProcess, **fields: Any) -> None:
    """Change the endpoint as somebody does who applies a file."""
    configure(process.settings.database_url, toml({"a": fields}))


def move(process: InProcess, receiver: Receiver) -> None:
    apply(process, url=receiver.url("/b"), breaker=BREAKER)


def shorten(process: InProcess, receiver: Receiver) -> None:
    apply(process, url=receiver.url("/a"), breaker={**BREAKER, "hold": 1, "max": 2})


def make_anew(process: InProcess, _: Receiver) -> None:
    """What is left of removing it and making one of the same name."""
    with process.conn.transaction():
        process.conn.execute("UPDATE endpoint SET created_at = clock_timestamp() WHERE name = 'a'")
        configuration.raise_version(process.conn)


def hold_and_let_go(process: InProcess, _: Receiver) -> None:
    """By somebody who cannot tell Redis of it."""
    holding.change(process.conn, "a", "pause", who="ann", why="a look at it")
    holding.change(process.conn, "a", "resume", who="ann", why=None)


@pytest.mark.parametrize("mend", [move, shorten, make_anew, hold_and_let_go])
def test_what_waits_behind_a_breaker_goes_on_when_its_receiver_is_another_one_or_let_go(
    make: Make, receiver: Receiver, mend: Callable[[InProcess, Receiver], None]
) -> None:
    """Within seconds, though the breaker would have stayed open for ten minutes."""
    process = make({"breaker": BREAKER, "retry": {"initial": 600, "max": 600}})
    process.start()
    receiver.queue("/a", *[Answer(status=503)] * 4, Answer(status=503, headers={"Retry-After": "200"}))
    for _ in range(5):
        process.wait_place(process.routed("a"), "delayed")
    wait_until(lambda: process.queues.lane_states(["a"])[0].breaker.state == "open", what="the breaker")
    ref = process.routed("a")
    assert process.wait_place(ref, "waiting").limit == "breaker"
    mend(process, receiver)
    process.wait_status(ref, "succeeded")
    [state] = process.queues.lane_states(["a"])
    assert (state.breaker.state, state.retry_after_s) == ("closed", 0.0)


def test_what_is_no_matter_of_the_receiver_keeps_what_was_learnt_of_it(make: Make, receiver: Receiver) -> None:
    """A changed limit or policy closes no breaker."""
    process = make({"breaker": BREAKER})

    def era() -> str:
        rules = rules_of(configuration.read(process.conn), sealer=Sealer((KEY,)))
        [settings] = settings_of(["a"], endpoints=rules.endpoints, version=rules.version, lease_margin_s=1.0)
        return settings.era

    before = era()
    apply(process, url=receiver.url("/a"), breaker=BREAKER, rate=7, concurrency=3, retry={"initial": 1, "max": 2})
    assert era() == before
    move(process, receiver)
    assert era() != before
