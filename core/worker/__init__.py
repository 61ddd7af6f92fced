"""The worker: runs step plans on a device and returns step results."""
