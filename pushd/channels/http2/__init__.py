"""HTTP/2 to providers: one client on h2 and Trio, shared by APNs and FCM."""

from pushd.channels.http2.client import (
    Http2Client,
    Origin,
    open_http2_client,
    open_transport,
    provider_origin,
    provider_tls,
)
from pushd.channels.http2.engine import literal
from pushd.channels.http2.exchange import MAX_BODY_BYTES, ConnectionFailed, NotProcessed, Response

__all__ = [
    "MAX_BODY_BYTES",
    "ConnectionFailed",
    "Http2Client",
    "NotProcessed",
    "Origin",
    "Response",
    "literal",
    "open_http2_client",
    "open_transport",
    "provider_origin",
    "provider_tls",
]
