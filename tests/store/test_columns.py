"""Array literals carry every value over unharmed."""

from typing import Any

import psycopg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from madeira.store import deliveries
from madeira.store.columns import binaries, numbers, texts

#: What Postgres can keep: every character but NUL and lone surrogates.
TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
unhurried = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def through(conn: psycopg.Connection[Any], literal: str, kind: str) -> list[Any]:
    return [row[0] for row in conn.execute(f"SELECT * FROM unnest(%s::{kind}[])".encode(), (literal,))]


@unhurried
@given(st.lists(st.none() | TEXT | st.sampled_from(["", "NULL", "null", '"', "\\", "{", "}", ",", " x ", '\\"'])))
def test_texts_come_back_as_they_were(conn: psycopg.Connection[Any], values: list[str | None]) -> None:
    """Quotes, backslashes, braces, commas, blanks, the word NULL, the empty text and NULL itself."""
    assert through(conn, texts(values), "text") == values


@unhurried
@given(st.lists(st.none() | st.binary()))
def test_bytes_come_back_as_they_were(conn: psycopg.Connection[Any], values: list[bytes | None]) -> None:
    """Any bytes, among them none at all."""
    assert through(conn, binaries(values), "bytea") == values


@unhurried
@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)), st.lists(st.floats(allow_nan=False)), st.lists(st.uuids()))
def test_numbers_come_back_as_they_were(
    conn: psycopg.Connection[Any], integers: list[int | None], floats: list[float], uuids: list[Any]
) -> None:
    """64-bit integers, floats to the last bit with infinities, and UUIDs."""
    assert through(conn, numbers(integers), "bigint") == integers
    assert through(conn, numbers(floats), "float8") == floats
    assert through(conn, numbers(uuids), "uuid") == uuids
    assert through(conn, numbers([True, None, False]), "boolean") == [True, None, False]


def test_the_statement_of_every_settle_is_short_enough_to_be_remembered() -> None:
    """psycopg keeps what it made of a statement up to this length."""
    assert len(deliveries._SETTLE) <= 4096
