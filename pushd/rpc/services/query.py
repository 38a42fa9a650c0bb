"""`xmtp.backend.v1.QueryService`."""

from __future__ import annotations

from pushd.backend.query import QueryLimits, query_envelopes, query_newest
from pushd.rpc.gen.xmtp.backend.v1 import query_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.query_grpc import QueryServiceServicer
from pushd.rpc.translate_publish import write_envelope, write_meta
from pushd.store.database import Database


class QueryService(QueryServiceServicer):
    """Reads of stored envelopes."""

    def __init__(self, database: Database, limits: QueryLimits) -> None:
        super().__init__()
        self._database = database
        self._limits = limits

    async def Query(self, input_message: wire.QueryRequest) -> wire.QueryResponse:
        """A page of the topics' envelopes in sequence order."""
        # One more than allowed shows that they are too many; a large message may hold millions.
        queries = input_message.queries[: self._limits.max_query_topics + 1]
        wanted = [(one.topic.topic, one.cursor.sequence_id) for one in queries]
        page = await query_envelopes(self._database, self._limits, wanted, input_message.limit)
        response = wire.QueryResponse()
        for stored in page.envelopes:
            write_envelope(response.envelopes.add(), stored)
        response.continuation.has_more = page.has_more
        return response

    async def QueryNewest(self, input_message: wire.QueryNewestRequest) -> wire.QueryNewestResponse:
        """The newest envelope of each topic, or only its metadata."""
        full = input_message.include_full_envelope
        topics = [one.topic for one in input_message.topics[: self._limits.max_newest_topics(full=full) + 1]]
        newest = await query_newest(self._database, self._limits, topics, with_payload=full)
        response = wire.QueryNewestResponse()
        for meta, payload in newest:
            result = response.results.add()
            result.topic.topic = meta.topic
            write_meta(result.meta, meta)
            if payload is not None:
                result.envelope.MergeFromString(payload)
        return response
