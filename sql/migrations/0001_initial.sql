-- The first schema: envelopes with their sequence and boundary, recipients with their subscriptions, the cursor.
-- Column and constraint shapes follow spec §4.3 and the storage table of the backend it extends.

CREATE SEQUENCE envelope_sequence AS bigint START 1 INCREMENT 1 MINVALUE 1 CACHE 1 NO CYCLE;

CREATE TABLE envelopes (
    sequence_id bigint PRIMARY KEY CHECK (sequence_id > 0),
    topic bytea NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 128),
    server_ns bigint NOT NULL CHECK (server_ns >= 0),
    expiry_ns bigint CHECK (expiry_ns >= server_ns),
    message_hash bytea NOT NULL CHECK (octet_length(message_hash) = 32),
    is_commit_or_proposal boolean NOT NULL,
    push_eligible boolean NOT NULL,
    sender_hmac bytea CHECK (octet_length(sender_hmac) = 32),
    payload bytea NOT NULL,
    UNIQUE (topic, message_hash)
);
ALTER SEQUENCE envelope_sequence OWNED BY envelopes.sequence_id;
-- Payloads are ciphertext: compressing them costs time and gains nothing.
ALTER TABLE envelopes ALTER COLUMN payload SET STORAGE EXTERNAL;
CREATE INDEX envelopes_topic_sequence ON envelopes (topic, sequence_id);
-- The dispatcher's walk. Its statements repeat the predicate literally, or a generic plan cannot use the index.
CREATE INDEX envelopes_push_eligible ON envelopes (sequence_id) WHERE push_eligible;

CREATE TABLE topic_watermark (
    topic bytea PRIMARY KEY CHECK (octet_length(topic) BETWEEN 1 AND 128),
    last_sequence_id bigint NOT NULL CHECK (last_sequence_id > 0)
);

CREATE TABLE allocation_boundary (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    closed_sequence_id bigint NOT NULL CHECK (closed_sequence_id >= 0)
);
INSERT INTO allocation_boundary (singleton, closed_sequence_id) VALUES (true, 0);

CREATE TABLE push_recipient (
    recipient_id bytea PRIMARY KEY CHECK (octet_length(recipient_id) = 32),
    secret_hash bytea NOT NULL CHECK (octet_length(secret_hash) = 32),
    channel smallint NOT NULL CHECK (channel BETWEEN 1 AND 3),
    delivery text NOT NULL CHECK (char_length(delivery) BETWEEN 1 AND 2048),
    signing_key bytea CHECK (octet_length(signing_key) BETWEEN 16 AND 64),
    topic_count integer NOT NULL CHECK (topic_count >= 0),
    renewed_ns bigint NOT NULL CHECK (renewed_ns >= 0)
);
CREATE INDEX push_recipient_renewed ON push_recipient (renewed_ns, recipient_id);

CREATE TABLE push_subscription (
    recipient_id bytea NOT NULL REFERENCES push_recipient ON DELETE CASCADE,
    topic bytea NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 128),
    since_sequence_id bigint NOT NULL CHECK (since_sequence_id >= 0),
    hmac_epoch_base bigint CHECK (hmac_epoch_base >= 0),
    hmac_key_0 bytea CHECK (octet_length(hmac_key_0) = 42),
    hmac_key_1 bytea CHECK (octet_length(hmac_key_1) = 42),
    hmac_key_2 bytea CHECK (octet_length(hmac_key_2) = 42),
    include_commits boolean NOT NULL,
    PRIMARY KEY (recipient_id, topic)
);
-- (topic, recipient_id) rather than (topic): the window statement resumes in the middle of one topic's recipients by
-- an index condition; with (topic) alone a page of a 100,000-subscriber topic costs a sort of all of them.
CREATE INDEX push_subscription_topic ON push_subscription (topic, recipient_id);

CREATE TABLE push_cursor (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    sequence_id bigint NOT NULL CHECK (sequence_id >= 0)
);
INSERT INTO push_cursor (singleton, sequence_id) VALUES (true, 0);
