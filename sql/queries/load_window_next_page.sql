-- A later page of a window whose bounds the first page fixed: the deliveries after the pair (row, recipient) where the
-- page before ended, up to the window's last row, and the closed boundary this snapshot sees.
--
-- One row a delivery, in (row, recipient) order, at most a page of them; a single row without delivery when none is
-- left. The caller reads the page again elsewhere or later when the boundary lies below the window's end: such a
-- snapshot may lack rows.
--
-- Lock, index and shape as in load_window_page. The walk begins at the row where the page before ended, and the lower
-- bound on recipients is one expression that depends on the outer row alone, so that it is an index condition and not
-- a filter: the resume row goes on in the middle of its recipients, later rows start with the first one.
SELECT b.closed_sequence_id, d.*
FROM allocation_boundary AS b
LEFT JOIN LATERAL (
    SELECT r.sequence_id, s.recipient_id, p.channel, p.delivery, p.signing_key, p.secret_hash, r.topic,
        r.server_ns, r.sender_hmac, s.hmac_epoch_base, s.hmac_key_0, s.hmac_key_1, s.hmac_key_2
    FROM (
        SELECT sequence_id, topic, server_ns, sender_hmac, is_commit_or_proposal FROM envelopes
        WHERE push_eligible AND sequence_id >= %(resume_row)s AND sequence_id <= %(last)s
        ORDER BY sequence_id LIMIT %(rows)s
    ) AS r
    CROSS JOIN LATERAL (
        SELECT * FROM push_subscription
        WHERE topic = r.topic AND since_sequence_id < r.sequence_id
            AND (include_commits OR NOT r.is_commit_or_proposal)
            AND recipient_id > CASE WHEN r.sequence_id = %(resume_row)s THEN %(resume_recipient)s ELSE ''::bytea END
        ORDER BY recipient_id LIMIT %(page)s
    ) AS s
    CROSS JOIN LATERAL (
        SELECT channel, delivery, signing_key, secret_hash FROM push_recipient
        WHERE recipient_id = s.recipient_id LIMIT 1
    ) AS p
    ORDER BY r.sequence_id, s.recipient_id LIMIT %(page)s
) AS d ON true
WHERE b.singleton
