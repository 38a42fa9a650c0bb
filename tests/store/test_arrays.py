from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.store.arrays import BigintArray, BooleanArray, ByteaArray

MAYBE_BYTES = st.one_of(st.none(), st.binary(max_size=30))
MAYBE_BIGINT = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))


@pytest.fixture(scope="module")
def conn(postgres: str) -> Any:
    with psycopg.connect(postgres, autocommit=True) as opened:
        yield opened


@given(items=st.lists(MAYBE_BYTES, max_size=20))
def test_bytea(conn: Any, items: list[bytes | None]) -> None:
    assert conn.execute("SELECT %s, %s::bytea[]", (ByteaArray(items), ByteaArray(items))).fetchone() == (items, items)


@given(items=st.lists(MAYBE_BIGINT, max_size=20))
def test_bigint(conn: Any, items: list[int | None]) -> None:
    assert conn.execute("SELECT %s", (BigintArray(items),)).fetchone() == (items,)


@given(items=st.lists(st.booleans(), max_size=20))
def test_boolean(conn: Any, items: list[bool]) -> None:
    assert conn.execute("SELECT %s", (BooleanArray(items),)).fetchone() == (items,)


def test_types_are_what_they_claim(conn: Any) -> None:
    types = conn.execute(
        "SELECT pg_typeof(%s)::text, pg_typeof(%s)::text, pg_typeof(%s)::text",
        (ByteaArray([b""]), BigintArray([1]), BooleanArray([])),
    ).fetchone()
    assert types == ("bytea[]", "bigint[]", "boolean[]")
