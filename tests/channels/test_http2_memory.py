"""What a connection to a provider keeps of the requests it has carried: it lives for days and carries millions."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import pytest

from pushd.bounded_h2 import MAX_RESET_STREAMS
from pushd.channels.http2.engine import ErrorCodes, Wire, literal
from tests.channels.http2_peer import DATA, HEADERS, frame

BLOCK = literal(b":method", b"POST") + literal(b":scheme", b"https") + literal(b":authority", b"api.push.apple.com")
BLOCK += literal(b":path", b"/3/device/ab")


class Pair:
    """Our end and h2's, connected."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.wire.initiate_connection()
        self.peer.initiate_connection()
        self.exchange()

    def exchange(self) -> list[h2.events.Event]:
        """Carry bytes both ways until there are none; what the peer saw."""
        seen = []
        while data := self.wire.data_to_send():
            seen += self.peer.receive_data(data)
            self.wire.receive_data(self.peer.data_to_send())
        return seen

    def request(self) -> int:
        stream_id = self.wire.get_next_available_stream_id()
        self.wire.send_request(stream_id, BLOCK)
        self.wire.send_data(stream_id, b"{}", end_stream=True)
        return stream_id

    def succeed(self, count: int) -> None:
        for _ in range(count):
            stream_id = self.request()
            self.exchange()
            self.peer.send_headers(stream_id, [(":status", "200")], end_stream=True)
            self.wire.receive_data(self.peer.data_to_send())


def test_requests_that_were_answered_leave_nothing_behind() -> None:
    pair = Pair()
    pair.succeed(2_000)
    assert len(pair.wire.streams) + len(pair.wire._closed_streams) <= 256  # counted every 128 requests


@pytest.mark.parametrize("kind", [HEADERS, DATA], ids=["headers", "data"])
def test_a_late_frame_of_a_stream_reset_long_ago_costs_only_itself(kind: int) -> None:
    pair = Pair()
    late = pair.request()
    pair.exchange()
    pair.wire.reset_stream(late, ErrorCodes.CANCEL)
    pair.exchange()
    pair.succeed(MAX_RESET_STREAMS + 256)
    payload = b"\x88" if kind == HEADERS else b"x"  # ":status: 200", RFC 7541 appendix A
    pair.wire.receive_data(frame(kind, 4 if kind == HEADERS else 0, late, payload))
    pair.succeed(1)


def test_resets_are_remembered_up_to_a_bound() -> None:
    pair = Pair()
    for _ in range(MAX_RESET_STREAMS + 512):
        pair.wire.reset_stream(pair.request(), ErrorCodes.CANCEL)
        pair.exchange()
    assert len(pair.wire._closed_streams) == MAX_RESET_STREAMS
