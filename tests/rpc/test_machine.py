"""The sans-I/O machine: two of them joined by memory, then one against an adversary."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

import h2.config
import h2.connection
import pytest
from attrs import evolve
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pushd.errors import Code
from pushd.rpc.machine import (
    AnswerDropped,
    ByteBudget,
    CallCancelled,
    CallEnded,
    CallOpened,
    ClientMachine,
    ConnectionFailed,
    Fault,
    GoAwayReceived,
    HalfClosed,
    Limits,
    MachineEvent,
    MessageReceived,
    MessagesSpoilt,
    ServerMachine,
    Status,
)
from pushd.rpc.machine.encoder import PlainEncoder
from tests.rpc.frames import client_frames, frame, server_frames

MIB = 2**20
LIMITS = Limits(
    max_concurrent_streams=100,
    max_receive_message_bytes=25 * MIB,
    max_header_list_bytes=16_384,
    connection_receive_bytes=64 * MIB,
    abuse_burst=200,
    abuse_per_s=100.0,
)
PATH = "/a.B/C"


class Pair:
    """A client's and a server's machine, and what each has heard."""

    def __init__(
        self,
        limits: Limits = LIMITS,
        budget: int = 256 * MIB,
        *,
        unsent: int = 256 * MIB,
        handshake: bool = True,
        beside: Pair | None = None,
    ) -> None:
        self.budget = ByteBudget(budget) if beside is None else beside.budget
        self.unsent = ByteBudget(unsent) if beside is None else beside.unsent
        self.server = ServerMachine(limits, self.budget, self.unsent)
        self.client = ClientMachine(LIMITS, ByteBudget(256 * MIB), authority="h:1", scheme="http", user_agent="t")
        self.at_server: list[MachineEvent] = []
        self.server.on_evicted = self.at_server.append
        self.at_client: list[MachineEvent] = []
        self.now = 0.0
        if handshake:
            self.run()

    def run(self, *, each: Callable[[], None] = lambda: None) -> None:
        """Carries bytes until both are silent."""
        while (out := self.client.data_to_send()) or (back := self.server.data_to_send()):
            if out:
                self.at_server += self.server.receive_data(out, self.now)
            else:
                self.at_client += self.client.receive_data(back, self.now)
            each()

    def run_raw(self, data: bytes) -> None:
        """Frames of the client's that its machine knows nothing of."""
        self.now += 0.01
        self.at_server += self.server.receive_data(data, self.now)
        self.server.data_to_send()

    def messages_at_client(self) -> list[bytes]:
        return [e.payload for e in self.at_client if isinstance(e, MessageReceived)]

    def messages(self, stream_id: int) -> list[bytes]:
        return [e.payload for e in self.at_server if isinstance(e, MessageReceived) and e.stream_id == stream_id]


def test_a_unary_call_goes_there_and_back() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, 1.5, [(b"authorization", b"Bearer x")])
    pair.client.send(stream_id, b"question")
    pair.client.half_close(stream_id)
    pair.run()
    opened, received, closed = pair.at_server
    assert isinstance(opened, CallOpened)
    assert opened.request.path == PATH
    assert opened.request.timeout_s == pytest.approx(1.5, abs=1e-5)
    assert opened.request.headers["authorization"] == "Bearer x"
    assert received == MessageReceived(stream_id, b"question")
    assert closed == HalfClosed(stream_id)
    pair.server.start(stream_id, b"id")
    pair.server.send(stream_id, b"answer")
    pair.server.finish(stream_id, Status(Code.OK), b"id")
    pair.server.release(stream_id)
    pair.run()
    assert pair.at_client == [MessageReceived(stream_id, b"answer"), CallEnded(stream_id, Status(Code.OK))]
    assert pair.server.idle
    assert pair.budget.held == 0
    assert pair.server._committed == 0


def test_a_call_that_never_started_is_answered_with_trailers_only() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    pair.server.finish(stream_id, Status(Code.NOT_FOUND, "no ünicorn", b"details"), b"id")
    pair.run()
    assert pair.at_client == [CallEnded(stream_id, Status(Code.NOT_FOUND, "no ünicorn", b"details"))]
    # The client had not finished its request: the server told it to stop, and the stream is gone on both sides.
    assert pair.server.progress(stream_id) is None
    assert pair.client.open_calls == 0


@pytest.mark.parametrize("size", [0, 65_530, 65_531, 1_000_000, 25 * MIB])
def test_a_message_of_any_length_passes_both_windows_both_ways(size: int) -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.client.send(stream_id, b"q" * size)
    pair.client.half_close(stream_id)
    pair.run()
    assert pair.messages(stream_id) == [b"q" * size]
    pair.server.start(stream_id, b"id")
    pair.server.send(stream_id, b"a" * size)
    pair.server.finish(stream_id, Status(Code.OK), b"id")
    pair.run()
    assert pair.at_client == [MessageReceived(stream_id, b"a" * size), CallEnded(stream_id, Status(Code.OK))]


def test_one_byte_more_than_the_limit_spoils_the_call_before_it_is_held() -> None:
    pair = Pair(evolve(LIMITS, max_receive_message_bytes=100_000))
    stream_id = pair.client.open_call(PATH, None)
    pair.client.send(stream_id, b"q" * 100_001)
    pair.run()
    assert pair.at_server[1:] == [MessagesSpoilt(stream_id, Fault.TOO_LARGE)]
    assert pair.budget.held == 0


def test_a_peer_cannot_make_the_server_hold_more_than_the_connection_may() -> None:
    pair, peak = Pair(), 0

    def look() -> None:
        nonlocal peak
        peak = max(peak, pair.budget.held)
        assert pair.server._committed <= LIMITS.connection_receive_bytes

    ids = [pair.client.open_call(PATH, None) for _ in range(100)]
    for stream_id in ids:
        pair.client.send(stream_id, b"q" * (2 * MIB))
    pair.run(each=look)
    # The reader takes nothing: what has arrived stays below the limit, and at least half of it was put to use.
    assert 32 * MIB < peak <= LIMITS.connection_receive_bytes
    done = 0
    while done < len(ids):  # every call gets its turn once the ones before it are taken
        taken = [e for e in pair.at_server if isinstance(e, MessageReceived)]
        assert taken, "the line does not move"
        pair.at_server.clear()
        for event in taken:
            pair.server.consumed(event.stream_id, event.payload)
        done += len(taken)
        pair.run(each=look)
    assert pair.budget.held == 0


def test_a_waiting_stream_is_not_called_stalled() -> None:
    pair = Pair(evolve(LIMITS, connection_receive_bytes=16 * MIB))
    first, second = (pair.client.open_call(PATH, None) for _ in range(2))
    for stream_id in (first, second):
        pair.client.send(stream_id, b"q" * (9 * MIB))
    pair.run()
    assert pair.messages(first)
    assert not pair.messages(second)
    assert pair.server.progress(second) is None
    pair.server.consumed(first, pair.messages(first)[0])
    pair.run()
    assert pair.messages(second)


def test_the_budget_over_all_connections_ends_the_call_that_does_not_fit() -> None:
    pair = Pair(budget=3 * MIB)
    first, second = (pair.client.open_call(PATH, None) for _ in range(2))
    pair.client.send(first, b"q" * (2 * MIB))
    pair.run()
    pair.client.send(second, b"q" * (2 * MIB))
    pair.run()
    assert pair.at_server[-1] == MessagesSpoilt(second, Fault.OVERLOADED)
    assert pair.budget.held == 2 * MIB + 5
    pair.server.drop_all()
    assert pair.budget.held == 0


def test_a_full_budget_costs_the_message_that_gets_on_worst_its_place() -> None:
    """Whoever moved an instalment last is safe, however little or much it has sent in all."""
    slow = Pair(budget=4 * MIB)
    fast, newcomer = Pair(beside=slow), Pair(beside=slow)
    fast_id = _begin(fast, 20 * MIB, MIB)
    slow_id = _begin(slow, 20 * MIB, 2 * MIB)
    for _ in range(100):
        slow.run_raw(DataFrame(slow_id, b"x").serialize())
    fast.run_raw(DataFrame(fast_id, b"x" * 16_384).serialize() * 2)
    newcomer.client.send(newcomer.client.open_call(PATH, None), b"q" * MIB)
    newcomer.run()
    assert newcomer.messages(1) == [b"q" * MIB]
    assert slow.at_server[-1] == MessagesSpoilt(slow_id, Fault.OVERLOADED)
    assert not any(isinstance(event, MessagesSpoilt) for event in fast.at_server)
    assert fast.budget.held == 2 * MIB + 2 * 16_384 + 5 + 5
    slow.run_raw(DataFrame(slow_id, b"x").serialize())
    assert slow.budget.held == 2 * MIB + 2 * 16_384 + 5 + 5, "nothing more of it is held"
    assert not slow.server.closed


def test_whole_messages_make_no_room() -> None:
    """What waits for a handler is not the peer's fault."""
    pair = Pair(budget=2 * MIB)
    beside = Pair(beside=pair)
    stream_id = pair.client.open_call(PATH, None)
    pair.client.send(stream_id, b"q" * MIB)
    pair.run()
    slow = _begin(pair, 20 * MIB, 500_000)
    late = _begin(beside, 20 * MIB, 700_000)
    assert pair.at_server[-1] == MessagesSpoilt(slow, Fault.OVERLOADED)
    beside.run_raw(DataFrame(late, b"x" * 16_384).serialize() * 30)
    assert beside.at_server[-1] == MessagesSpoilt(late, Fault.OVERLOADED), "it is the slowest itself"
    assert pair.messages(stream_id) == [b"q" * MIB]
    assert pair.budget.held == MIB + 5
    pair.server.consumed(stream_id, pair.messages(stream_id)[0])
    assert pair.budget.held == 0


def test_messages_before_the_one_given_up_are_held_until_they_are_taken() -> None:
    pair = Pair(budget=100_000)
    stream_id = pair.client.open_call(PATH, None)
    pair.client.send(stream_id, b"q" * 30_000)
    pair.client.send(stream_id, b"q" * 90_000)
    pair.run()
    assert pair.at_server[-2:] == [
        MessageReceived(stream_id, b"q" * 30_000),
        MessagesSpoilt(stream_id, Fault.OVERLOADED),
    ]
    assert pair.budget.held == 30_005
    pair.server.consumed(stream_id, b"q" * 30_000)
    assert pair.budget.held == 0


def test_a_message_makes_room_for_another_on_its_own_connection() -> None:
    pair = Pair(budget=2 * MIB)
    slow = _begin(pair, 20 * MIB, MIB)
    fast = _begin(pair, MIB + 300_000 + 40 * 16_384, MIB + 300_000)
    assert pair.at_server[-1] == MessagesSpoilt(slow, Fault.OVERLOADED)
    pair.run_raw(DataFrame(fast, b"x" * 16_384).serialize() * 40)
    assert pair.messages(fast)
    assert not pair.server.closed


def _begin(pair: Pair, size: int, sent: int) -> int:
    """A call whose message of `size` bytes is cut off after about `sent` of them."""
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    pair.run_raw(DataFrame(stream_id, b"\0" + size.to_bytes(4, "big")).serialize())
    for _ in range(sent // 16_384):
        pair.run_raw(DataFrame(stream_id, b"x" * 16_384).serialize())
    pair.run_raw(DataFrame(stream_id, b"x" * (sent % 16_384)).serialize())
    return stream_id


def test_a_full_budget_costs_the_answer_taken_worst_its_place() -> None:
    slow = Pair(unsent=4 * MIB)
    fast, newcomer = Pair(beside=slow), Pair(beside=slow)
    for pair in (fast, slow):
        pair.client.open_call(PATH, None)
        pair.run()
        pair.server.start(1, b"id")
        assert pair.server.send(1, b"a" * (2 * MIB - 100))
        pair.server.data_to_send()
    for _ in range(100):
        slow.run_raw(frame(8, 0, 1, struct.pack(">L", 1)))
    fast.run_raw(frame(8, 0, 1, struct.pack(">L", 40_000)))
    for _ in range(100):
        slow.run_raw(frame(8, 0, 1, struct.pack(">L", 1)))
    newcomer.client.open_call(PATH, None)
    newcomer.run()
    newcomer.server.start(1, b"id")
    assert newcomer.server.send(1, b"a" * MIB)
    assert slow.at_server[-1] == AnswerDropped(1)
    assert fast.server.waiting_bytes(1) > 0
    assert slow.server.waiting_bytes(1) == 0
    newcomer.run()
    assert newcomer.messages_at_client() == [b"a" * MIB]


def test_a_reader_that_takes_nothing_stops_the_writer() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    for _ in range(1_000):
        pair.client.send(stream_id, b"q" * 1_000)
    pair.run()
    assert len(pair.messages(stream_id)) * 1_005 <= 65_535 + 1_005
    assert pair.client.waiting_bytes(stream_id) > 900_000


def test_a_large_answer_leaves_room_for_small_ones() -> None:
    pair = Pair()
    large, small = (pair.client.open_call(PATH, None) for _ in range(2))
    pair.run()
    pair.server.start(large, b"id")
    pair.server.send(large, b"a" * MIB)
    first = pair.server.data_to_send()
    pair.server.start(small, b"id")
    pair.server.send(small, b"a")
    pair.server.finish(small, Status(Code.OK), b"id")
    pair.at_client += pair.client.receive_data(first, 0.0)
    pair.at_client += pair.client.receive_data(pair.server.data_to_send(), 0.0)
    assert CallEnded(small, Status(Code.OK)) in pair.at_client
    assert pair.server.waiting_bytes(large) > 0


def test_output_is_handed_over_in_bounded_portions() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    pair.client._h2.increment_flow_control_window(2**30)
    pair.client._h2.increment_flow_control_window(2**30, stream_id)
    pair.run()
    pair.server.start(stream_id, b"id")
    pair.server.send(stream_id, b"a" * (5 * MIB))
    while portion := pair.server.data_to_send():
        assert len(portion) < 300_000
        pair.at_client += pair.client.receive_data(portion, 0.0)
    assert pair.at_client == [MessageReceived(stream_id, b"a" * (5 * MIB))]


def test_a_peer_that_takes_frames_of_16_MiB_gets_no_further_past_the_limit() -> None:
    """Its windows are wide open as well, so that nothing but our own bound holds an answer back."""
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    wide = frame(4, 0, 0, struct.pack(">HLHL", SettingCodes.MAX_FRAME_SIZE, 2**24 - 1, 4, 2**31 - 1))
    pair.server.receive_data(wide + frame(8, 0, 0, struct.pack(">L", 2**30)), 0.0)
    pair.server.data_to_send()
    pair.server.start(stream_id, b"id")
    pair.server.send(stream_id, b"a" * (15 * MIB))
    assert pair.server.output_bytes < 1_000, "all of it waits in its stream, where it is counted"
    assert pair.unsent.held == 15 * MIB + 5
    sent = b""
    while portion := pair.server.data_to_send():
        assert len(portion) < 350_000
        sent += portion
    assert len(sent) > 15 * MIB
    assert pair.unsent.held == 0


def test_answers_nobody_takes_are_held_up_to_a_limit() -> None:
    pair = Pair(unsent=4 * MIB)
    first, second = (pair.client.open_call(PATH, None) for _ in range(2))
    pair.run()
    for stream_id in (first, second):
        pair.server.start(stream_id, b"id")
    assert pair.server.send(first, b"a" * MIB)
    assert not pair.server.send(second, b"a" * MIB), "one connection may use half"
    assert pair.server.send(second, b"a" * 1_000)
    pair.unsent.held += 3 * MIB  # what other connections may hold
    assert not pair.server.send(first, b"a" * 100_000), "nobody is slower"
    pair.unsent.held -= 3 * MIB
    pair.run()
    assert pair.messages_at_client() == [b"a" * 1_000, b"a" * MIB]
    assert pair.unsent.held == 0
    assert pair.server.send(second, b"a" * MIB)
    pair.client.cancel(second)
    pair.run()
    assert pair.unsent.held == 0


@pytest.mark.parametrize("receive", [64 * MIB, 26 * MIB, 25 * MIB, MIB, 100_000, 150])
def test_windows_and_a_longest_message_fit_into_the_connection_together(receive: int) -> None:
    limits = evolve(LIMITS, connection_receive_bytes=receive)
    windows = limits.stream_window * limits.max_concurrent_streams
    assert windows + limits.longest_message <= receive
    assert 1 <= limits.stream_window <= 65_535
    assert limits.longest_message >= min(25 * MIB, receive - 110_000, receive // 2 - 100)


def test_a_status_too_long_for_one_frame_is_continued() -> None:
    pair = Pair()
    pair.client._h2.decoder.max_header_list_size = 2**20
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    details = bytes(range(256)) * 200
    pair.server.finish(stream_id, Status(Code.INTERNAL, "text", details), b"id")
    pair.client._max_input = 2**20
    pair.run()
    assert pair.at_client == [CallEnded(stream_id, Status(Code.INTERNAL, "text", details))]


def test_h2_keeps_its_books_of_what_is_written_past_it() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.client.half_close(stream_id)
    pair.run()
    before = pair.server._h2.outbound_flow_control_window
    pair.server.start(stream_id, b"id")
    pair.server.send(stream_id, b"a" * 995)
    assert pair.server._h2.outbound_flow_control_window == before - 1_000
    assert pair.server._h2.local_flow_control_window(stream_id) == 65_535 - 1_000
    pair.server.finish(stream_id, Status(Code.OK), b"id")
    assert pair.server._h2.streams[stream_id].closed
    assert pair.server._h2.open_inbound_streams == 0


def test_goaway_ends_later_calls_as_unprocessed_and_lets_earlier_ones_finish() -> None:
    pair = Pair()
    early = pair.client.open_call(PATH, None)
    pair.client.half_close(early)
    pair.run()
    late = pair.client.open_call(PATH, None)  # crosses the GOAWAY
    pair.server.goaway()
    pair.run()
    assert not pair.client.usable
    ended = [e for e in pair.at_client if isinstance(e, CallEnded)]
    assert [(e.stream_id, e.status.code, e.unprocessed) for e in ended] == [(late, Code.UNAVAILABLE, True)]
    assert GoAwayReceived() in pair.at_client
    pair.server.start(early, b"id")
    pair.server.send(early, b"a")
    pair.server.finish(early, Status(Code.OK), b"id")
    pair.run()
    assert pair.at_client[-1] == CallEnded(early, Status(Code.OK))


def test_a_lost_connection_ends_every_call() -> None:
    pair = Pair()
    ids = [pair.client.open_call(PATH, None) for _ in range(3)]
    ended = pair.client.lost()
    assert [(e.stream_id, e.status.code) for e in ended] == [(i, Code.UNAVAILABLE) for i in ids]
    assert not pair.client.usable


def test_a_cancelled_call_is_heard_and_forgotten() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.client.send(stream_id, b"q" * 100_000)
    pair.run()
    pair.client.cancel(stream_id)
    pair.run()
    assert pair.at_server[-1] == CallCancelled(stream_id)
    assert pair.server.running == 1, "its handler has not let go"
    pair.server.release(stream_id)
    pair.server.send(stream_id, b"nobody listens")
    pair.server.finish(stream_id, Status(Code.OK), b"id")
    assert pair.server.idle
    assert (pair.budget.held, pair.server._committed) == (0, 0)


def test_more_calls_than_allowed_are_refused_one_by_one() -> None:
    pair = Pair(evolve(LIMITS, max_concurrent_streams=2), handshake=False)
    ids = [pair.client.open_call(PATH, None) for _ in range(6)]  # it has not read the server's settings yet
    pair.run()
    ended = [(e.stream_id, e.unprocessed) for e in pair.at_client if isinstance(e, CallEnded)]
    assert ended == [(stream_id, True) for stream_id in ids[2:]]
    assert not pair.server.closed
    assert not pair.client.has_room


def test_calls_whose_handlers_run_on_still_count_after_a_reset() -> None:
    pair = Pair(evolve(LIMITS, max_concurrent_streams=1))

    def opened() -> list[int]:
        return [e.stream_id for e in pair.at_server if isinstance(e, CallOpened)]

    ids = []
    for _ in range(3):  # twice as many may run as may be open
        ids.append(pair.client.open_call(PATH, None))
        pair.run()
        pair.client.cancel(ids[-1])
        pair.run()
    assert opened() == ids[:2]
    pair.server.release(ids[0])
    ids.append(pair.client.open_call(PATH, None))
    pair.run()
    assert opened() == [*ids[:2], ids[3]]


def test_refusals_are_free_only_as_long_as_the_peer_cannot_know() -> None:
    pair = Pair(evolve(LIMITS, max_concurrent_streams=2, abuse_burst=10), handshake=False)
    for _ in range(2 + 4 + 10):
        pair.client.open_call(PATH, None)
    pair.server.receive_data(pair.client.data_to_send(), 0.0)
    assert not pair.server.closed
    pair.client.open_call(PATH, None)
    pair.server.receive_data(pair.client.data_to_send(), 0.0)
    assert pair.server.closed


def test_S083_opening_and_resetting_in_a_loop_costs_the_connection() -> None:
    pair = Pair()
    for _ in range(300):
        pair.client.cancel(pair.client.open_call(PATH, None))
    data = pair.client.data_to_send()
    events = pair.server.receive_data(data, 0.0)
    assert events[-1] == ConnectionFailed("too many frames without work")
    opened = sum(isinstance(e, CallOpened) for e in events)
    assert opened <= LIMITS.abuse_burst + 1
    pair.client.receive_data(pair.server.data_to_send(), 0.0)
    assert pair.client.going_away


def test_resets_at_a_human_pace_cost_nothing() -> None:
    pair = Pair()
    for _ in range(1_000):
        pair.now += 0.02
        stream_id = pair.client.open_call(PATH, None)
        pair.run()
        pair.client.cancel(stream_id)
        pair.run()
        pair.server.release(stream_id)
    assert not pair.server.closed


FLOODS = {
    "pings": PingFrame(0, opaque_data=b"12345678").serialize(),
    "settings": SettingsFrame(0).serialize(),
    "priority": PriorityFrame(3, depends_on=1, stream_weight=1).serialize(),
    "unknown frames": b"\0\0\0\xbb\0\0\0\0\0",
    "window updates": WindowUpdateFrame(0, window_increment=1).serialize(),
    "answers to pings": PingFrame(0, opaque_data=b"12345678", flags=["ACK"]).serialize(),
    "answers to settings": SettingsFrame(0, flags=["ACK"]).serialize(),
    "goodbyes": GoAwayFrame(0).serialize(),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_without_work_costs_the_connection(name: str) -> None:
    pair = Pair()
    events = pair.server.receive_data(FLOODS[name] * 300, 0.0)
    assert events == [ConnectionFailed("too many frames without work")]


def test_settings_nobody_knows_are_not_kept() -> None:
    pair = Pair()
    for first in range(16, 16 + 5_000, 32):
        pair.now += 0.01
        pair.at_server += pair.server.receive_data(_settings(range(first, first + 32)), pair.now)
    assert pair.at_server == []
    assert len(pair.server._h2.remote_settings) <= len(SettingCodes)
    assert pair.server.receive_data(_settings([5]), pair.now) == []
    assert pair.server._h2.max_outbound_frame_size == 20_000, "those that are known count"


@pytest.mark.parametrize("codes", [range(16, 16 + 33), [4] * 33], ids=["different", "the same"])
def test_very_many_settings_in_one_frame_cost_the_connection(codes: Sequence[int]) -> None:
    pair = Pair()
    assert pair.server.receive_data(_settings(codes), 0.0) == [ConnectionFailed("DenialOfServiceError")]
    pair.client.receive_data(pair.server.data_to_send(), 0.0)
    assert pair.client.going_away


def _settings(codes: Iterable[int]) -> bytes:
    return frame(4, 0, 0, b"".join(struct.pack(">HL", code, 20_000) for code in codes))


def test_a_flood_of_empty_data_costs_the_connection() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    events = pair.server.receive_data(DataFrame(stream_id, b"").serialize() * 300, 0.0)
    assert events == [ConnectionFailed("too many frames without work")]


@pytest.mark.parametrize("data", [b"x", b"x" * 200], ids=["one byte", "200 bytes"])
@pytest.mark.parametrize("spoilt", [False, True])
def test_a_flood_of_short_data_costs_the_connection(data: bytes, spoilt: bool) -> None:
    pair = Pair()
    stream_id = _begin(pair, 2**31 if spoilt else 20 * MIB, 0)
    pair.at_server.clear()
    flood = DataFrame(stream_id, data).serialize() * 150
    pair.run_raw(flood)
    pair.run_raw(flood)
    assert pair.at_server == [ConnectionFailed("too many frames without work")]


def test_short_data_among_useful_data_is_free() -> None:
    """Small messages in a frame of their own, others after their prefix or in three parts, large ones cut unevenly."""
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    small = b"\0\0\0\0\x0ahellohello"
    large = b"\0\0\0\4\0" + b"x" * 1_024
    cuts = [
        [small],
        [small[:5], small[5:]],
        [small[:2], small[2:5], small[5:]],
        [large[:700], large[700:705], large[705:]],
    ]
    for parts in cuts:
        for _ in range(1_000):
            data = b"".join(DataFrame(stream_id, part).serialize() for part in parts)
            for event in pair.server.receive_data(data, 0.0):
                assert isinstance(event, MessageReceived)
                pair.server.consumed(stream_id, event.payload)
            pair.server.data_to_send()
    assert not pair.server.closed


def test_short_data_where_the_window_ends_is_free() -> None:
    pair = Pair(evolve(LIMITS, connection_receive_bytes=11_000, max_receive_message_bytes=1_000))
    assert pair.server._window < 100
    stream_id = pair.client.open_call(PATH, None)
    for _ in range(500):
        pair.client.send(stream_id, b"q" * 990)
        pair.run()
        pair.server.consumed(stream_id, pair.messages(stream_id)[-1])
    assert len(pair.messages(stream_id)) == 500
    assert not pair.server.closed


@pytest.mark.parametrize(
    "late",
    [
        DataFrame(1, b"").serialize(),
        DataFrame(1, b"x").serialize(),
        RstStreamFrame(1).serialize(),
        WindowUpdateFrame(1, window_increment=1).serialize(),
    ],
    ids=["empty data", "data", "resets", "window updates"],
)
def test_a_flood_for_a_stream_that_is_gone_costs_the_connection(late: bytes) -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.client.cancel(stream_id)
    pair.run()
    assert stream_id == 1
    pair.at_server.clear()
    assert pair.server.receive_data(late * 300, 0.0) == [ConnectionFailed("too many frames without work")]


def test_what_is_under_way_on_streams_we_ended_is_free() -> None:
    """A caller on a slow line, whose uploads run into their deadlines one after another."""
    pair = Pair()
    for _ in range(20):
        stream_id = pair.client.open_call(PATH, 1.0)
        pair.client.send(stream_id, b"q" * (2 * MIB))
        pair.at_server += pair.server.receive_data(pair.client.data_to_send(), 0.0)
        pair.at_client += pair.client.receive_data(pair.server.data_to_send(), 0.0)
        under_way = b""
        while data := pair.client.data_to_send():
            under_way += data
        assert len(under_way) > 500_000
        pair.server.finish(stream_id, Status(Code.DEADLINE_EXCEEDED), b"id")
        pair.server.release(stream_id)
        pair.at_server += pair.server.receive_data(under_way, 0.0)
        pair.run()
        assert pair.at_client.pop() == CallEnded(stream_id, Status(Code.DEADLINE_EXCEEDED))
        assert not pair.server.closed


def test_pings_that_answer_our_frames_are_free() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    pair.server.start(stream_id, b"id")
    for _ in range(1_000):
        pair.server.send(stream_id, b"a")
        pair.run()
        assert pair.server.receive_data(FLOODS["pings"] + FLOODS["window updates"], 0.0) == []
        pair.server.data_to_send()


def test_S080_endless_continuation_costs_the_connection_in_bounded_memory() -> None:
    pair = Pair()
    flood = (
        HeadersFrame(1, b"\x00\x01a\x01b").serialize() + ContinuationFrame(1, b"\x00\x01a\x01b" * 100).serialize() * 100
    )
    assert isinstance(pair.server.receive_data(flood, 0.0)[-1], ConnectionFailed)


def test_S080_a_header_list_over_the_limit_costs_the_connection() -> None:
    pair = Pair()
    pair.client.open_call(PATH, None, [(b"x-%d" % n, b"v" * 1_000) for n in range(17)])
    data = pair.client.data_to_send()
    assert isinstance(pair.server.receive_data(data, 0.0)[-1], ConnectionFailed)


def test_a_frame_that_announces_16_MiB_is_not_waited_for() -> None:
    pair = Pair()
    announced = b"\xff\xff\xff\0\0\0\0\0\1"
    assert pair.server.receive_data(announced + b"x" * 30_000, 0.0) == []
    assert isinstance(pair.server.receive_data(b"x" * 10_000, 0.0)[-1], ConnectionFailed)


def test_after_a_failure_nothing_is_taken_and_nothing_is_sent() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    pair.run()
    pair.server.receive_data(DataFrame(99, b"").serialize(), 0.0)
    assert pair.server.closed
    assert pair.server.data_to_send(), "the last GOAWAY"
    for act in (
        lambda: pair.server.start(stream_id, b"id"),
        lambda: pair.server.send(stream_id, b"x"),
        lambda: pair.server.finish(stream_id, Status(Code.OK), b"id"),
        lambda: pair.server.reset(stream_id),
        lambda: pair.server.goaway(),
    ):
        act()
        assert pair.server.data_to_send() == b""
    assert pair.server.receive_data(b"more", 1.0) == []


def test_not_http2_at_all_is_a_failure() -> None:
    server = ServerMachine(LIMITS, ByteBudget(MIB))
    server.data_to_send()
    assert isinstance(server.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", 0.0)[-1], ConnectionFailed)


def test_the_changed_parts_of_h2_are_where_they_are_expected() -> None:
    """The machine leans on names of h2 that are not public."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    assert connection._frame_dispatch_table[GoAwayFrame] == connection._receive_goaway_frame
    assert callable(connection._prepare_for_sending)
    assert len(connection._data_to_send) == 0
    assert connection.MAX_CLOSED_STREAMS > 4_096
    assert connection.incoming_buffer._headers_buffer == []
    assert callable(connection._receive_frame)


# --- an adversary

_frames = client_frames(b"/a.B/C")
_acts = st.sampled_from(
    ["start", "send", "send large", "finish", "refuse", "release", "consume", "reset", "goaway", "write"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(_frames, _frames, _acts), max_size=40), st.booleans())
def test_no_sequence_of_frames_and_answers_breaks_the_server_machine(
    script: list[bytes | str], handshake: bool
) -> None:
    """Never an exception, never more held than allowed, and nothing left when the connection is dropped."""
    budget, unsent = ByteBudget(20_000), ByteBudget(300_000)
    limits = evolve(
        LIMITS, max_concurrent_streams=2, connection_receive_bytes=200_000, max_receive_message_bytes=150_000
    )
    server = ServerMachine(limits, budget, unsent)
    client = h2.connection.H2Connection()
    client.initiate_connection()
    server.receive_data(client.data_to_send(), 0.0)
    if handshake:
        server.receive_data(frame(4, 1, 0, b""), 0.0)
    held: list[MessageReceived] = []
    ids: list[int] = [1]
    for number, step in enumerate(script):
        if isinstance(step, bytes):
            events = server.receive_data(step, number * 0.001)
            held += [e for e in events if isinstance(e, MessageReceived)]
            ids += [e.stream_id for e in events if isinstance(e, CallOpened)]
        else:
            _act(server, step, ids[-1], held)
        assert 0 <= budget.held <= budget.limit
        assert 0 <= unsent.held <= unsent.limit
        assert 0 <= server._committed <= limits.connection_receive_bytes
    server.data_to_send()
    server.drop_all()
    assert (budget.held, unsent.held, server._committed) == (0, 0, 0)


def _act(server: ServerMachine, act: str, stream_id: int, held: list[MessageReceived]) -> None:
    match act:
        case "start":
            if stream_id not in server._started:
                server.start(stream_id, b"id")
        case "send" | "send large":
            if stream_id in server._started and not server._streams[stream_id].finished:
                server.send(stream_id, b"x" * (9 if act == "send" else 200_000))
        case "finish" | "refuse":
            stream = server._streams.get(stream_id)
            if stream is not None and not stream.finished:
                server.finish(stream_id, Status(Code.OK if act == "finish" else Code.INTERNAL, "text"), b"id")
        case "release":
            server.release(stream_id)
        case "consume":
            if held:
                event = held.pop()
                server.consumed(event.stream_id, event.payload)
        case "reset":
            server.reset(stream_id, ErrorCodes.CANCEL)
        case "goaway":
            server.goaway()
        case "write":
            server.data_to_send()


@settings(max_examples=300, deadline=None)
@given(st.lists(server_frames(), max_size=40))
def test_no_sequence_of_frames_breaks_the_client_machine(script: list[bytes]) -> None:
    """Never an exception, and every call ends exactly once, at the latest with the connection."""
    budget = ByteBudget(20_000)
    client = ClientMachine(LIMITS, budget, authority="h:1", scheme="http", user_agent="t")
    ids = [client.open_call(PATH, None) for _ in range(4)]
    client.send(ids[0], b"q" * 100_000)
    client.half_close(ids[1])
    events = client.receive_data(frame(4, 0, 0, b""), 0.0)
    for number, step in enumerate(script):
        events += client.receive_data(step, number * 0.001)
        client.data_to_send()
        assert 0 <= budget.held <= budget.limit
    if client.usable and client.has_room:
        ids.append(client.open_call(PATH, None))
    events += client.lost()
    ended = [event.stream_id for event in events if isinstance(event, CallEnded)]
    assert sorted(ended) == ids
    assert (budget.held, client._committed, client._unsent_here) == (0, 0, 0)


def test_S079_a_pushed_stream_ends_the_connection() -> None:
    pair = Pair()
    stream_id = pair.client.open_call(PATH, None)
    promise = frame(5, 4, stream_id, b"\0\0\0\2" + PlainEncoder().encode([(b":method", b"GET")]))
    assert isinstance(pair.client.receive_data(promise, 0.0)[-1], ConnectionFailed)
