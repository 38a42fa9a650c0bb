"""The limits of the gRPC edge, with their defaults.

Every number here is an answer to somebody: a peer that opens connections and says nothing, one that opens and resets
streams in a loop, one that promises a large message and never sends it. What is not bounded by one of these numbers is
bounded by another one's product: a connection holds at most `connection_receive_bytes` of requests, all of them
together at most `receive_bytes`, and of answers at most `send_bytes`.
"""

from __future__ import annotations

from attrs import frozen

_MIB = 2**20


@frozen(kw_only=True)
class RpcSettings:
    """Limits of one server.

    Attributes:
        max_concurrent_streams: calls a connection may run at once; more are refused stream by stream.
        max_request_bytes: one request message; more is OUT_OF_RANGE.
        max_response_bytes: one response message; more is OUT_OF_RANGE.
        max_header_list_bytes: decoded request headers; more costs the connection.
        max_connections: open connections; when all are taken, the longest silent one without a call makes room, or else
            with calls alone that need no credential.
        connection_receive_bytes: the most one connection's peer can make the server hold.
        receive_bytes: request bytes held over all connections; beyond it calls end UNAVAILABLE, those whose message has
            been getting on worst first.
        send_bytes: response bytes that wait for their peers over all connections, half of it on one at most; beyond it
            calls end UNAVAILABLE, in the same order.
        handshake_s: TLS handshake, HTTP/2 preface and first SETTINGS together.
        idle_s: a connection silent for this long is sent a PING.
        ping_s: how long the PING may stay unanswered before the connection is closed.
        stall_s: a request message, or a write to the peer, that makes no progress for this long is given up. What holds
            more than 64 KiB has to move 32 KiB in this time.
        abuse_burst: resets, refused streams, pings and other frames without work that a peer may send at once ...
        abuse_per_s: ... and how many of them a second it gets back.
        log_calls: write one log line a finished call, health checks excepted.
    """

    max_concurrent_streams: int = 100
    max_request_bytes: int = 25 * _MIB
    max_response_bytes: int = 25 * _MIB
    max_header_list_bytes: int = 16 * 1024
    max_connections: int = 1_024
    connection_receive_bytes: int = 64 * _MIB
    receive_bytes: int = 256 * _MIB
    send_bytes: int = 256 * _MIB
    handshake_s: float = 10.0
    idle_s: float = 300.0
    ping_s: float = 20.0
    stall_s: float = 30.0
    # A client that gives up 100 calls a second on one connection is not one that waits for answers.
    abuse_burst: int = 200
    abuse_per_s: float = 100.0
    log_calls: bool = True
