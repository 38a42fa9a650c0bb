"""What a connection keeps of the calls it has carried: one may live for weeks and carry millions."""

from __future__ import annotations

import h2.config
import h2.connection
import pytest
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame, Frame, HeadersFrame

from pushd import bounded_h2
from pushd.rpc.machine.encoder import PlainEncoder
from pushd.rpc.machine.http2 import Http2

REQUEST = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/a.B/C")]
SETTINGS = {SettingCodes.MAX_CONCURRENT_STREAMS: 100, SettingCodes.MAX_HEADER_LIST_SIZE: 16_384}


class Pair:
    """Our server's end and h2's client, connected."""

    def __init__(self) -> None:
        self.server = Http2(client_side=False, settings=SETTINGS, max_streams_before_error=200)
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.client.initiate_connection()
        self.exchange()

    def exchange(self) -> None:
        while data := self.client.data_to_send():
            self.server.receive_data(data)
            assert not any(isinstance(event, ConnectionTerminated) for event in self._received())

    def _received(self) -> list[object]:
        return list(self.client.receive_data(self.server.data_to_send()))

    def call(self) -> int:
        stream_id: int = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, REQUEST, end_stream=True)
        self.exchange()
        return stream_id

    def answer(self, stream_id: int) -> None:
        block = PlainEncoder().encode([(b":status", b"200"), (b"grpc-status", b"0")])
        self.server.send_block(stream_id, block, end_stream=True)
        self._received()
        assert stream_id not in self.client.streams or self.client.streams[stream_id].closed


def test_calls_that_were_answered_leave_nothing_behind() -> None:
    pair = Pair()
    for _ in range(500):
        pair.answer(pair.call())
    assert not pair.server._closed_streams
    assert len(pair.server.streams) <= 1


@pytest.mark.parametrize("late", [DataFrame(1, b"x"), HeadersFrame(1, b"\x82", flags=["END_HEADERS"])])
def test_a_late_frame_of_a_call_reset_long_ago_costs_only_itself(late: Frame) -> None:
    pair = Pair()
    late.stream_id = pair.call()
    pair.server.reset_stream(late.stream_id, ErrorCodes.CANCEL)
    pair._received()
    for _ in range(bounded_h2.MAX_RESET_STREAMS + 10):
        pair.answer(pair.call())
    pair.server.receive_data(late.serialize())
    pair.answer(pair.call())


def test_resets_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_h2, "MAX_RESET_STREAMS", 50)
    pair = Pair()
    for _ in range(120):
        pair.server.reset_stream(pair.call(), ErrorCodes.CANCEL)
        pair._received()
    assert len(pair.server._closed_streams) == 50
