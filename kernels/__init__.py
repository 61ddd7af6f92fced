"""Device code behind one interface: plan once a step, run once a layer, over a paged KV cache."""
