-- One publish: all envelopes or none. Locks: topics (advisory, ascending), then the allocation barrier shared, to the
-- end of the statement. Index: envelopes (topic, message_hash). Two publishers of one envelope are serialized by its
-- topic's lock, so the later one finds it stored. Numbers are in nanoseconds.
SELECT id, created_ns, expires_ns, is_new
FROM publish_envelopes(
    %(lock_keys)s::bigint[], %(topics)s::bytea[], %(hashes)s::bytea[], %(payloads)s::bytea[], %(hmacs)s::bytea[],
    %(retentions_ns)s::bigint[], %(commits)s::boolean[], %(eligible)s::boolean[], %(admissible)s::boolean[]
)
