"""The model: a transformers checkpoint whose attention runs over the paged KV cache."""
