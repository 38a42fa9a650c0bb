-- The newest sequence id of each topic, 0 for an empty one, in the order of the topics. No lock; one snapshot.
-- Index: one probe of envelopes (topic, sequence_id) a topic.
SELECT coalesce(
    (SELECT e.sequence_id FROM envelopes AS e WHERE e.topic = wanted.topic ORDER BY e.sequence_id DESC LIMIT 1), 0
)
FROM unnest(%(topics)s::bytea[]) WITH ORDINALITY AS wanted (topic, place)
ORDER BY wanted.place
