-- Delete recipients whose provider named the token as dead, each only if everything the attempt used is still what is
-- stored (PUSH-046): a recipient that registered anew meanwhile, with another token, key or secret, stays. Subscriptions
-- go by the cascade. Returns the places in the arrays, from 1, of those that were deleted.
-- Lock: the deleted rows. Index: the primary key.
DELETE FROM push_recipient AS p
USING unnest(
    %(recipient_ids)b::bytea[], %(channels)b::smallint[], %(deliveries)s::text[], %(signing_keys)b::bytea[],
    %(secret_hashes)b::bytea[]
) WITH ORDINALITY AS g (recipient_id, channel, delivery, signing_key, secret_hash, place)
WHERE p.recipient_id = g.recipient_id AND p.channel = g.channel AND p.delivery = g.delivery
    AND p.signing_key IS NOT DISTINCT FROM g.signing_key AND p.secret_hash = g.secret_hash
RETURNING g.place
