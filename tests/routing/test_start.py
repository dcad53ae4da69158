"""Workers and scheduler start again whatever has become of the configuration file, as real processes."""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

READY = "ready for action"

GOOD = '[[source]]\nname = "one"\nsecrets = ["x"]\n'


@pytest.fixture
def environ(tmp_path: Path, database_url: str, redis_url: str) -> dict[str, str]:
    """The environment of a worker, with a good configuration file."""
    (tmp_path / "rules.toml").write_text(GOOD)
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MADEIRA_", "PROMETHEUS_"))}
    return plain | {
        "MADEIRA_DATABASE_URL": database_url,
        "MADEIRA_REDIS_URL": redis_url,
        "MADEIRA_DATA_DIR": str(tmp_path / "data"),
        "MADEIRA_CONFIG": str(tmp_path / "rules.toml"),
        "MADEIRA_METRICS_PORT": "0",
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def started(program: str, environ: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    command = [str(Path(sys.executable).parent / program), "madeira.actors"]
    if program == "dramatiq":
        command += ["-p", "1", "-t", "2", "--skip-logging"]
    with subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)


def wait_for(process: "subprocess.Popen[bytes]", *words: str, timeout_s: float = 60.0) -> None:
    """Read until each of `words` came."""
    assert process.stdout is not None
    told, deadline = b"", time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not all(word.encode() in told for word in words):
            assert selector.select(deadline - time.monotonic()), told.decode()
            more = os.read(process.stdout.fileno(), 65536)
            assert more, f"it ended: {told.decode()}"
            told += more


def copies(environ: Mapping[str, str]) -> list[Path]:
    return list(Path(environ["MADEIRA_DATA_DIR"]).glob("rules-*.toml"))


@pytest.mark.parametrize("broken", ["[[source]]\nname = 1\n", None])
def test_workers_and_scheduler_start_with_a_bad_file(environ: dict[str, str], broken: str | None) -> None:
    """They go by the last good file and say what is wrong; without a copy of it they stop with one line."""
    file = Path(environ["MADEIRA_CONFIG"])
    with started("dramatiq", environ) as process:
        wait_for(process, READY)
    assert [copy.read_text() for copy in copies(environ)] == [GOOD]
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    for program, ready in (("dramatiq", READY), ("periodiq", "rules.refused")):
        with started(program, environ) as process:
            wait_for(process, "rules.refused", str(file), ready)
            assert process.poll() is None
    copies(environ)[0].unlink()
    with started("dramatiq", environ) as process:
        wait_for(process, "madeira: ", str(file))
        assert process.wait(timeout=60) != 0
