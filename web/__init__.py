"""The HTTP frontend: OpenAI's API over an engine's connection to a core."""
