"""Checkpoints as a core wrote them (``load_format="sharded_state"``): the parameters under the names of transformers'
model, in parts. Each rank writes what it holds, and the same rank of as many reads that."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ....ipc.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedModelError

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MAX_FILE_BYTES = 5 << 30  # default size of a part


def save_parts(
    parameters: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    pattern: str | None,
    max_size: int | None,
    rank: int = 0,
) -> None:
    """Write parameters into files of at most `max_size` bytes, or of one parameter that is larger.

    Raises:
        InvalidArgumentError: `pattern` is another one than `PATTERN`, or the folder can't be written to.
    """
    if pattern not in (None, PATTERN):
        raise InvalidArgumentError(f"pattern is {pattern!r}; files are named by {PATTERN!r}")
    part: dict[str, torch.Tensor] = {}
    size, count = 0, 0

    def write() -> None:
        nonlocal part, size, count
        save_file(part, folder / PATTERN.format(rank=rank, part=count), {"format": "pt"})
        part, size, count = {}, 0, count + 1

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in _parts(folder, rank):
            old.unlink()
        for name, tensor in parameters:
            if part and size + tensor.nbytes > (max_size or MAX_FILE_BYTES):
                write()
            part[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            size += tensor.nbytes
        write()
    except OSError as error:
        raise InvalidArgumentError(f"the weights can't be written to {folder}: {error}") from error


def read_parts(folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """The parameters that a rank wrote.

    Raises:
        ModelNotFoundError: there are none.
        UnsupportedModelError: they are of another number of ranks.
    """
    if not _parts(folder, 0):
        named = PATTERN.format(rank=0, part=0)
        raise ModelNotFoundError(f"load_format is 'sharded_state', but {folder} holds no file {named}")
    wrote = {path.name.split("-")[2] for path in folder.glob(PATTERN.format(rank="*", part="*"))}
    if len(wrote) != ranks:
        raise UnsupportedModelError(f"they were written by {len(wrote)} ranks; as many must read them, not {ranks}")
    found: dict[str, torch.Tensor] = {}
    for path in _parts(folder, rank):
        found |= load_file(path)
    return found


def _parts(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(PATTERN.format(rank=rank, part="*")))
