"""The LoRA adapters that requests may name as their model. They are the same for all workers of a server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ..ipc.adapters import LoRARequest
from ..ipc.errors import InvalidArgumentError, shown
from .failures import HttpError


class _Listed(msgspec.Struct):
    """An adapter in an option. vLLM's option also takes it as JSON, with these names."""

    name: str
    path: str


class _Kept(msgspec.Struct):
    adapters: dict[str, tuple[int, str]] = {}  # name → number and folder
    largest: int = 0  # number so far: a core may still have the adapter of a number that is free


def adapters_file(listed: Sequence[str]) -> Any:
    """A file without a name, for the adapters of a server. listed: those that it begins with, as NAME=FOLDER or JSON.

    Raises:
        InvalidArgumentError: one is of neither form.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  # its descriptor goes to the workers
    made = ServedAdapters(file.fileno())
    for text in listed:
        try:
            one = msgspec.json.decode(text, type=_Listed) if text[:1] == "{" else _Listed(*text.partition("=")[::2])
        except msgspec.DecodeError as error:
            raise InvalidArgumentError(f"lora_modules has {shown(text)}, which is no adapter: {error}") from None
        made.add(made.next(one.name, one.path))
    return file


class ServedAdapters:
    """Kept in a file that all workers have open, and in no worker, because a worker may be started again.

    Args:
        fd: of a file that `adapters_file` has made.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

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
