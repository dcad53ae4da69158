"""The pages of workers and scheduler: what they answer, and who serves the one of a port that several want."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from madeira import metrics_page
from madeira.broker.exposition import Exposition, StandIn
from madeira.embedded import free_port
from tests.system.harness import wait_until

#: Seconds between two tries of those that wait for a port here.
PERIOD_S = 0.01

Lines = list[Any]


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[int]:
    """Its port, while it serves."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(port: int, method: str, path: str = "/metrics", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer, read to its end whatever the method."""
    lines = [f"{method} {path} HTTP/1.1", "Host: here", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as s, s.makefile("rb") as answer:
        s.sendall("\r\n".join(lines).encode())
        head, _, body = answer.read().partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in rest if not line.startswith("Date")), body


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Where a page is served, behind a token."""
    with running(metrics_page.serve("127.0.0.1", 0, folder=tmp_path, token="right")) as port:
        yield port


def test_head_gets_the_headers_of_get(port: int) -> None:
    """And no body, whether it may see the page, may not, or asks for something else."""
    for path, headers, status in (
        ("/metrics", {"Authorization": "Bearer right"}, 200),
        ("/metrics", {}, 401),
        ("/other", {"Authorization": "Bearer right"}, 404),
    ):
        of_get, got, body = ask(port, "GET", path, **headers)
        of_head, told, nothing = ask(port, "HEAD", path, **headers)
        assert of_get == of_head == status
        # Numbers that go on meanwhile may make it a little longer.
        assert [*got] == [*told]
        assert got["Content-Type"] == told["Content-Type"]
        assert int(got["Content-Length"]) == len(body)
        assert (bool(body), nothing) == (True, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "NONSENSE"])
def test_other_methods_are_none_of_the_page(port: int, method: str) -> None:
    """With what it has, as the API tells it too."""
    status, headers, _ = ask(port, method, Authorization="Bearer right")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_page_tells_one_folder_from_another_by_whatever_path_it_is_reached(tmp_path: Path) -> None:
    """To whoever asks, since it tells nothing else: no path, and no number."""
    here, there, link = tmp_path / "here", tmp_path / "there", tmp_path / "link"
    here.mkdir()
    there.mkdir()
    link.symlink_to(here)
    with running(metrics_page.serve("127.0.0.1", 0, folder=here, token="right")) as port:
        found = metrics_page.mark_at("127.0.0.1", port)
        assert found == metrics_page.mark_at("0.0.0.0", port)  # as a setting, nothing is bound there
        assert found == metrics_page.mark(here) == metrics_page.mark(link) != metrics_page.mark(there)
        assert found is not None
        assert str(here) not in found


# -- who serves it -----------------------------------------------------------------------------------------------------------


class Stranger(BaseHTTPRequestHandler):
    """Some other program's server."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class NoHttp:
    """Something that listens and says nothing of sense."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while True:
            connection, _ = self.socket.accept()
            with connection:
                if connection.recv(100) == b"end":
                    return
                connection.sendall(b"220 mail.example ESMTP\r\n")

    def close(self) -> None:
        """End it."""
        with socket.create_connection(("127.0.0.1", self.port)) as s:
            s.sendall(b"end")
        self.thread.join()
        self.socket.close()


Begin = Callable[..., Exposition]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What is logged."""
    with capture_logs() as lines:
        yield lines


@pytest.fixture
def begin(lines: Lines) -> Iterator[Begin]:
    """Has a page served on a port as soon as that can be."""
    with ExitStack() as stack:

        def begin(
            port: int, folder: Path, host: str = "127.0.0.1", *, kind: type[Exposition] = Exposition, period_s: float = PERIOD_S
        ) -> Exposition:
            exposition = kind(host=host, port=port, token="", folder=folder, period_s=period_s)
            exposition.start()
            stack.callback(exposition.stop)
            return exposition

        yield begin


def test_whoever_shares_the_folder_waits_quietly_and_takes_the_place_that_is_free(
    tmp_path: Path, begin: Begin, lines: Lines
) -> None:
    """Nobody need start it anew for that, and it tells the same numbers."""
    with running(metrics_page.serve("127.0.0.1", 0, folder=tmp_path)) as port:
        begin(port, tmp_path)
        wait_until(lambda: lines)
    wait_until(lambda: len(lines) == 2)
    assert [(line["event"], line["log_level"]) for line in lines] == [("metrics.not_served", "info"), ("metrics.served", "info")]
    assert ask(port, "GET")[0] == 200


def test_who_stands_in_serves_the_page_when_it_was_missed_and_is_quiet_before(tmp_path: Path, begin: Begin, lines: Lines) -> None:
    """Whoever is to serve it looks more often, and comes first."""
    with running(metrics_page.serve("127.0.0.1", 0, folder=tmp_path)) as port:
        begin(port, tmp_path, kind=StandIn, period_s=0.2)
        first = begin(port, tmp_path)
        wait_until(lambda: lines)
    wait_until(lambda: len(lines) == 2)
    first.stop()
    wait_until(lambda: len(lines) == 3)
    assert [line["event"] for line in lines] == ["metrics.not_served", "metrics.served", "metrics.served"]
    assert ask(port, "GET")[0] == 200


def test_who_stands_in_leaves_a_port_that_somebody_else_has(tmp_path: Path, begin: Begin, lines: Lines) -> None:
    """It goes on looking, and tells nothing: that is for whoever is to serve the page."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        looks = threading.Semaphore(0)
        stand_in = begin(port, tmp_path, kind=StandIn)
        bound = stand_in._bound
        stand_in._bound = lambda: looks.release() or bound()  # type: ignore[func-returns-value, method-assign]
        for _ in range(3):
            assert looks.acquire(timeout=20)
    wait_until(lambda: lines)
    assert [line["event"] for line in lines] == ["metrics.served"]


def test_whoever_has_another_folder_is_never_read_and_says_so_once(tmp_path: Path, begin: Begin, lines: Lines) -> None:
    """With the remedy; and it serves its page when the port is free."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    server = metrics_page.serve("127.0.0.1", 0, folder=theirs)
    with running(server) as port:
        begin(port, ours)
        wait_until(lambda: lines)
        asked = threading.Semaphore(0)
        server.verify_request = lambda *_: not asked.release()  # type: ignore[method-assign]
        for _ in range(3):
            assert asked.acquire(timeout=20)
        [line] = lines
    assert (line["event"], line["log_level"], line["port"]) == ("metrics.not_served", "warning", port)
    assert "another folder" in line["detail"]
    assert "MADEIRA_DATA_DIR" in line["remedy"]
    wait_until(lambda: metrics_page.mark_at("127.0.0.1", port) == metrics_page.mark(ours))


def test_a_port_of_some_other_program_is_told_as_such(tmp_path: Path, begin: Begin, lines: Lines) -> None:
    """One that speaks HTTP, one that does not, and one that is bound and answers nothing at all."""
    with (
        running(ThreadingHTTPServer(("127.0.0.1", 0), Stranger)) as web,
        closing(NoHttp()) as mail,
        socket.socket() as silent,
    ):
        silent.bind(("127.0.0.1", 0))
        for port in (web, mail.port, silent.getsockname()[1]):
            lines.clear()
            exposition = begin(port, tmp_path)
            wait_until(lambda: lines)
            exposition.stop()
            [line] = lines
            assert (line["event"], line["log_level"]) == ("metrics.not_served", "warning")
            assert "Madeira" in line["detail"]
            assert "another metrics port" in line["remedy"]


def test_an_address_that_is_not_ours_is_a_mistake(tmp_path: Path, begin: Begin, lines: Lines) -> None:
    """Nobody serves the page, which a warning says."""
    begin(9191, tmp_path, host="192.0.2.1")
    wait_until(lambda: lines)
    assert lines[0]["log_level"] == "warning"
    assert "MADEIRA_HOST" in lines[0]["remedy"]


def test_what_keeps_a_page_is_told_when_it_was_found_twice(tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look may meet an owner in the midst of its end: that is nobody's mistake."""
    looks = iter([None, "mark", None])
    monkeypatch.setattr(metrics_page, "mark_at", lambda *_: next(looks))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        exposition = Exposition(host="127.0.0.1", port=taken.getsockname()[1], token="", folder=tmp_path, period_s=PERIOD_S)
        monkeypatch.setattr(exposition, "_stopped", Thrice())
        exposition.start()
        exposition.stop()
    assert not lines


class Thrice:
    """An event that sets itself when it was waited for three times."""

    def __init__(self) -> None:
        self.left = 3

    def is_set(self) -> bool:
        """Whether it was."""
        return not self.left

    def set(self) -> None:
        """It is not for others to set."""

    def wait(self, _timeout_s: float) -> None:
        """Count."""
        self.left -= 1


_SIGNALLED = """
import os, signal
from madeira.broker.exposition import Exposition
Exposition(host="127.0.0.1", port={port}, token="", folder=None).start()
known = {{signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}}
signal.pthread_sigmask(signal.SIG_BLOCK, known)
for one in known:
    signal.signal(one, lambda *_: None)
    os.kill(os.getpid(), one)
print(signal.sigpending() == known)
signal.pthread_sigmask(signal.SIG_UNBLOCK, known)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()) & known == set())
"""


def test_a_signal_waits_for_the_main_thread_while_that_cannot_take_it() -> None:
    """In the thread of the page it would wake nobody: a scheduler that stood still for a moment slept for ever then."""
    code = _SIGNALLED.format(port=free_port())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.split(), done.returncode) == (["True", "True"], 0), done.stderr
