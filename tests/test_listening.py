"""Listeners wait out a shortage of file descriptors and say so, in the log's own form and not ten times a second."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator

import pytest
import trio
from structlog.testing import capture_logs

from pushd.listening import REPORT_S, PatientListener


class Listener(trio.abc.Listener[trio.SocketStream]):
    """Answers with an error as often as it is told to, then with a connection."""

    def __init__(self, errors: Iterator[int], stream: trio.SocketStream) -> None:
        self.errors = errors
        self.stream = stream
        self.closed = False

    async def accept(self) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        for code in self.errors:
            raise OSError(code, os.strerror(code))
        return self.stream

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


@pytest.fixture
def stream() -> Iterator[trio.SocketStream]:
    one, other = trio.socket.socketpair()
    with one, other:
        yield trio.SocketStream(one)


async def test_a_shortage_is_told_once_a_minute(
    stream: trio.SocketStream, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    began = trio.current_time()

    def short() -> Iterator[int]:
        while trio.current_time() - began < 2.5 * REPORT_S:
            yield errno.EMFILE

    inner = Listener(short(), stream)
    listener = PatientListener(inner)
    with capture_logs() as said, caplog.at_level(logging.DEBUG):
        assert await listener.accept() is stream
        await listener.aclose()
    assert said == 3 * [{"event": "accept_failed", "log_level": "error", "error": "EMFILE"}]
    assert not caplog.records
    assert inner.closed


async def test_another_error_is_raised(stream: trio.SocketStream) -> None:
    listener = PatientListener(Listener(iter([errno.EINVAL]), stream))
    with pytest.raises(OSError, match="Invalid argument"):
        await listener.accept()
