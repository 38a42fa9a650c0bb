"""The queue of a stream: joining, bounds, bursts."""

from __future__ import annotations

import pytest

from pushd.core.outbound import (
    FRAME_BYTES,
    QUEUE_BYTES,
    QUEUE_FRAMES,
    Applied,
    Frame,
    Messages,
    Outbound,
    Ping,
    Pong,
    Started,
)

KIB = bytes(1_024)
MIB = bytes(2**20)


def frames_of(outbound: Outbound) -> list[Frame]:
    taken = []
    while (found := outbound.take(0.0)) is not None:
        taken.append(found[0])
    return taken


def test_live_envelopes_that_wait_share_a_frame() -> None:
    outbound = Outbound()
    for n in range(3):
        assert outbound.put_live(bytes((n,)), 1, 0.0)
    [frame] = frames_of(outbound)
    assert isinstance(frame, Messages)
    assert (frame.pieces, frame.size, frame.live, frame.catch_up) == ([b"\0", b"\1", b"\2"], 3, 3, 0)


def test_a_frame_taken_is_closed() -> None:
    outbound = Outbound()
    outbound.put_live(b"1", 1, 0.0)
    [first] = frames_of(outbound)
    outbound.put_live(b"2", 1, 0.0)
    [second] = frames_of(outbound)
    assert isinstance(first, Messages)
    assert isinstance(second, Messages)
    assert (first.pieces, second.pieces) == ([b"1"], [b"2"])


def test_nothing_joins_across_another_frame() -> None:
    outbound = Outbound()
    outbound.put_live(b"1", 1, 0.0)
    outbound.put(Applied(1, ()), 0.0)
    outbound.put_live(b"2", 1, 0.0)
    assert [type(frame) for frame in frames_of(outbound)] == [Messages, Applied, Messages]


def test_a_page_is_a_frame_of_its_own_and_live_envelopes_may_follow_in_it() -> None:
    outbound = Outbound()
    outbound.put_live(b"1", 1, 0.0)
    outbound.put_page([b"2", b"3"], 0.0)
    outbound.put_live(b"4", 1, 0.0)
    first, second = frames_of(outbound)
    assert isinstance(first, Messages)
    assert isinstance(second, Messages)
    assert (first.live, first.catch_up) == (1, 0)
    assert (second.pieces, second.live, second.catch_up, second.size) == ([b"2", b"3", b"4"], 1, 2, 3)


def test_a_frame_grows_to_its_aim_and_not_beyond() -> None:
    outbound = Outbound()
    for _ in range(FRAME_BYTES // len(KIB) + 1):
        assert outbound.put_live(KIB, 1, 0.0)
    sizes = [frame.size for frame in frames_of(outbound) if isinstance(frame, Messages)]
    assert sizes == [FRAME_BYTES, len(KIB)]


def test_an_envelope_larger_than_a_frame_goes_alone() -> None:
    outbound = Outbound()
    assert outbound.put_live(MIB * 3, 1, 0.0)
    assert outbound.put_live(b"1", 1, 0.0)
    assert [frame.size for frame in frames_of(outbound) if isinstance(frame, Messages)] == [3 * 2**20, 1]


def test_bytes_are_bounded_and_come_back() -> None:
    outbound = Outbound()
    for _ in range(QUEUE_BYTES // len(MIB)):
        assert outbound.put_live(MIB, 1, 0.0)
    assert not outbound.put_live(b"1", 1, 0.0)
    assert not outbound.put_page([b"1"], 0.0)
    assert not outbound.put(Ping(1), 0.0)
    assert len(outbound) == QUEUE_BYTES // FRAME_BYTES
    outbound.take(0.0)
    assert outbound.put_live(MIB, 1, 0.0)
    assert outbound.put_live(KIB, 1, 0.0)


def test_the_bound_holds_inside_a_frame() -> None:
    outbound = Outbound()
    for _ in range(QUEUE_BYTES // len(MIB)):
        outbound.put_live(MIB[1:], 1, 0.0)
    assert outbound.put_live(bytes(16), 1, 0.0)
    assert not outbound.put_live(b"1", 1, 0.0)


def test_frames_are_bounded() -> None:
    outbound = Outbound()
    for n in range(QUEUE_FRAMES):
        assert outbound.put(Pong(n), 0.0)
    assert not outbound.put(Pong(99), 0.0)
    assert not outbound.put_live(b"1", 1, 0.0)
    assert frames_of(outbound) == [Pong(n) for n in range(QUEUE_FRAMES)]


def test_long_lists_of_targets_count() -> None:
    outbound = Outbound()
    targets = [(bytes(33), 2**63 - 1)] * 100_000
    assert outbound.put(Applied(1, targets), 0.0), "the longest answer fits an empty queue"
    assert outbound.put(Started(targets), 0.0)
    assert not outbound.put(Applied(2, targets), 0.0)


@pytest.mark.parametrize(("size", "wants"), [(2**20 - 1, True), (2**20, False)])
def test_a_page_is_wanted_while_less_than_half_a_frame_waits(size: int, wants: bool) -> None:
    outbound = Outbound()
    outbound.put_live(bytes(size), 1, 0.0)
    assert outbound.wants_page is wants
    frames_of(outbound)
    assert outbound.wants_page


def test_waiting_is_measured_from_when_the_frame_began() -> None:
    outbound = Outbound()
    outbound.put_live(b"1", 1, 10.0)
    outbound.put_live(b"2", 1, 11.0)
    taken = outbound.take(12.5)
    assert taken is not None
    assert taken[1] == 2.5


def test_a_burst_is_a_batch_that_found_the_queue_empty() -> None:
    outbound = Outbound()
    assert outbound.is_burst(1)
    outbound.put_live(b"1", 1, 0.0)
    assert outbound.is_burst(1), "what the batch itself put in does not count"
    assert not outbound.is_burst(2)
    frames_of(outbound)
    assert not outbound.is_burst(2)
    assert outbound.is_burst(3)


def test_after_clear_nothing_waits() -> None:
    outbound = Outbound()
    outbound.put_live(MIB, 1, 0.0)
    outbound.clear()
    outbound.put_live(b"1", 1, 0.0)
    [frame] = frames_of(outbound)
    assert isinstance(frame, Messages)
    assert frame.pieces == [b"1"]
