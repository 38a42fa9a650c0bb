-- The stored bytes of some rows for the sender check, in row order, as many as fit into a byte budget and at least one.
-- Rows that are gone are absent. Nothing is returned when none of them exists any more.
--
-- Lock: none. Index: the primary key. The running sum reads lengths only: the length of a value stored out of line is in
-- its pointer, so the bytes of rows beyond the budget are not fetched.
SELECT e.sequence_id, e.payload
FROM (
    SELECT sequence_id, payload, sum(octet_length(payload)) OVER (ORDER BY sequence_id) AS held_bytes,
        row_number() OVER (ORDER BY sequence_id) AS place
    FROM envelopes WHERE sequence_id = ANY (%(sequence_ids)b::bigint[])
) AS e
WHERE e.held_bytes <= %(budget_bytes)s OR e.place = 1
ORDER BY e.sequence_id
