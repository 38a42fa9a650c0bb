"""PostgreSQL behind plain async functions; rows become model values here and nowhere else."""
