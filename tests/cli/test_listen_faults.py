"""`madeira listen` misbehaves as it is told to, and says what it did; in the test's own process."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from click.testing import CliRunner

from madeira.cli.faults import Faults
from madeira.cli.listen import FixedAnswer, Receiver
from madeira.cli.main import main


@contextmanager
def receiving(faults: Faults, *, as_json: bool = True) -> Iterator[str]:
    """A receiver with these faults; its URL."""
    answers = FixedAnswer(200, b"{}")
    server = Receiver(("127.0.0.1", 0), verifiers=[], answers=answers, faults=faults, fail_status=502, as_json=as_json)
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def post(url: str, timeout_s: float = 5) -> int | str:
    """The status of a call, or how it failed."""
    headers = {"webhook-id": "m1", "X-Madeira-Attempt": "3"}
    try:
        return httpx.post(url, content=b'{"n": 1}', headers=headers, timeout=timeout_s, trust_env=False).status_code
    except httpx.HTTPError as e:
        return type(e).__name__


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (Faults(), {None: 100}),
        (Faults(fail=0.25), {"fail": 25, None: 75}),
        (Faults(fail=1), {"fail": 100}),
        (Faults(fail=0.1, hang=0.2, drop=0.3), {"fail": 10, "hang": 20, "drop": 30, None: 40}),
        (Faults(hang=0.5, drop=0.5), {"hang": 50, "drop": 50}),
    ],
    ids=["none", "a quarter", "all", "some of each", "half and half"],
)
def test_a_share_is_counted_and_not_drawn(faults: Faults, expected: dict[str | None, int]) -> None:
    found = Counter(faults.meet() for _ in range(100))
    assert {name: abs(found[name] - count) <= 1 for name, count in expected.items()} == dict.fromkeys(expected, True)
    assert sum(found.values()) == 100
    assert set(found) <= set(expected)


def test_one_of_four_calls_fails_and_each_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with receiving(Faults(fail=0.25)) as url:
        assert [post(url) for _ in range(8)] == [200, 200, 502, 200] * 2
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["answered"], one["fault"]) for one in told] == [(200, None), (200, None), (502, "fail"), (200, None)] * 2
    assert {(one["method"], one["path"], one["attempt"], one["webhook_id"]) for one in told} == {("POST", "/hook", 3, "m1")}
    assert {(one["signature"], one["body"]) for one in told} == {("not verified", '{"n": 1}')}


def test_a_call_is_cut_off_or_never_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with receiving(Faults(drop=1), as_json=False) as url:
        assert post(url) in ("RemoteProtocolError", "ReadError")
    with receiving(Faults(hang=1), as_json=False) as url:
        assert post(url, timeout_s=0.2) == "ReadTimeout"
    cut, silent = capsys.readouterr().out.splitlines()
    assert "cut off" in cut
    assert "never answered" in silent


def test_a_slow_receiver_answers_late() -> None:
    with receiving(Faults(slow_s=0.3)) as url:
        begun = time.monotonic()
        assert post(url) == 200
        assert time.monotonic() - begun >= 0.3


def test_until_it_takes_connections_they_are_refused() -> None:
    with Receiver(("127.0.0.1", 0), verifiers=[], answers=FixedAnswer(200, b"{}")) as server:
        assert post(f"http://127.0.0.1:{server.server_port}/") == "ConnectError"


def test_shares_that_are_more_than_all_are_refused() -> None:
    done = CliRunner().invoke(main, ["listen", "--port", "0", "--fail", "0.7", "--drop", "0.4"])
    assert (done.exit_code, "--fail 0.7 and --drop 0.4 are 1.1 of all calls" in done.output) == (2, True)
    for odd, told in (
        (["--fail-status", "500"], "--fail-status needs --fail"),
        (["--sample", "--status", "500"], "leave --status and --body out"),
        (["--status", "100"], "200<=x<=599"),
    ):
        done = CliRunner().invoke(main, ["listen", "--port", "0", *odd])
        assert (done.exit_code, told in done.output) == (2, True), done.output
    # What a processor adds up to more than 1 goes further, as far as there is nowhere to listen.
    done = CliRunner().invoke(main, ["listen", "--host", "a..b", "--fail", "0.33", "--hang", "0.56", "--drop", "0.11"])
    assert (done.exit_code, "cannot listen" in done.output) == (1, True)
    assert CliRunner().invoke(main, ["listen", "--fail", "1.5"]).exit_code == 2


@pytest.mark.parametrize("length", ["-1", "+1", "1_0", "\u00b2", "", "x", "9" * 5000])
def test_a_body_of_no_known_length_is_not_waited_for(length: str) -> None:
    """The length is digits and nothing else; the connection ends, since nobody knows where the next call begins."""
    with receiving(Faults()) as url, socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), 5) as s:
        s.sendall(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
        answer = b"".join(iter(lambda: s.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 400 "), answer


@pytest.mark.parametrize(("attempt", "told"), [("3", 3), ("\u00b2", None), ("9" * 5000, None), ("x", None)])
def test_a_strange_number_of_an_attempt_is_none(attempt: str, told: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    with receiving(Faults()) as url:
        headers = {"X-Madeira-Attempt": attempt.encode("latin-1")}
        assert httpx.post(url, content=b"{}", headers=headers, trust_env=False).status_code == 200
    assert json.loads(capsys.readouterr().out)["attempt"] == told
