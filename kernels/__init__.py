"""Device code behind one interface, contract.py: plan once a step, run once a layer, over a paged KV cache."""


class BackendUnavailableError(RuntimeError):
    """A backend can't run on this machine. The message says what to install or set."""
