-- The hash that a caller's secret has to match. Primary key look-up, no lock: whoever writes afterwards compares again.
SELECT secret_hash FROM push_recipient WHERE recipient_id = %(recipient_id)b
