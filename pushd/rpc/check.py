"""`pushd health`: asks a server's standard health service, for containers and scripts."""

from __future__ import annotations

import ssl

from pushd.errors import StatusError
from pushd.rpc.client import ChannelSettings, open_channel
from pushd.rpc.gen.grpc.health.v1 import health_pb2 as wire

_CHECK = "/grpc.health.v1.Health/Check"


async def check_health(
    host: str, port: int, service: str = "", *, deadline_s: float, tls: ssl.SSLContext | None = None
) -> bool:
    """Whether the server answers SERVING for `service` (empty: for itself) by the deadline.

    A server that cannot be reached, does not answer in time or does not know the service is one that does not serve.
    """
    settings = ChannelSettings(connect_s=deadline_s)
    async with open_channel(host, port, tls=tls, settings=settings) as channel:
        try:
            answer = await channel.unary(
                _CHECK, wire.HealthCheckRequest(service=service), wire.HealthCheckResponse, deadline_s=deadline_s
            )
        except StatusError:
            return False
        return answer.status == wire.HealthCheckResponse.SERVING
