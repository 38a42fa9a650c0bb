"""A burst of TLS handshakes leaves turns of the scheduler to everything else."""

from __future__ import annotations

import ssl

import trio
import trustme

from pushd.channels.tls_client import TlsStream, handshake_turns

BURST = 64


class Turns(trio.abc.Instrument):
    """Counts turns: the scheduler looks for I/O before each."""

    number = 0

    def before_io_wait(self, timeout: float) -> None:
        self.number += 1


async def test_no_turn_has_more_handshake_steps_than_tokens() -> None:
    authority = trustme.CA()
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(server_tls)
    client_tls = ssl.create_default_context()
    authority.configure_trust(client_tls)
    turns, steps = Turns(), dict[int, int]()

    class Counted(ssl.SSLObject):
        def do_handshake(self) -> None:
            if not self.server_side:
                steps[turns.number] = steps.get(turns.number, 0) + 1
            super().do_handshake()

    client_tls.sslobject_class = Counted
    tokens = handshake_turns()

    async def answer(transport: trio.SocketStream) -> None:
        stream = trio.SSLStream(transport, server_tls, server_side=True)
        await stream.do_handshake()
        await stream.receive_some()

    async def connect(port: int) -> None:
        transport = await trio.open_tcp_stream("127.0.0.1", port)
        stream = TlsStream(transport, client_tls, "localhost", tokens)
        await stream.do_handshake()
        await stream.aclose()

    trio.lowlevel.add_instrument(turns)
    with trio.fail_after(60):
        async with trio.open_nursery() as serving:
            listeners = await serving.start(trio.serve_tcp, answer, 0)
            port = listeners[0].socket.getsockname()[1]
            async with trio.open_nursery() as burst:
                for _ in range(BURST):
                    burst.start_soon(connect, port)
            serving.cancel_scope.cancel()
    trio.lowlevel.remove_instrument(turns)
    assert sum(steps.values()) >= 2 * BURST
    assert max(steps.values()) <= tokens.total_tokens
    assert tokens.borrowed_tokens == 0
