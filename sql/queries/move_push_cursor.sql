-- Move the cursor forward from the value this holder believes it has (PUSH-045). No row updated: somebody else moved it.
-- Lock: the cursor's row; a second writer waits for it and then finds another value.
UPDATE push_cursor SET sequence_id = %(mark)s
WHERE singleton AND sequence_id = %(known)s AND sequence_id < %(mark)s
