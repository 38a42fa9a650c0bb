-- What `check-config --online` asks a server about itself. One row.
SELECT
    current_setting('server_version_num')::integer / 10000,
    pg_is_in_recovery(),
    (SELECT system_identifier FROM pg_control_system()),
    current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint),
    current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer,
    (extract(epoch FROM clock_timestamp()) * 1e9)::bigint,
    has_schema_privilege(current_schema(), 'CREATE'),
    to_regclass('pushd_migration') IS NOT NULL,
    (SELECT coalesce(bool_and(has_table_privilege(to_regclass(needed.relation), needed.kind)), true)
        FROM (VALUES ('envelopes', 'INSERT'), ('envelopes', 'DELETE'), ('push_recipient', 'UPDATE'),
            ('push_subscription', 'DELETE'), ('push_cursor', 'UPDATE'), ('allocation_boundary', 'UPDATE'))
            AS needed (relation, kind)
        WHERE to_regclass(needed.relation) IS NOT NULL),
    current_setting('server_encoding')
