"""Arrays as we encode them arrive in PostgreSQL as they were."""

from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.store.arrays import Array, BigintArray, BooleanArray, ByteaArray, encoded

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


@pytest.mark.parametrize(
    ("array", "type_name"),
    [
        (ByteaArray([]), "bytea[]"),
        (ByteaArray([b"", None, b"x"]), "bytea[]"),
        # Not a whole number of the pieces it is made in, and more than one.
        (ByteaArray([None if n % 7 == 0 else n.to_bytes(2, "big") for n in range(2_345)]), "bytea[]"),
        (BigintArray([None, -1, *range(1_999)]), "bigint[]"),
        (BooleanArray([n % 3 == 0 for n in range(1_001)]), "boolean[]"),
    ],
    ids=lambda value: value if isinstance(value, str) else len(value.items),
)
async def test_encoded_in_turns_is_the_same_array(conn: Any, array: Array, type_name: str) -> None:
    early = await encoded(array)
    assert repr(early) == "EncodedArray()"
    assert conn.execute(f"SELECT %b::{type_name}", (early,)).fetchone() == (array.items,)  # type: ignore[attr-defined]
