"""Several ranks that compute one model: their collectives, and how the weights are cut."""
