"""Let a running daemon have more cores, or fewer."""

from __future__ import annotations

import time

from ..ipc.connection import Connection, ask_status
from ..ipc.errors import EngineStartError
from ..ipc.sync_client import SyncClient
from ..ipc.transport import ipc_path
from .status import look, others

_LOOK_SECONDS = 0.2


def scale(count: int, address: str, key: str | None = None, server_key: str | None = None) -> None:
    """Have `count` cores at the daemon at `address`, and wait until they serve.

    Raises:
        ConnectError: no daemon answers.
        EngineStartError: a further core did not start. The others go on, and the next call tries again.
        InvalidArgumentError: not a number of cores that a daemon can have.
        NotPermittedError: over tcp, this key is not listed with `admin`.
    """
    client = SyncClient(Connection(admin_of(address), key=key, server_key=server_key, name="scale"))
    try:
        earlier = ask_status(address, key=key, server_key=server_key).core.failed_start
        client.call("scale", count)
    finally:
        client.close()
    while True:
        found = look(address, key=key, server_key=server_key)
        if not isinstance(found, int):  # a core answers
            if found.failed_start not in ("", earlier):
                raise EngineStartError(found.failed_start)
            cores = found, *others(found, address, key=key, server_key=server_key)
            waited_for = ("starting", "loading", "capturing", "unreachable")
            if len(cores) == count and all(one.phase not in waited_for for one in cores):
                return
        time.sleep(_LOOK_SECONDS)


def admin_of(address: str) -> str:
    """Where the daemon at this address listens for administrators, if its options name no other place."""
    path = ipc_path(address)
    if path is None or path.name.endswith(("admin.sock", ".admin")):
        return address
    beside, default = path.with_name(f"{path.name}.admin"), path.with_name("admin.sock")
    return f"ipc://{default if path.name == 'core.sock' and not beside.exists() else beside}"
