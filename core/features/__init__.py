"""What only some requests use. A feature takes part in planning through the hooks of plan/feature.py. No torch."""
