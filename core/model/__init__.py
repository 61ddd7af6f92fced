"""The model: a transformers checkpoint whose attention runs over the paged KV cache."""

from .load import light_imports as light_imports
