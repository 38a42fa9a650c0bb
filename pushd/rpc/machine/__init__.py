"""A gRPC connection without a socket, a clock or an event loop."""

from __future__ import annotations

from pushd.rpc.machine.budget import INSTALMENT, ByteBudget
from pushd.rpc.machine.client import ClientMachine
from pushd.rpc.machine.endpoint import Limits
from pushd.rpc.machine.events import (
    AnswerDropped,
    CallCancelled,
    CallEnded,
    CallOpened,
    ConnectionFailed,
    GoAwayReceived,
    HalfClosed,
    MachineEvent,
    MessageReceived,
    MessagesSpoilt,
)
from pushd.rpc.machine.framing import Fault
from pushd.rpc.machine.headers import RawHeaders, Request, Status
from pushd.rpc.machine.server import ServerMachine

__all__ = [
    "INSTALMENT",
    "AnswerDropped",
    "ByteBudget",
    "CallCancelled",
    "CallEnded",
    "CallOpened",
    "ClientMachine",
    "ConnectionFailed",
    "Fault",
    "GoAwayReceived",
    "HalfClosed",
    "Limits",
    "MachineEvent",
    "MessageReceived",
    "MessagesSpoilt",
    "RawHeaders",
    "Request",
    "ServerMachine",
    "Status",
]
