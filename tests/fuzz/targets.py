"""Every target by its name, the cheap ones first."""

from __future__ import annotations

from tests.fuzz.access import KeySets, Tokens
from tests.fuzz.edge import Calls, Sockets, TlsSockets
from tests.fuzz.engine import Target
from tests.fuzz.peers import Http2Peers, Operators, Webhooks
from tests.fuzz.pure import Answers, ConfigFiles, Mls, Urls

_ALL: list[type[Target]] = [
    Mls,
    Urls,
    Answers,
    Tokens,
    KeySets,
    ConfigFiles,
    Http2Peers,
    Webhooks,
    Operators,
    Sockets,
    TlsSockets,
    Calls,
]
TARGETS = {target.name: target for target in _ALL}
