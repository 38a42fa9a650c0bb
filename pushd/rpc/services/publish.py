"""`xmtp.backend.v1.PublishService`."""

from __future__ import annotations

import time

from pushd.backend.publish import Publisher
from pushd.core.admission import PublishRefusal
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.publish_grpc import PublishServiceServicer
from pushd.rpc.translate_publish import error_from, offer_from, write_meta
from pushd.turns import in_turns


class PublishService(PublishServiceServicer):
    """Every instance serves it; the order of envelopes is the database's."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__()
        self._publisher = publisher

    async def Publish(self, input_message: wire.PublishRequest) -> wire.PublishResponse:
        """Store all envelopes of the request or none (PUSH-030, PUSH-031, PUSH-032)."""
        now_s = int(time.time())
        answer = await self._publisher.publish(offer_from(envelope, now_s) for envelope in input_message.envelopes)
        if isinstance(answer, PublishRefusal):
            raise error_from(answer)
        response = wire.PublishResponse()
        await in_turns(write_meta(response.envelope_metas.add(), meta) for meta in answer)
        return response
