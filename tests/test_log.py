import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from madeira import log
from madeira.settings import Settings


class Written:
    """What went to standard error so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Written]:
    """What the logging of this process writes; the logging of the tests is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield Written(capsys)
    root.handlers[:], root.level = handlers, level


def lines(written: Written) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_a_stable_key(written: Written) -> None:
    """Event key, level, time, process and values stand in one object on one line."""
    log.configure(Settings(), "worker")
    log.get("here").info("delivery.settled", status="dead", text="two\nlines")
    (line,) = lines(written)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "delivery.settled",
        "status": "dead",
        "text": "two\nlines",
        "level": "info",
        "logger": "here",
        "process": "worker",
    }


@pytest.mark.parametrize("name", ["dramatiq.worker", "gunicorn.error", "periodiq", "somebody.else"])
def test_lines_of_libraries_look_the_same(written: Written, name: str) -> None:
    """What a library logs goes through the same form and carries what is bound."""
    log.configure(Settings(), "api")
    with log.bind(trace_id="t1", event_id=None):
        logging.getLogger(name).warning("%s went wrong", "it")
    (line,) = lines(written)
    assert (line["event"], line["trace_id"], line["process"]) == ("it went wrong", "t1", "api")
    assert "event_id" not in line


def test_what_is_bound_ends_with_its_block(written: Written) -> None:
    """Bound values are on the lines inside only, also of the same thread."""
    log.configure(Settings(), "api")
    with log.bind(trace_id="t1"):
        with log.bind(trace_id="t2"):
            log.get("here").info("inner")
        log.get("here").info("outer")
    log.get("here").info("after")
    assert [line.get("trace_id") for line in lines(written)] == ["t2", "t1", None]


def test_what_is_bound_stays_in_its_thread(written: Written) -> None:
    """One worker thread's trace is not on another's lines."""
    log.configure(Settings(), "worker")
    with log.bind(trace_id="t1"):
        thread = threading.Thread(target=log.get("here").info, args=("elsewhere",))
        thread.start()
        thread.join()
    assert "trace_id" not in lines(written)[0]


def test_a_traceback_holds_no_values(written: Written) -> None:
    """Local variables, where secrets are, do not leave in a traceback; it is part of its line."""
    log.configure(Settings(), "api")

    def fail() -> None:
        secret = "".join(["hid", "den"])
        raise RuntimeError(len(secret))

    try:
        fail()
    except RuntimeError:
        log.get("here").exception("failed")
    (line,) = lines(written)
    assert "RuntimeError: 6" in line["exception"]
    assert "hidden" not in written.getvalue()


def test_passwords_in_urls_are_hidden(written: Written) -> None:
    """A URL in a value, a message or a traceback loses its password on the way out."""
    log.configure(Settings(), "api")
    log.get("here").warning("lost", url="postgresql://user:s3cret@host/db")
    logging.getLogger("psycopg.pool").warning("cannot connect to %s", "redis://:s3cret@host")
    log.get("here").error("failed", exc_info=RuntimeError("redis://u:s3cret@h"))
    assert "s3cret" not in written.getvalue()
    assert lines(written)[0]["url"] == "postgresql://user:***@host/db"


def test_the_level_is_the_settings(written: Written) -> None:
    """Lines below the level are not written, and libraries that speak at each call are quiet."""
    log.configure(Settings(log_level="info"), "api")
    log.get("here").debug("unheard")
    logging.getLogger("httpx").info("HTTP Request")
    assert written.getvalue() == ""


def test_the_text_form_is_for_people(written: Written) -> None:
    """No JSON, no colors into a file."""
    log.configure(Settings(log_format="text"), "api")
    log.get("here").info("delivery.settled", status="dead")
    assert "delivery.settled" in written.getvalue()
    assert "status=dead" in written.getvalue()
    assert "\x1b" not in written.getvalue()


class Shown:
    """Something whose repr a stranger has a say in."""

    def __repr__(self) -> str:
        return "<\x1b[2J>"


@pytest.mark.parametrize(
    "bad",
    ["\x1b[31m", "\x07", "\x00", "\r", "\n", "\x7f", "\x9b2J", "\u202e", "\u2066", "\u200f", "\u2028"],
    ids=lambda bad: ascii(bad).strip("'"),
)
def test_nothing_on_a_line_of_text_is_obeyed_by_a_terminal(written: Written, bad: str) -> None:
    """In the event, a value, its name, inside of a list or an object, in a traceback: shown as what it is."""
    log.configure(Settings(log_format="text"), "api")
    log.get("here").info(f"e{bad}e", path=f"/v{bad}v", several=[f"l{bad}l"], thing=Shown(), **{f"k{bad}k": 1})
    logging.getLogger("gunicorn.error").warning("a%sz", bad, extra={"more": f"m{bad}m"})
    first, second, *rest = written.getvalue().split("\n")
    assert rest == [""]
    shown = bad.encode("unicode_escape").decode()
    assert f"e{shown}e" in first
    assert f"/v{shown}v" in first
    assert f"k{shown}k" in first
    assert f"a{shown}z" in second
    assert all(c.isprintable() for c in first + second)


def fail(text: str) -> None:
    raise ValueError(text)


def test_a_traceback_in_text_keeps_its_lines_and_nothing_else(written: Written) -> None:
    """It is read by people; what an error says is a stranger's."""
    log.configure(Settings(log_format="text"), "api")
    try:
        fail("bad \x1b[2J name")
    except ValueError:
        log.get("here").exception("failed")
    lines = written.getvalue().splitlines()
    assert lines[-1] == r"ValueError: bad \x1b[2J name"
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)


def test_of_lines_that_repeat_themselves_so_many_are_written_and_the_rest_is_counted() -> None:
    """Of each kind for itself: another endpoint, key, level or logger is another kind; a new window begins anew."""
    now = [0.0]
    sampler = log.Sampler(burst=3, clock=lambda: now[0])

    def line(event: str = "delivery.failed", endpoint: str = "a", level: int = logging.INFO) -> logging.LogRecord:
        return logging.makeLogRecord({"name": "here", "levelno": level, "msg": {"event": event, "endpoint": endpoint}})

    assert [sampler.lets(line()) for _ in range(1_000)] == [True] * 3 + [False] * 997
    assert sampler.lets(line(endpoint="b"))
    assert sampler.lets(line(event="delivery.died"))
    assert sampler.lets(line(level=logging.ERROR))
    assert sampler.over() == []
    now[0] = log.WINDOW_S
    [told] = sampler.over()
    assert (told.getMessage(), told.__dict__["of"], told.__dict__["count"]) == ("log.left_out", "delivery.failed", 997)
    assert (told.__dict__["about"], told.__dict__["seconds"], told.levelno) == ("a", 10.0, logging.INFO)
    assert sampler.lets(line())
    assert sampler.over(all_of_them=True) == []
    everything = log.Sampler(burst=0)
    assert all(everything.lets(line()) for _ in range(1_000))


def test_what_was_left_out_is_said_in_the_form_of_all_lines_and_at_the_end_too(written: Written) -> None:
    """A library's lines are counted by their pattern; who ends says the rest."""
    log.configure(Settings(log_burst=2), "worker")
    for n in range(5):
        logging.getLogger("somebody.else").warning("no answer from %s", n)
    logging.getLogger().handlers[0].close()
    *first, last = lines(written)
    assert [line["event"] for line in first] == ["no answer from 0", "no answer from 1"]
    assert last.pop("timestamp")
    assert last.pop("seconds") < 5
    assert last == {
        "event": "log.left_out",
        "of": "no answer from %s",
        "count": 3,
        "level": "warning",
        "logger": "somebody.else",
        "process": "worker",
    }


def test_the_level_changes_while_it_runs_for_libraries_too(written: Written) -> None:
    """And goes back to that of the settings; loggers that are held already follow."""
    log.configure(Settings(log_level="info"), "worker")
    logger = log.get("here")
    logger.debug("one")
    assert log.set_level("debug")
    logger.debug("two")
    assert log.set_level("error")
    assert not log.set_level("error")
    logger.warning("three")
    logging.getLogger("httpx").warning("four")
    assert log.set_level(None)
    logger.info("five")
    assert [line["event"] for line in lines(written)] == ["two", "five"]


def test_what_looks_like_a_secret_is_hidden_wherever_it_stands(written: Written) -> None:
    """By its name or by its looks, also inside of other values and in what a library says; what only sounds alike is not."""
    log.configure(Settings(), "api")
    log.get("here").info(
        "asked",
        headers={"Authorization": "Basic abc", "accept": "*/*", "cookies": ["a"]},
        said=["Bearer abcdefgh12345678", "bearer of news"],
        api_key="k",
        secret="",
        secrets_found=3,
    )
    logging.getLogger("httpx").warning("with whsec_c2VjcmV0c2VjcmV0 to https://user:pass@host/")
    first, second = lines(written)
    assert first["headers"] == {"Authorization": "***", "accept": "*/*", "cookies": ["a"]}
    assert first["said"] == ["Bearer ***", "bearer of news"]
    assert (first["api_key"], first["secret"], first["secrets_found"]) == ("***", "", 3)
    assert second["event"] == "with whsec_*** to https://user:***@host/"


def test_what_nobody_catches_is_a_line_like_all_others() -> None:
    """In the main thread, in another one, and a warning of Python's."""
    program = """
import threading, warnings
from madeira import log
from madeira.settings import Settings
log.configure(Settings(), "worker")
log.catch()
warnings.warn("old ways", DeprecationWarning)
def fail(): raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="side")
thread.start()
thread.join()
raise ValueError("in the main one")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    warned, side, main = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1
    assert "old ways" in warned["event"]
    assert (side["event"], side["thread"], main["event"]) == ("thread.failed", "side", "process.failed")
    assert "in a thread" in side["exception"]
    assert "in the main one" in main["exception"]
