"""Every target by its name, the cheap ones first."""

from __future__ import annotations

from tests.fuzz.edge import Calls, Sockets
from tests.fuzz.engine import Target
from tests.fuzz.peers import Http2Peers, Webhooks
from tests.fuzz.pure import Answers, ConfigFiles, Mls, Urls

_ALL: list[type[Target]] = [Mls, Urls, Answers, ConfigFiles, Http2Peers, Webhooks, Sockets, Calls]
TARGETS = {target.name: target for target in _ALL}
IN_PROCESS = [name for name in TARGETS if name not in (Sockets.name, Calls.name)]
