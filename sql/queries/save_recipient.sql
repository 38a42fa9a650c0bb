-- Register: create a recipient without topics, or replace its delivery (PUSH-001, PUSH-002).
-- One upsert, so of two first registrations that race with different secrets exactly one stores its hash; the other
-- waits on the row, finds a hash that is not its own, changes nothing and gets no row back.
-- The clock is read again in the update branch: the inserted row's value was taken before a wait on the row lock.
INSERT INTO push_recipient AS r (recipient_id, secret_hash, channel, delivery, signing_key, topic_count, renewed_ns)
VALUES (
    %(recipient_id)b, %(secret_hash)b, %(channel)s, %(delivery)s, %(signing_key)b::bytea, 0,
    (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint
)
ON CONFLICT (recipient_id) DO UPDATE SET
    channel = EXCLUDED.channel,
    delivery = EXCLUDED.delivery,
    signing_key = EXCLUDED.signing_key,
    renewed_ns = (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint
WHERE r.secret_hash = EXCLUDED.secret_hash
RETURNING topic_count, channel, renewed_ns
