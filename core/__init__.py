"""The engine core: scheduler, KV block pool, executor, model runner. Run by ``python -P -m mainspring.core``."""
