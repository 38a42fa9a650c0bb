-- The push dispatcher's lock, domain 0 key 3, held by the session until it ends (PUSH-040). Does not wait.
SELECT pg_try_advisory_lock(0, 3)
