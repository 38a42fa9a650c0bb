-- The sequence id up to which every first attempt was made, by whoever held the lock last. No lock.
SELECT sequence_id FROM push_cursor WHERE singleton
