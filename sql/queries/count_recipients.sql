-- Recipients and their topics by channel, for people. Reads the whole recipient table.
--
-- Lock: none.
SELECT channel, count(*), coalesce(sum(topic_count), 0)::bigint FROM push_recipient GROUP BY channel ORDER BY channel
