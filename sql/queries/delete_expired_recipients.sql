-- One batch of the expiry sweep (PUSH-024): of the recipients whose last renewal is older than the period, those that
-- have been silent longest, as many as the limit of subscriptions between them allows, and at least one. Subscriptions
-- go by the cascade, which is what takes time. The clock is the database's.
-- Lock: the deleted rows. The condition is repeated in the DELETE, so a recipient that renews while the batch is chosen
-- is judged again by what it renewed to. Index: push_recipient_renewed for the choice, the primary key for the rest.
DELETE FROM push_recipient AS p
USING (
    SELECT recipient_id, sum(topic_count) OVER (ORDER BY renewed_ns, recipient_id) AS topics,
        row_number() OVER (ORDER BY renewed_ns, recipient_id) AS place
    FROM (
        SELECT recipient_id, renewed_ns, topic_count FROM push_recipient
        WHERE renewed_ns < (extract(epoch FROM statement_timestamp()) * 1000000000)::bigint - %(ttl_ns)s
        ORDER BY renewed_ns, recipient_id LIMIT %(recipients)s
    ) AS oldest
) AS expired
WHERE p.recipient_id = expired.recipient_id
    AND p.renewed_ns < (extract(epoch FROM statement_timestamp()) * 1000000000)::bigint - %(ttl_ns)s
    AND (expired.topics <= %(topics)s OR expired.place = 1)
