"""The media workers: they decode images, video and sound, and prepare prompts with them beside the core."""
