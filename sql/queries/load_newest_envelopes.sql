-- The newest envelope of each topic that has one, in the order of the topics. No lock; one snapshot.
-- Index: one probe of envelopes (topic, sequence_id) a topic.
-- Payloads come only if all of them together are not longer than max_bytes (below 0: never); total_bytes tells. They are
-- stored uncompressed, so their lengths are known without reading them.
SELECT
    sequence_id, topic, server_ns, expiry_ns, message_hash, is_commit_or_proposal,
    CASE WHEN total_bytes <= %(max_bytes)s THEN payload END,
    total_bytes
FROM (
    SELECT e.*, wanted.place, sum(octet_length(e.payload)) OVER () AS total_bytes
    FROM unnest(%(topics)s::bytea[]) WITH ORDINALITY AS wanted (topic, place)
    CROSS JOIN LATERAL (
        SELECT * FROM envelopes AS s WHERE s.topic = wanted.topic ORDER BY s.sequence_id DESC LIMIT 1
    ) AS e
) AS newest
ORDER BY place
