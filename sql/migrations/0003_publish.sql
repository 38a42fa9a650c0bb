-- Publishing and closing the allocation boundary, each as one function and so as one statement and one transaction.
--
-- Inside a VOLATILE function every statement takes a fresh snapshot under READ COMMITTED, so a lookup that follows a
-- lock sees everything committed before the lock was granted, exactly as separate statements would. What one statement
-- adds is that neither transaction can ever sit idle: a client that dies or hangs between two steps cannot keep the
-- barrier, because there are no two steps, and statement_timeout bounds the whole of it.
--
-- Advisory locks (the domain 0 of the two-number keys is global): (0, 2) is the allocation barrier, shared for
-- publishers and exclusive for whoever closes the boundary; a topic's lock is one bigint.

-- Stores the envelopes that are not stored yet, all or none, and answers one row for each, in their order.
--   lock_keys    the topics' lock keys, ascending, distinct
--   admissible   false for an envelope that failed validation and may only be answered as a duplicate
-- When such an envelope is not stored already, nothing is stored and the rows of unknown envelopes carry no id.
-- The caller passes each (topic, hash) once. Raises 23514 when a topic's watermark is not below the new ids.
CREATE FUNCTION publish_envelopes(
    lock_keys bigint[],
    topics bytea[],
    hashes bytea[],
    payloads bytea[],
    hmacs bytea[],
    retentions_ns bigint[],
    commits boolean[],
    eligible boolean[],
    admissible boolean[],
    OUT id bigint,
    OUT created_ns bigint,
    OUT expires_ns bigint,
    OUT is_new boolean
) RETURNS SETOF record
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    now_ns bigint := (extract(epoch FROM now()) * 1000000)::bigint * 1000;
    known bigint[];
    known_created bigint[];
    known_expires bigint[];
    ids bigint[];
    advanced bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(k) FROM unnest(lock_keys) AS k;
    PERFORM pg_advisory_xact_lock_shared(0, 2);

    -- LIMIT 1 keeps the planner from joining: a plan made while the table was empty could not turn into a scan later.
    -- Everything that is answered about a known envelope is read here, once: it may be pruned before the end.
    SELECT
        array_agg(e.sequence_id ORDER BY w.n), array_agg(e.server_ns ORDER BY w.n), array_agg(e.expiry_ns ORDER BY w.n)
    INTO known, known_created, known_expires
    FROM unnest(topics, hashes) WITH ORDINALITY AS w(topic, hash, n)
    LEFT JOIN LATERAL (
        SELECT s.sequence_id, s.server_ns, s.expiry_ns FROM envelopes s
        WHERE s.topic = w.topic AND s.message_hash = w.hash LIMIT 1
    ) AS e ON true;

    IF array_position(known, NULL) IS NOT NULL
        AND NOT EXISTS (SELECT FROM unnest(known, admissible) AS w(k, ok) WHERE w.k IS NULL AND NOT w.ok)
    THEN
        -- Only here, with every lock held, may ids be taken: the boundary's proof rests on it.
        ids := ARRAY(SELECT coalesce(k, nextval('envelope_sequence')) FROM unnest(known) AS k);

        INSERT INTO envelopes (
            sequence_id, topic, server_ns, expiry_ns, message_hash,
            is_commit_or_proposal, push_eligible, sender_hmac, payload
        )
        SELECT w.i, w.topic, now_ns, now_ns + w.retention, w.hash, w.is_commit, w.is_eligible, w.hmac, w.payload
        FROM unnest(ids, known, topics, retentions_ns, hashes, commits, eligible, hmacs, payloads)
            AS w(i, k, topic, retention, hash, is_commit, is_eligible, hmac, payload)
        WHERE w.k IS NULL;

        WITH newest AS (
            SELECT w.topic, max(w.i) AS i FROM unnest(ids, known, topics) AS w(i, k, topic)
            WHERE w.k IS NULL GROUP BY w.topic
        ), raised AS (
            INSERT INTO topic_watermark AS t (topic, last_sequence_id) SELECT topic, i FROM newest
            ON CONFLICT (topic) DO UPDATE SET last_sequence_id = excluded.last_sequence_id
            WHERE t.last_sequence_id < excluded.last_sequence_id
            RETURNING 1
        )
        SELECT (SELECT count(*) FROM newest) - (SELECT count(*) FROM raised) INTO advanced;
        IF advanced <> 0 THEN
            RAISE EXCEPTION 'topic watermark above the sequence' USING ERRCODE = 'check_violation';
        END IF;
    ELSE
        ids := known;
    END IF;

    RETURN QUERY
        SELECT w.i,
            CASE WHEN w.k IS NULL THEN now_ns ELSE w.created END,
            CASE WHEN w.k IS NULL THEN now_ns + w.retention ELSE w.expires END,
            w.k IS NULL
        FROM unnest(ids, known, known_created, known_expires, retentions_ns) WITH ORDINALITY
            AS w(i, k, created, expires, retention, n)
        ORDER BY w.n;
END
$$;

-- Raises the closed allocation boundary to the last id handed out and returns it; NULL when the barrier was not granted
-- within wait_ms (or half of statement_timeout, if that is less: the wait must end before the statement does).
-- Raises 23514 when the boundary row is missing or lies above the sequence, as after an inconsistent restore.
CREATE FUNCTION close_allocation_boundary(wait_ms integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    half_statement_ms integer;
    closed bigint;
    allocated bigint;
BEGIN
    -- Nothing handed out since the last time: no need to disturb the publishers, nor to write.
    SELECT closed_sequence_id INTO closed FROM allocation_boundary WHERE singleton;
    SELECT CASE WHEN is_called THEN last_value ELSE 0 END INTO allocated FROM envelope_sequence;
    IF allocated = closed THEN
        RETURN closed;
    END IF;

    -- The setting reads as '5s', '0' for none, and so on, which is how an interval is written too.
    half_statement_ms := nullif(extract(epoch FROM current_setting('statement_timeout')::interval) * 500, 0);
    -- 0 would mean to wait without end; least() leaves NULL out.
    PERFORM set_config('lock_timeout', greatest(1, least(wait_ms, half_statement_ms))::text, true);
    BEGIN
        PERFORM pg_advisory_xact_lock(0, 2);
    EXCEPTION WHEN lock_not_available THEN
        RETURN NULL;
    END;

    -- Nobody is between taking an id and the end of its transaction now: all ids up to this one are settled.
    SELECT CASE WHEN is_called THEN last_value ELSE 0 END INTO allocated FROM envelope_sequence;
    UPDATE allocation_boundary SET closed_sequence_id = allocated WHERE singleton AND closed_sequence_id <= allocated;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'allocation boundary missing or above the sequence' USING ERRCODE = 'check_violation';
    END IF;
    RETURN allocated;
END
$$;
