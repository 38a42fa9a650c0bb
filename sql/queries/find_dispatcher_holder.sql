-- The session that holds the dispatcher lock, key (0, 3): its process id in the server, when it began, and its name.
-- No row when nobody does. No lock.
SELECT a.pid, extract(epoch FROM a.backend_start)::float8, a.application_name
FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.classid = 0 AND l.objid = 3 AND l.objsubid = 2 AND l.granted
