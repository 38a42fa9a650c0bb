-- What operators do to the log: prune what has expired, and skip what is not worth waking anyone for.

-- Commits, proposals and commit-log entries never expire and are not in the index.
CREATE INDEX envelopes_expiry ON envelopes (expiry_ns) WHERE expiry_ns IS NOT NULL;

-- One row for each time an operator moved the cursor past undispatched envelopes.
CREATE TABLE push_cursor_skip (
    skipped_ns bigint NOT NULL CHECK (skipped_ns >= 0),
    from_sequence_id bigint NOT NULL CHECK (from_sequence_id >= 0),
    to_sequence_id bigint NOT NULL CHECK (to_sequence_id > from_sequence_id),
    eligible_rows bigint NOT NULL CHECK (eligible_rows >= 0)
);
