"""The daemon: its process, its options, its health, and what `mainspring status` shows of it."""
