-- The closed allocation boundary as this snapshot sees it. No lock.
SELECT closed_sequence_id FROM allocation_boundary WHERE singleton
