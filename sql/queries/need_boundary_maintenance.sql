-- Whether eligible rows lie above the closed boundary (PUSH-042). No lock.
-- Index: one probe from the top of envelopes_push_eligible. EXISTS above a bound parameter would ask the same, but a
-- generic plan may scan for it.
SELECT coalesce((SELECT max(sequence_id) FROM envelopes WHERE push_eligible) > closed_sequence_id, false)
FROM allocation_boundary WHERE singleton
