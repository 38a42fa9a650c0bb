-- One attempt to raise the closed allocation boundary. Locks: the allocation barrier, exclusive, waited for at most
-- wait_ms; then the boundary's row. Attempts of several instances follow one another and only ever raise it.
SELECT close_allocation_boundary(%(wait_ms)s)
