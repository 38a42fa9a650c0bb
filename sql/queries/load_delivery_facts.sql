-- Everything that decides whether one envelope is pushed to one recipient, from one snapshot. One row.
--
-- Lock: none. Index: the primary keys; the few recorded skips are read whole.
SELECT
    b.closed_sequence_id, c.sequence_id,
    (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM envelope_sequence),
    EXISTS (SELECT 1 FROM push_cursor_skip AS k
        WHERE k.from_sequence_id < %(sequence_id)s AND k.to_sequence_id >= %(sequence_id)s),
    e.server_ns, e.push_eligible, e.is_commit_or_proposal, e.sender_hmac, e.payload,
    r.channel,
    s.since_sequence_id, s.include_commits, s.hmac_epoch_base, s.hmac_key_0, s.hmac_key_1, s.hmac_key_2
FROM allocation_boundary AS b
CROSS JOIN push_cursor AS c
LEFT JOIN envelopes AS e ON e.sequence_id = %(sequence_id)s
LEFT JOIN push_recipient AS r ON r.recipient_id = %(recipient_id)s
LEFT JOIN push_subscription AS s ON s.recipient_id = r.recipient_id AND s.topic = e.topic
WHERE b.singleton AND c.singleton
