"""Random HTTP/2 frames, mostly well-formed, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from pushd.rpc.machine.encoder import PlainEncoder
from pushd.rpc.machine.framing import encode_message

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """One frame, whatever it says."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def client_frames(path: bytes) -> st.SearchStrategy[bytes]:
    """Frames of a client that calls `path` now and then, or bytes that are no frame at all."""
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"te", b"trailers")]
    headers.append((b"content-type", b"application/grpc"))
    encode = PlainEncoder().encode
    return _frames([encode(headers), encode(headers), encode(headers[1:])])


def server_frames() -> st.SearchStrategy[bytes]:
    """Frames of a server that answers now and then, or bytes that are no frame at all."""
    opening = [(b":status", b"200"), (b"content-type", b"application/grpc")]
    encode = PlainEncoder().encode
    blocks = [opening, [(b"grpc-status", b"0")], [*opening, (b"grpc-status", b"5")], [(b":status", b"503")]]
    blocks += [[(b":status", b"100")], [(b":status", b"abc"), (b"content-length", b"3")]]
    return _frames([encode(block) for block in blocks])


def _frames(blocks: list[bytes]) -> st.SearchStrategy[bytes]:
    block = st.sampled_from([*blocks, *blocks, b"\x82", b"\xff\xff", b""])
    stream_id = st.sampled_from([0, 1, 1, 1, 3, 3, 5, 7, 2, 2**31 - 1])
    body = st.one_of(
        st.binary(max_size=40),
        st.just(encode_message(b"\x0a\x05hello")),
        st.just(b"\0\0\1\0\0" + b"x" * 100),
        st.just(b"x" * 9_000),
    )
    u32 = st.sampled_from([0, 1, 2, 100, 16_384, 65_535, 2**31 - 1, 2**32 - 1]).map(lambda n: n.to_bytes(4, "big"))
    setting = st.builds(lambda k, v: k.to_bytes(2, "big") + v, st.integers(0, 9), u32)
    headers_flags = st.sampled_from([0, 1, 4, 4, 5, 5, 0x0C, 0x24, 0xFF])
    eight = st.binary(min_size=8, max_size=8)
    return st.one_of(
        st.builds(frame, st.sampled_from([1, 1, 1, 9]), headers_flags, stream_id, block),
        st.builds(frame, st.just(0), st.sampled_from([0, 0, 1, 8, 9, 0xFF]), stream_id, body),
        st.builds(frame, st.sampled_from([3, 8]), st.just(0), stream_id, u32),  # RST_STREAM, WINDOW_UPDATE
        st.builds(frame, st.just(4), st.sampled_from([0, 1]), st.sampled_from([0, 0, 0, 1]), st.just(b"") | setting),
        st.builds(frame, st.just(6), st.sampled_from([0, 1]), st.sampled_from([0, 0, 1]), eight),
        st.builds(frame, st.just(7), st.just(0), st.just(0), st.builds(lambda a, b: a + b, u32, u32)),  # GOAWAY
        st.builds(frame, st.just(2), st.just(0), stream_id, st.binary(min_size=5, max_size=5)),  # PRIORITY
        st.builds(frame, st.integers(0, 255), st.integers(0, 255), stream_id, st.binary(max_size=20)),
        st.binary(max_size=30),
    )
