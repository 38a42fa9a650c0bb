-- A page of several topics' envelopes in sequence order, each topic above its own cursor. No lock; one snapshot.
-- Index: envelopes (topic, sequence_id), read at most max_rows entries a topic before the page is cut.
-- The page ends before its payloads pass max_bytes, but not before its first row; page_rows tells how many rows it had
-- until then. Payloads are stored uncompressed, so their lengths are known without reading them.
SELECT sequence_id, topic, server_ns, expiry_ns, message_hash, is_commit_or_proposal, payload, page_rows
FROM (
    SELECT
        e.*,
        count(*) OVER () AS page_rows,
        sum(octet_length(e.payload)) OVER (ORDER BY e.sequence_id) AS bytes_so_far,
        row_number() OVER (ORDER BY e.sequence_id) AS place
    FROM (
        SELECT found.sequence_id
        FROM unnest(%(topics)s::bytea[], %(cursors)s::bigint[]) AS wanted (topic, cursor)
        CROSS JOIN LATERAL (
            SELECT s.sequence_id FROM envelopes AS s
            WHERE s.topic = wanted.topic AND s.sequence_id > wanted.cursor
            ORDER BY s.sequence_id LIMIT %(max_rows)s
        ) AS found
        ORDER BY found.sequence_id LIMIT %(max_rows)s
    ) AS page
    CROSS JOIN LATERAL (SELECT * FROM envelopes AS f WHERE f.sequence_id = page.sequence_id LIMIT 1) AS e
) AS measured
WHERE bytes_so_far <= %(max_bytes)s OR place = 1
ORDER BY sequence_id
