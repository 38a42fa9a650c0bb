-- The envelopes with these ids, ascending; ids that are not there are left out. No lock. Index: the primary key.
SELECT e.sequence_id, e.topic, e.server_ns, e.expiry_ns, e.message_hash, e.is_commit_or_proposal, e.payload
FROM envelopes AS e
WHERE e.sequence_id = ANY (%(ids)s::bigint[])
ORDER BY e.sequence_id
