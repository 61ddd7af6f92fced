"""The frontend: text in, text out. Imports neither torch nor transformers; the core may be anywhere."""
