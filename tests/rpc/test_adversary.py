"""Random frames over a real socket, next to a client that behaves."""

from __future__ import annotations

from contextlib import suppress

import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pushd.errors import Code
from tests.rpc.frames import PREFACE, client_frames, frame
from tests.rpc.harness import BIDI, CLIENT, HANG, UNARY, connect, framed, over_both, raw_client, serving

_paths = st.sampled_from([UNARY, CLIENT, BIDI, HANG])
_scripts = _paths.flatmap(lambda path: st.lists(client_frames(path.encode()), min_size=1, max_size=30))


@over_both
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_scripts, min_size=1, max_size=8))
async def test_random_frames_cost_nobody_else_anything_and_leave_nothing_behind(scripts: list[list[bytes]]) -> None:
    with trio.fail_after(60), capture_logs() as logs:
        async with serving() as server, raw_client(server.port) as client:
            assert (await client.call(framed(b"x"))).code == Code.OK
            tasks = await _living_tasks()
            for script in scripts:
                await _attack(server.port, script)
                assert (await client.call(framed(b"x"))).code == Code.OK
            await server.wait_connections(1)
            assert server.echo.hanging == 0
            assert await _living_tasks() == tasks
            started = server.value(
                "grpc_server_in_flight", grpc_service="xmtp.backend.v1.Echo", grpc_method="Hang", grpc_type="unary"
            )
            assert started == 0
    assert [log for log in logs if log["event"] == "rpc_failed"] == []


async def _living_tasks() -> int:
    await trio.testing.wait_all_tasks_blocked(0.01)
    return trio.lowlevel.current_statistics().tasks_living


async def _attack(port: int, script: list[bytes]) -> None:
    """Sends everything, then listens until the server has either hung up or answered what it wants to answer."""
    async with await connect(port) as stream:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(PREFACE + frame(4, 0, 0, b""))
            for piece in script:
                await stream.send_all(piece)
            await stream.send_all(frame(6, 0, 0, b"the end!"))
            heard = b""
            # A frame announced and never finished swallows the PING; then there is nothing to wait for.
            with trio.move_on_after(0.05):
                while piece := await stream.receive_some():
                    heard += piece
                    if b"the end!" in heard:
                        break
