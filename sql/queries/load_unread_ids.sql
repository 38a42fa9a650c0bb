-- The closed boundary, and the first envelopes in ranges of ids, ascending, without their payloads. No lock. One
-- statement, because both have to come from one snapshot: a snapshot that shows the boundary shows everything at or
-- below it. Index: the primary key, one probe a range; bounds are inclusive, ranges do not overlap.
-- A boundary row without an envelope stands for a page with nothing in it.
SELECT boundary.closed_sequence_id, found.sequence_id, found.topic, found.payload_bytes
FROM allocation_boundary AS boundary
LEFT JOIN LATERAL (
    SELECT e.sequence_id, e.topic, e.payload_bytes
    FROM unnest(%(lows)s::bigint[], %(highs)s::bigint[]) AS range (low, high)
    CROSS JOIN LATERAL (
        SELECT s.sequence_id, s.topic, octet_length(s.payload) AS payload_bytes
        FROM envelopes AS s
        WHERE s.sequence_id BETWEEN range.low AND range.high
        ORDER BY s.sequence_id LIMIT %(max_rows)s
    ) AS e
    ORDER BY e.sequence_id LIMIT %(max_rows)s
) AS found ON true
WHERE boundary.singleton
ORDER BY found.sequence_id
