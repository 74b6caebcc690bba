"""Worker processes for rewards: a pool, its sandbox, and what runs inside."""
