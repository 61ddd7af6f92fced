"""Let a running daemon have more cores, or fewer."""

from __future__ import annotations

import time

from ..ipc.connection import Connection, ask_status
from ..ipc.errors import ConnectError
from ..ipc.sync_client import SyncClient
from ..ipc.transport import address_at, ipc_path

_LOOK_SECONDS = 0.2


def scale(count: int, address: str, key: str | None = None, server_key: str | None = None) -> None:
    """Have `count` cores at the daemon at `address`, and wait until they serve.

    Raises:
        ConnectError: no daemon answers.
        InvalidArgumentError: not a number of cores that a daemon can have.
        NotPermittedError: over tcp, this key is not listed with `admin`.
    """
    client = SyncClient(Connection(admin_of(address), key=key, server_key=server_key, name="scale"))
    try:
        client.call("scale", count)
    finally:
        client.close()
    while not _serve(count, address, key, server_key):
        time.sleep(_LOOK_SECONDS)


def admin_of(address: str) -> str:
    """Where the daemon at this address listens for administrators, if its options name no other place."""
    path = ipc_path(address)
    if path is None or path.name.endswith(("admin.sock", ".admin")):
        return address
    beside, default = path.with_name(f"{path.name}.admin"), path.with_name("admin.sock")
    return f"ipc://{default if path.name == 'core.sock' and not beside.exists() else beside}"


def _serve(count: int, address: str, key: str | None, server_key: str | None) -> bool:
    """Whether the daemon has so many cores, and all of them serve."""
    try:
        first = ask_status(address, key=key, server_key=server_key).core
        places = [address_at(address, one.place) for one in first.cores] or [address]
        return len(places) == count and all(
            ask_status(place, key=key, server_key=server_key).core.phase not in ("starting", "loading", "capturing")
            for place in places
        )
    except ConnectError:
        return False
