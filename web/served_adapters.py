"""The LoRA adapters that requests may name as their model. They are the same for all workers of a server."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence

import msgspec

from ..ipc.adapters import LoRARequest
from .failures import HttpError


class _Kept(msgspec.Struct):
    adapters: dict[str, tuple[int, str]] = {}  # name → number and folder
    largest: int = 0  # number so far: a core may still have the adapter of a number that is free


class ServedAdapters:
    """Kept in a file that all workers have open, and in no worker, because a worker may be started again.

    Args:
        fd: of the file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def begin(self, listed: Sequence[str]) -> None:
        """Make the file, with adapters of the form NAME=FOLDER.

        Raises:
            InvalidArgumentError: one is not of that form.
        """
        with self._changed() as kept:
            for text in listed:
                name, _, folder = text.partition("=")
                kept.largest += 1
                kept.adapters[name] = kept.largest, folder
                LoRARequest(name, kept.largest, folder)

    def all(self) -> dict[str, LoRARequest]:
        """The adapters by name."""
        fcntl.lockf(self._fd, fcntl.LOCK_SH)
        try:
            kept = self._read()
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return {name: LoRARequest(name, number, folder) for name, (number, folder) in kept.adapters.items()}

    def next(self, name: str, folder: str) -> LoRARequest:
        """An adapter with a new number, which is not kept yet.

        Raises:
            InvalidArgumentError: name or folder can't be those of an adapter.
        """
        with self._changed() as kept:
            kept.largest += 1
        return LoRARequest(name, kept.largest, folder)

    def add(self, one: LoRARequest) -> None:
        """Keep an adapter, in place of one with the same name."""
        with self._changed() as kept:
            kept.adapters[one.lora_name] = one.lora_int_id, one.lora_path

    def remove(self, name: str) -> int:
        """Forget an adapter; its number.

        Raises:
            HttpError: there is none of that name.
        """
        with self._changed() as kept:
            if name not in kept.adapters:
                raise HttpError(404, f"there is no adapter {name!r}", "lora_name", "model_not_found")
            return kept.adapters.pop(name)[0]

    @contextlib.contextmanager
    def _changed(self) -> Iterator[_Kept]:
        """What is kept, to be changed. Nothing is written if that raises."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)  # of a process, so it works between the workers, which share the file
        try:
            kept = self._read()
            yield kept
            data = msgspec.msgpack.encode(kept)
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _read(self) -> _Kept:
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        return msgspec.msgpack.decode(data, type=_Kept) if data else _Kept()
