-- Who dispatches, how far it is, and what it works on, for people. One row.
--
-- Lock: none. The holder is found by the lock itself, key (0, 3), so this is true also when no instance reports it.
-- Index: envelopes_push_eligible for the oldest row above the cursor and for counting up to %(most)s rows.
SELECT
    c.sequence_id,
    b.closed_sequence_id,
    (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM envelope_sequence),
    (SELECT a.application_name FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
        WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND l.classid = 0 AND l.objid = 3 AND l.objsubid = 2 AND l.granted LIMIT 1),
    (SELECT count(*) FROM (
        SELECT 1 FROM envelopes WHERE push_eligible AND sequence_id > c.sequence_id LIMIT %(most)s
    ) AS waiting),
    (SELECT server_ns FROM envelopes WHERE push_eligible AND sequence_id > c.sequence_id ORDER BY sequence_id LIMIT 1),
    (extract(epoch FROM clock_timestamp()) * 1e9)::bigint,
    (SELECT min(renewed_ns) FROM push_recipient),
    (SELECT coalesce(sum(eligible_rows), 0)::bigint FROM push_cursor_skip)
FROM push_cursor AS c CROSS JOIN allocation_boundary AS b
WHERE c.singleton AND b.singleton
