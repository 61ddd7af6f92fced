"""Media in prompts: what a model's own code makes of images, video and sound before its language model."""
