"""What stands in headers, as tables; and the server's encoder against hpack's decoder."""

from __future__ import annotations

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from pushd.errors import Code
from pushd.rpc.machine.encoder import PlainEncoder
from pushd.rpc.machine.framing import Fault, FramingError, MessageDecoder, encode_message
from pushd.rpc.machine.headers import (
    MalformedRequest,
    Status,
    encode_grpc_message,
    format_timeout,
    parse_request,
    parse_status,
    parse_timeout,
    status_headers,
    status_of_http,
)

GOOD = [
    (b":method", b"POST"),
    (b":scheme", b"https"),
    (b":path", b"/a.B/C"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"99999999S", 99_999_999),
        (b"250m", 0.25),
        (b"5u", 5e-6),
        (b"7n", 7e-9),
        (b"0m", 0),
    ],
)
def test_a_timeout_is_read_with_its_unit(text: bytes, seconds: float) -> None:
    assert parse_timeout(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", [b"", b"5", b"m", b"-1m", b"1.5S", b"123456789m", b"5s", b" 5S", b"5S ", b"\xb2S"])
def test_a_malformed_timeout_is_none(text: bytes) -> None:
    assert parse_timeout(text) is None


@given(st.floats(min_value=0, max_value=1e9))
def test_a_written_timeout_never_shortens_the_deadline_by_more_than_its_unit(seconds: float) -> None:
    read = parse_timeout(format_timeout(seconds))
    assert read is not None
    assert seconds <= read <= seconds * 1.001 + 2e-6


@pytest.mark.parametrize(
    "content_type", [b"application/grpc", b"application/grpc+proto", b"application/grpc; charset=utf-8"]
)
def test_a_request_is_read(content_type: bytes) -> None:
    request = parse_request([*GOOD[:4], (b"content-type", content_type), (b"x", b"1"), (b"x", b"2")])
    assert request.path == "/a.B/C"
    assert request.refusal is None
    assert request.timeout_s is None
    assert request.headers["x"] == "1,2"


def test_a_request_keeps_its_headers_out_of_its_repr() -> None:
    assert "letmein" not in repr(parse_request([*GOOD, (b"authorization", b"letmein")]))


@pytest.mark.parametrize(
    "headers",
    [
        GOOD[1:],
        [GOOD[0], *GOOD[2:]],
        [*GOOD[:2], *GOOD[3:]],
        [GOOD[0], *GOOD],
        [*GOOD, (b":authority", b"late")],
        [(b":status", b"200"), *GOOD],
        [*GOOD, (b"transfer-encoding", b"chunked")],
        [*GOOD, (b"X", b"1")],
        [*GOOD, (b"", b"1")],
    ],
)
def test_a_header_list_that_is_not_http2_is_malformed(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(MalformedRequest):
        parse_request(headers)


@given(st.text(), st.sampled_from(list(Code)), st.none() | st.binary())
def test_a_status_survives_the_wire(text: str, code: Code, details: bytes | None) -> None:
    if not text.isprintable():
        text = repr(text)
    status = Status(code, text, details)
    assert parse_status(status_headers(status)) == status


def test_a_status_message_is_percent_encoded() -> None:
    assert encode_grpc_message("50 % für\nalle") == b"50 %25 f%C3%BCr%0Aalle"


@pytest.mark.parametrize(("raw", "code"), [(b"99", Code.UNKNOWN), (b"x", Code.UNKNOWN), (b"", Code.UNKNOWN)])
def test_a_foreign_status_code_is_unknown(raw: bytes, code: Code) -> None:
    status = parse_status([(b"grpc-status", raw)])
    assert status is not None
    assert status.code == code


def test_an_answer_without_grpc_gets_the_status_of_its_http_status() -> None:
    assert status_of_http(503).code == Code.UNAVAILABLE
    assert status_of_http(418).code == Code.UNKNOWN


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.binary(max_size=400)), min_size=1, max_size=5))
def test_hpack_reads_what_the_plain_encoder_writes(headers: list[tuple[bytes, bytes]]) -> None:
    encoder, decoder = PlainEncoder(), Decoder()
    for block in (headers, [(b":status", b"200"), (b"content-type", b"application/grpc")], [(b"grpc-status", b"0")]):
        assert [(bytes(n), bytes(v)) for n, v in decoder.decode(encoder.encode(block), raw=True)] == block


def test_the_plain_encoder_suits_a_peer_that_wants_no_table() -> None:
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    decoder.header_table_size = 0
    assert decoder.decode(PlainEncoder().encode([(b"a", b"b")]), raw=True) == [(b"a", b"b")]


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_messages_come_out_as_they_went_in_however_they_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(encode_message, payloads))
    decoder, out = MessageDecoder(300), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        out += decoder.feed(stream[:size])
        stream = stream[size:]
    assert out == payloads
    assert not decoder.partial
    assert decoder.missing == 0


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\x01\0\0\0\0", Fault.COMPRESSED),
        (b"\x02\0\0\0\0", Fault.BAD_FLAG),
        (b"\x80\0\0\0\0", Fault.BAD_FLAG),
        (b"\0\0\0\0\x0b", Fault.TOO_LARGE),
        (encode_message(b"fine") + b"\x01\0\0\0\0", Fault.COMPRESSED),
    ],
)
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_a_prefix_that_is_not_acceptable_is_a_fault(data: bytes, fault: Fault, piece: int) -> None:
    decoder = MessageDecoder(10)
    with pytest.raises(FramingError) as caught:
        for start in range(0, len(data), piece):
            decoder.feed(data[start : start + piece])
    assert caught.value.fault is fault


def test_the_missing_length_is_known_from_the_prefix_on() -> None:
    decoder = MessageDecoder(1_000)
    decoder.feed(b"\0\0\0")
    assert (decoder.partial, decoder.missing) == (True, 0)
    decoder.feed(b"\0\x64abc")
    assert decoder.missing == 97
