"""Receivers that take their time, in every way: a call ends at its deadline, with its own code, and leaves nothing behind."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from madeira.delivery.answer import CallFailed
from madeira.delivery.client import Caller
from madeira.states import ErrorCode
from tests.delivery.calling import CONNECTED_S, GRACE_S, SHORT_S, call, failure
from tests.delivery.samples import LOOPBACK
from tests.receiver import Answer as Scripted
from tests.receiver import Gate, black_hole_port, silent_port


@pytest.mark.parametrize(
    ("scripted", "code"),
    [
        (Scripted(hold=Gate()), ErrorCode.READ_TIMEOUT),
        (Scripted(drip_body_s=0.05, body=b"x" * 1000), ErrorCode.DEADLINE),
        (Scripted(drip_head_s=0.05), ErrorCode.DEADLINE),
        (Scripted(drip_body_s=0.05, chunk=1, body=b"x" * 1000), ErrorCode.DEADLINE),
        (Scripted(drip_body_s=0.05, until_close=True, body=b"x" * 1000), ErrorCode.DEADLINE),
        (Scripted(interim=4, raw=b""), ErrorCode.DEADLINE),
    ],
    ids=["silent", "drip body", "drip header", "drip chunks", "drip to close", "only interim answers"],
)
def test_a_slow_answer_ends_at_the_deadline(receiver, caller, scripted, code):
    """However the time is spent, the call ends, its connection is closed, and the next one is good."""
    receiver.queue("/slow", scripted)
    failed = failure(caller, receiver.url("/slow"), deadline_s=CONNECTED_S)
    assert failed.error_code is code
    assert failed.duration_s >= CONNECTED_S
    receiver.wait_until(lambda: receiver.open_connections == 0)
    assert call(caller, receiver.url("/good")).status == 200


def test_endless_interim_answers_end_soon(receiver, caller):
    """A receiver that sends 100 Continue for ever is broken."""
    receiver.default(Scripted(interim=-1))
    assert failure(caller, receiver.url(), deadline_s=30).error_code is ErrorCode.PROTOCOL


def test_an_endless_header_section_ends_soon(receiver, caller):
    """It is bounded by bytes, whatever the deadline."""
    receiver.default(Scripted(raw=b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000))
    assert failure(caller, receiver.url(), deadline_s=30).error_code is ErrorCode.PROTOCOL


def test_a_receiver_that_does_not_read_is_given_up(caller):
    """The kernel takes what fits; the rest waits until the deadline."""
    with silent_port() as port, pytest.raises(CallFailed) as caught:
        call(caller, f"http://127.0.0.1:{port}/", body=b"x" * 50_000_000, deadline_s=CONNECTED_S)
    assert caught.value.error_code is ErrorCode.DEADLINE
    assert caught.value.duration_s < CONNECTED_S + GRACE_S


def test_a_port_that_drops_connections_is_given_up(caller):
    """The SYN is never answered."""
    with black_hole_port() as port:
        failed = failure(caller, f"http://127.0.0.1:{port}/", deadline_s=SHORT_S)
    assert failed.error_code is ErrorCode.CONNECT_TIMEOUT


def test_a_handshake_that_never_finishes_is_given_up(caller):
    """Somebody listens and says nothing."""
    with silent_port() as port:
        failed = failure(caller, f"https://127.0.0.1:{port}/", deadline_s=CONNECTED_S)
    assert failed.error_code is ErrorCode.DEADLINE
    assert "TLS handshake" in failed.reason


def test_slow_receivers_leave_nothing_behind(receiver):
    """After 60 calls that ran into their deadline there are as many threads, connections and files as before.

    Twenty threads that want to run at once may be kept from it so long that a call has no connection yet when its time is over.
    """
    receiver.answer("/slow", Scripted(drip_head_s=0.02))
    with Caller(egress=LOOPBACK, max_connections=20) as caller:
        call(caller, receiver.url("/good"))
        threads, files = set(threading.enumerate()), open_files()
        with ThreadPoolExecutor(20) as pool:
            failed = [pool.submit(failure, caller, receiver.url("/slow"), deadline_s=SHORT_S) for _ in range(60)]
        codes = {each.result().error_code for each in failed}
        assert ErrorCode.DEADLINE in codes
        assert codes <= {ErrorCode.DEADLINE, ErrorCode.READ_TIMEOUT, ErrorCode.CONNECT_TIMEOUT}
        receiver.wait_until(lambda: receiver.open_connections <= 1)
        assert set(threading.enumerate()) <= threads
        assert open_files() <= files
        assert call(caller, receiver.url("/good")).status == 200


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
