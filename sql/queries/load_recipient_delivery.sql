-- How a stored recipient is reached, for a test push. One row, or none for an unknown recipient.
--
-- Lock: none. Index: the primary key.
SELECT channel, delivery, signing_key, secret_hash FROM push_recipient WHERE recipient_id = %(recipient_id)s
