"""A call over a real socket, and how one fails: what the tests of the client have in common."""

import socket
import time

import pytest

from madeira.delivery.answer import Answer, CallFailed
from madeira.delivery.client import Caller
from madeira.delivery.resolve import Resolver
from tests.delivery.samples import post

#: Seconds that a call may take in the tests of slow receivers.
SHORT_S = 0.4

#: The same, where a call must have got as far as a connection when its time is over, on a busy machine too.
CONNECTED_S = 1.0

#: Seconds that a call may last longer than its deadline, on a busy machine.
GRACE_S = 1.0


def call(caller: Caller, url: str, *, deadline_s: float = 10.0, **more: object) -> Answer:
    return caller.call(post(url, **more), deadline_s=deadline_s)


def failure(caller: Caller, url: str, *, deadline_s: float = 10.0) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        call(caller, url, deadline_s=deadline_s)
    failed = caught.value
    assert failed.url == url
    assert 0 <= failed.duration_s < deadline_s + GRACE_S
    assert time.time() - failed.started_at.timestamp() < 60
    assert failed.reason.isprintable()
    return failed


def resolving(*addresses: tuple[str, int]) -> Resolver:
    def getaddrinfo(host: str, port: int, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

    return Resolver(getaddrinfo=getaddrinfo)
