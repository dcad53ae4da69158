"""An application that fails in the middle of its answer: the client is told so, or cannot take what it got for the whole."""

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from gunicorn import http
from gunicorn.config import Config
from gunicorn.glogging import Logger

from madeira.api import server

#: More than is collected before some of an answer is sent.
MUCH = b"x" * 100_000


class Failing(server.Worker):
    """A worker without a process, whose application fails after `pieces`."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.cfg = Config()
        self.log = Logger(self.cfg)
        self.alive = True
        self.nr, self.max_requests, self.max_keepalived = 0, 10, 10
        self.keepalived_conns = []
        self.wsgi = self._fail
        self._pieces = pieces

    def _fail(self, _environ: Any, start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield from self._pieces
        raise ValueError("a failure of the test")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("pieces", [[b"x"], [MUCH, b"x"]], ids=["nothing sent", "some sent"])
def test_an_answer_that_breaks_off_is_not_taken_for_the_whole(version: bytes, pieces: list[bytes]) -> None:
    """A problem document where nothing has been sent; else the connection is reset."""
    worker = Failing(pieces)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=10) as client,
    ):
        ours, address = listener.accept()
        with ours:
            client.sendall(b"GET / HTTP/%s\r\nHost: x\r\n\r\n" % version)
            parser = http.get_parser(worker.cfg, ours, address)
            conn = SimpleNamespace(sock=ours, client=address, server=listener.getsockname())
            assert not worker.handle_request(next(parser), conn)
            if MUCH in pieces:
                with pytest.raises(ConnectionResetError):
                    client.makefile("rb").read()
            else:
                assert client.recv(4096).startswith(b"HTTP/1.1 500 ")
