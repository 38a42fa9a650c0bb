-- One UpdateSubscriptions as one round trip (PUSH-020, PUSH-021, PUSH-026).
--
-- A function rather than one statement with several CTEs: every statement of a volatile function sees what committed
-- before it began, so everything behind the row lock is read after the lock was granted. A single statement would
-- decide with the snapshot of its start and miss rows that the previous lock holder wrote.
--
-- Lock: the recipient's row. Every writer of that recipient's subscriptions takes it first, so the counts below cannot
-- change underneath, and two updates of one recipient cannot deadlock. NO KEY suffices: it conflicts with itself and
-- with DELETE, and leaves the foreign-key checks of the inserts alone.
--
-- Nothing is written before the verdict is known, so a refusal leaves no trace and needs no rollback. Inserted and
-- replaced rows are told apart by counting the known topics beforehand; `xmax = 0` on the returned rows would tell too,
-- but nothing promises it.
--
-- The caller has checked shapes: no topic occurs twice in p_topics and p_removes together, the arrays are parallel.
-- The hash compared here was compared in constant time by the caller before; this guards against a recipient deleted
-- and made anew by somebody else in between.
CREATE FUNCTION push_update_subscriptions(
    p_recipient_id bytea,
    p_secret_hash bytea,
    p_topics bytea[],
    p_epoch_bases bigint[],
    p_keys_0 bytea[],
    p_keys_1 bytea[],
    p_keys_2 bytea[],
    p_include_commits boolean[],
    p_removes bytea[],
    p_max_topics bigint,
    OUT verdict text,
    OUT new_count integer,
    OUT current_channel smallint,
    OUT renewed_at_ns bigint,
    OUT added integer,
    OUT removed integer
) LANGUAGE plpgsql AS $$
DECLARE
    old_count integer;
    stored_hash bytea;
    boundary bigint;
BEGIN
    SELECT r.topic_count, r.secret_hash, r.channel INTO old_count, stored_hash, current_channel
    FROM push_recipient AS r WHERE r.recipient_id = p_recipient_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        verdict := 'not_registered';
        RETURN;
    END IF;
    IF stored_hash <> p_secret_hash THEN
        verdict := 'wrong_secret';
        RETURN;
    END IF;

    SELECT cardinality(p_topics) - count(*) INTO added
    FROM push_subscription AS s WHERE s.recipient_id = p_recipient_id AND s.topic = ANY (p_topics);
    SELECT count(*) INTO removed
    FROM push_subscription AS s WHERE s.recipient_id = p_recipient_id AND s.topic = ANY (p_removes);
    new_count := old_count + added - removed;
    -- Above the limit and growing. A recipient that was above it already, because an operator lowered the limit, may
    -- still remove topics and refresh keys.
    IF new_count > p_max_topics AND new_count > old_count THEN
        verdict := 'topic_limit';
        RETURN;
    END IF;

    DELETE FROM push_subscription AS s WHERE s.recipient_id = p_recipient_id AND s.topic = ANY (p_removes);

    SELECT b.closed_sequence_id INTO STRICT boundary FROM allocation_boundary AS b WHERE b.singleton;
    INSERT INTO push_subscription AS s (
        recipient_id, topic, since_sequence_id, hmac_epoch_base, hmac_key_0, hmac_key_1, hmac_key_2, include_commits
    )
    SELECT p_recipient_id, a.topic, boundary, a.epoch_base, a.key_0, a.key_1, a.key_2, a.include_commits
    FROM unnest(p_topics, p_epoch_bases, p_keys_0, p_keys_1, p_keys_2, p_include_commits)
        AS a (topic, epoch_base, key_0, key_1, key_2, include_commits)
    -- A known topic keeps its start position.
    ON CONFLICT (recipient_id, topic) DO UPDATE SET
        hmac_epoch_base = EXCLUDED.hmac_epoch_base,
        hmac_key_0 = EXCLUDED.hmac_key_0,
        hmac_key_1 = EXCLUDED.hmac_key_1,
        hmac_key_2 = EXCLUDED.hmac_key_2,
        include_commits = EXCLUDED.include_commits;

    UPDATE push_recipient AS r
    SET topic_count = new_count, renewed_ns = (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint
    WHERE r.recipient_id = p_recipient_id
    RETURNING r.renewed_ns INTO renewed_at_ns;
    verdict := 'updated';
END $$;
