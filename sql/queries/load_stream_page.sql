-- The next envelopes of several topics, topic after topic in the order given, each above its own cursor. No lock; one
-- snapshot. Index: envelopes (topic, sequence_id), at most topic_rows entries a topic.
-- The page ends before its envelopes pass max_bytes, overhead_bytes counted for each, but not before its first row;
-- page_rows tells how many rows it had until then. Payloads are stored uncompressed, so their lengths are known without
-- reading them.
SELECT place, sequence_id, topic, server_ns, expiry_ns, message_hash, is_commit_or_proposal, payload, page_rows
FROM (
    SELECT
        wanted.place,
        e.*,
        count(*) OVER () AS page_rows,
        sum(octet_length(e.payload) + %(overhead_bytes)s) OVER (ORDER BY wanted.place, e.sequence_id) AS bytes_so_far,
        row_number() OVER (ORDER BY wanted.place, e.sequence_id) AS number
    FROM unnest(%(topics)s::bytea[], %(cursors)s::bigint[]) WITH ORDINALITY AS wanted (topic, cursor, place)
    CROSS JOIN LATERAL (
        SELECT * FROM envelopes AS s
        WHERE s.topic = wanted.topic AND s.sequence_id > wanted.cursor
        ORDER BY s.sequence_id LIMIT %(topic_rows)s
    ) AS e
) AS measured
WHERE bytes_so_far <= %(max_bytes)s OR number = 1
ORDER BY place, sequence_id
