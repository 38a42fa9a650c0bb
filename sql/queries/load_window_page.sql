-- The first page of the window above the read position: its deliveries, the window's bounds, the closed boundary.
--
-- One row a delivery, in (row, recipient) order, at most a page of them; a single row without delivery when nobody is
-- to be told. No row at all never happens. Bounds are NULL when no eligible row is settled above the floor.
--
-- Lock: none. Safe under concurrency: one snapshot shows the boundary and every row it covers, because whoever
-- allocated an id at or below it had ended before it was closed.
--
-- Index: envelopes_push_eligible for the walk (its predicate is repeated literally, a generic plan cannot use it
-- otherwise), push_subscription_topic for each row's recipients in order. The walk stops as soon as the page is full,
-- so a page costs the same wherever in the window it lies. Nothing may sort or hash the join: the inner LIMIT keeps
-- each row's part ordered and short, and the one-row subquery keeps recipients a primary-key probe.
SELECT b.closed_sequence_id, w.first_sequence_id, w.last_sequence_id, d.*
FROM allocation_boundary AS b
CROSS JOIN LATERAL (
    SELECT min(e.sequence_id) AS first_sequence_id, max(e.sequence_id) AS last_sequence_id
    FROM (
        SELECT sequence_id FROM envelopes
        WHERE push_eligible AND sequence_id > %(floor)s AND sequence_id <= b.closed_sequence_id
        ORDER BY sequence_id LIMIT %(rows)s
    ) AS e
) AS w
LEFT JOIN LATERAL (
    SELECT r.sequence_id, s.recipient_id, p.channel, p.delivery, p.signing_key, p.secret_hash, r.topic,
        r.server_ns, r.sender_hmac, s.hmac_epoch_base, s.hmac_key_0, s.hmac_key_1, s.hmac_key_2
    FROM (
        SELECT sequence_id, topic, server_ns, sender_hmac, is_commit_or_proposal FROM envelopes
        WHERE push_eligible AND sequence_id > %(floor)s AND sequence_id <= w.last_sequence_id
        ORDER BY sequence_id LIMIT %(rows)s
    ) AS r
    CROSS JOIN LATERAL (
        SELECT * FROM push_subscription
        WHERE topic = r.topic AND since_sequence_id < r.sequence_id
            AND (include_commits OR NOT r.is_commit_or_proposal)
        ORDER BY recipient_id LIMIT %(page)s
    ) AS s
    CROSS JOIN LATERAL (
        SELECT channel, delivery, signing_key, secret_hash FROM push_recipient
        WHERE recipient_id = s.recipient_id LIMIT 1
    ) AS p
    ORDER BY r.sequence_id, s.recipient_id LIMIT %(page)s
) AS d ON true
WHERE b.singleton
