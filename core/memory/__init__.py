"""The planner's bookkeeping of memory: the block pool, block tables, prefix caches. Imports no torch."""
