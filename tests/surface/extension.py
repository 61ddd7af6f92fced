"""A worker extension, found by `worker_extension_cls`."""


class Extension:
    def greet(self, name: str) -> str:
        return f"hello {name}"
