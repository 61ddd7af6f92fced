"""Text and token ids: tokenizer, incremental detokenization, stop strings, chat templates."""
