"""Which changes of a stream's topics are refused, and with which words."""

from __future__ import annotations

import pytest

from pushd.core.stream_updates import (
    CURSOR_INVALID,
    NO_TOPICS,
    TOPIC_INVALID,
    TOPIC_LIMIT,
    TOPIC_REPEATED,
    UPDATE_INVALID,
    Update,
    UpdateLimits,
    Wanted,
    refuse_static,
    refuse_update,
)

LIMITS = UpdateLimits(max_update_adds=3, max_update_removes=2, max_stream_topics=4, max_static_topics=3)


def group(number: int) -> bytes:
    return b"\x00" + bytes((number,)) * 16


def adds(*numbers: int, cursor: int = 0) -> list[Wanted]:
    return [Wanted(group(number), cursor) for number in numbers]


FOLLOWED = {group(1), group(2), group(3)}


@pytest.mark.parametrize(
    ("update", "refusal"),
    [
        pytest.param(Update(8, adds(4), [group(1)]), None, id="fine"),
        pytest.param(Update(8, [], []), None, id="nothing"),
        pytest.param(Update(0, adds(4), []), UPDATE_INVALID, id="id 0"),
        pytest.param(Update(7, adds(4), []), UPDATE_INVALID, id="the id before"),
        pytest.param(Update(6, [], []), UPDATE_INVALID, id="an older id"),
        pytest.param(Update(2**64 - 1, [], []), None, id="the last id"),
        pytest.param(Update(8, adds(4, 4), []), TOPIC_REPEATED, id="added twice"),
        pytest.param(Update(8, [], [group(1), group(1)]), TOPIC_REPEATED, id="removed twice"),
        pytest.param(Update(8, adds(1), [group(1)]), TOPIC_REPEATED, id="added and removed"),
        pytest.param(Update(8, [Wanted(b"\x00" * 16, 0)], []), TOPIC_INVALID, id="a length that is not the kind's"),
        pytest.param(Update(8, [Wanted(b"\x05" + bytes(16), 0)], []), TOPIC_INVALID, id="an unknown kind"),
        pytest.param(Update(8, [Wanted(b"", 0)], []), TOPIC_INVALID, id="no topic"),
        pytest.param(Update(8, [], [b"\x00"]), TOPIC_INVALID, id="a removed topic that cannot exist"),
        pytest.param(Update(8, [Wanted(b"\x03" + bytes(32), 0)], []), None, id="key packages may be followed"),
        pytest.param(Update(8, adds(4, cursor=2**63 - 1), []), None, id="the last cursor"),
        pytest.param(Update(8, adds(4, cursor=2**63), []), CURSOR_INVALID, id="a cursor beyond it"),
        pytest.param(Update(8, adds(4), []), None, id="up to the limit"),
        pytest.param(Update(8, adds(4, 5), []), TOPIC_LIMIT, id="above the limit"),
        pytest.param(Update(8, adds(4, 5), [group(2)]), None, id="removes make room"),
        pytest.param(Update(8, adds(4, 5), [group(9)]), TOPIC_LIMIT, id="removes of absent topics do not"),
        pytest.param(Update(8, adds(1, 2, 4), []), None, id="topics already followed are not added"),
        pytest.param(Update(8, adds(1, 2, 3, 4), []), TOPIC_LIMIT, id="too many adds"),
        pytest.param(Update(8, [], [group(1), group(2), group(3)]), TOPIC_LIMIT, id="too many removes"),
    ],
)
def test_updates(update: Update, refusal: str | None) -> None:
    assert refuse_update(update, 7, FOLLOWED, len(FOLLOWED), LIMITS) == refusal


@pytest.mark.parametrize(
    ("topics", "refusal"),
    [
        pytest.param(adds(1, 2, 3), None, id="fine"),
        pytest.param([], NO_TOPICS, id="none"),
        pytest.param(adds(1, 2, 3, 4), TOPIC_LIMIT, id="too many"),
        pytest.param(adds(1, 2, 1), TOPIC_REPEATED, id="repeated"),
        pytest.param([Wanted(b"\x01" + bytes(16), 0)], TOPIC_INVALID, id="a topic that cannot exist"),
        pytest.param(adds(1, cursor=2**63), CURSOR_INVALID, id="a cursor that cannot exist"),
    ],
)
def test_static_topics(topics: list[Wanted], refusal: str | None) -> None:
    assert refuse_static(topics, LIMITS) == refusal


def test_a_topic_is_not_in_the_repr() -> None:
    assert "\\x00" not in repr(Update(1, adds(1), [group(2)]))
    assert "\\x00" not in repr(Wanted(group(1), 0))
