-- Delete at most %(rows)s expired envelopes at or below the push cursor, lowest sequence ids first; the rows deleted.
--
-- Lock: the rows. What is above the cursor stays, expired or not: it has not been dispatched.
-- Index: envelopes_expiry.
DELETE FROM envelopes WHERE sequence_id IN (
    SELECT sequence_id FROM envelopes
    WHERE expiry_ns IS NOT NULL AND expiry_ns <= (extract(epoch FROM clock_timestamp()) * 1e9)::bigint
        AND sequence_id <= (SELECT sequence_id FROM push_cursor WHERE singleton)
    ORDER BY expiry_ns LIMIT %(rows)s
)
