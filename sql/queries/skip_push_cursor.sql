-- Move the cursor to the closed boundary, so that what lies between is never dispatched, and record it: an operator's
-- decision after a long outage. One row with the old and the new cursor and the eligible rows passed over; no row when
-- the cursor is there already.
--
-- Lock: the cursor's row. A running holder finds the cursor moved at its next compare-and-set, ends its term as one
-- that lost ownership, and begins the next one here.
-- Index: envelopes_push_eligible.
WITH known AS (
    SELECT c.sequence_id, b.closed_sequence_id
    FROM push_cursor AS c CROSS JOIN allocation_boundary AS b
    WHERE c.singleton AND b.singleton
    FOR UPDATE OF c
), moved AS (
    UPDATE push_cursor AS c SET sequence_id = known.closed_sequence_id
    FROM known WHERE c.singleton AND c.sequence_id < known.closed_sequence_id
    RETURNING known.sequence_id AS old, known.closed_sequence_id AS new
)
INSERT INTO push_cursor_skip (skipped_ns, from_sequence_id, to_sequence_id, eligible_rows)
SELECT (extract(epoch FROM clock_timestamp()) * 1e9)::bigint, old, new,
    (SELECT count(*) FROM envelopes WHERE push_eligible AND sequence_id > moved.old AND sequence_id <= moved.new)
FROM moved
RETURNING from_sequence_id, to_sequence_id, eligible_rows
