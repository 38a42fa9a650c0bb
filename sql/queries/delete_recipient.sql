-- Unregister: the recipient and, by the cascade, its subscriptions (PUSH-006). Locks the row; the hash guards against a
-- recipient deleted and made anew by somebody else since the caller's secret was compared.
DELETE FROM push_recipient WHERE recipient_id = %(recipient_id)b AND secret_hash = %(secret_hash)b RETURNING topic_count
