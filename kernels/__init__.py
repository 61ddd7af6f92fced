"""Device code behind one interface: plan once a step, run once a layer, over a paged KV cache."""


class BackendUnavailableError(RuntimeError):
    """These kernels can't run here. The message says what to install or set."""
