"""The model: a transformers checkpoint whose attention runs over the paged KV cache."""

from . import light_imports as light_imports
