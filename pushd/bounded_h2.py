"""h2's connection with a bound on what it keeps, for both sides of ours: the gRPC server and the clients of providers.

h2 remembers how each of thousands of streams ended, and every number of a setting it was ever sent, as long as the
connection lives. Connections live for weeks here, and a peer may send settings without end.
"""

from __future__ import annotations

from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import DenialOfServiceError
from h2.settings import SettingCodes
from h2.stream import StreamClosedBy
from h2.utilities import SizeLimitDict

# A hundred resets a second, which is what a caller may, or 256 attempts that time out every ten seconds need more than
# half a minute to fill it; what is on its way does not take that long.
MAX_RESET_STREAMS = 4_096
_MAX_SETTINGS = 32  # in one frame; HTTP/2 has seven, and peers that add some of their own send three or four more
_SETTING_BYTES = 6  # RFC 9113 §6.5.1
_KNOWN_SETTINGS = frozenset(int(code) for code in SettingCodes)
_RESET = (StreamClosedBy.SEND_RST_STREAM, StreamClosedBy.RECV_RST_STREAM)


class BoundedH2Connection(H2Connection):
    """Forgets streams that ended, and passes over settings it does not know (RFC 9113 §6.5.2).

    Streams that were reset are remembered, since frames of them that were on their way must not end the connection.
    """

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config)
        self._closed_streams = _ResetStreams(size_limit=MAX_RESET_STREAMS)

    def _receive_settings_frame(self, frame: Any) -> Any:
        if frame.body_len > _MAX_SETTINGS * _SETTING_BYTES:
            raise DenialOfServiceError("too many settings")
        frame.settings = {code: value for code, value in frame.settings.items() if code in _KNOWN_SETTINGS}
        return super()._receive_settings_frame(frame)


class _ResetStreams(SizeLimitDict):
    """How streams were closed, for those that were reset."""

    def __setitem__(self, key: int, value: Any) -> None:
        if value in _RESET:
            super().__setitem__(key, value)
