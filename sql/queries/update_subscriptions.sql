-- UpdateSubscriptions by flat parallel arrays; the function explains its locks and order.
SELECT verdict, new_count, current_channel, renewed_at_ns, added, removed
FROM push_update_subscriptions(
    %(recipient_id)b, %(secret_hash)b,
    %(topics)b::bytea[], %(epoch_bases)b::bigint[], %(keys_0)b::bytea[], %(keys_1)b::bytea[], %(keys_2)b::bytea[],
    %(include_commits)b::boolean[], %(removes)b::bytea[], %(max_topics)s::bigint
)
