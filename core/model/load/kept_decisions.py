"""Decisions of fusing, and the logits of a verified model, kept from one start of a core to the next.

They are a file. Its name is a digest of everything that the decisions depend on: the model's config, code and weights
(a few values of each), the processor, the versions of the libraries, and this package's own sources. A start removes
the file and writes it again when the whole model has passed verification. After a start that failed, everything is
decided anew.

To verify a model takes a run of the library's own code, longer than all else that a start does with a small model. So
the next start compares a sample of the logits that the model gives in its final form, its weights packed, with those of
the start that verified it. If they differ, the model is loaded once more, and all is decided and verified anew.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch
import transformers
from transformers import PreTrainedModel

from ....kernels.contract import Backend
from ....kernels.native.build import cache_folder, cpu_features
from ..learn.fuse import Decision
from .parameters import few_values

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[3]


class Verified(msgspec.Struct, frozen=True):
    """A model that passed verification."""

    notes: list[str]  # what verification said
    logits: list[float]  # see `verify.sample_of`


class _Kept(msgspec.Struct, frozen=True):
    decisions: dict[str, Decision]
    verified: Verified | None = None


class KeptDecisions:
    """The decisions about the one model that a process loads. folder: by default ``fusing`` beside the native
    kernels."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._path: Path | None = None
        # whether a load that verifies a model compares it at each step; else where no module is left as it was, in its
        # final form only
        self.thorough = True
        self.settings = ""  # what else the logits depend on; empty: they are not compared
        self.verified: Verified | None = None  # of an earlier start; found by `find`

    def find(self, model: PreTrainedModel, backend: Backend) -> dict[str, Decision] | None:
        """The decisions of an earlier start, if there are any. None are kept for a GPU, nor for a checkpoint with code
        of its own, which may import files that the digest does not cover."""
        self._path = self.verified = None
        if model.device.type != "cpu" or not type(model).__module__.startswith("transformers."):
            return None
        try:
            folder = self._folder or cache_folder().with_name("fusing")
            self._path = folder / f"{_digest(model, backend, self.settings)}.json"
            data = self._path.read_bytes()
            self._path.unlink()
            kept = msgspec.json.decode(data, type=_Kept)
            self.verified = kept.verified if self.settings else None
            return kept.decisions
        except (OSError, RuntimeError, msgspec.DecodeError):  # RuntimeError: there is no home folder
            return None

    @property
    def can_keep(self) -> bool:
        """Whether anything is kept for the model that `find` was last called with."""
        return self._path is not None

    def keep(self, decisions: Mapping[str, Decision], verified: Verified | None = None) -> None:
        """Write them for the next start. To be called after `find`, once the model is verified."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_bytes(msgspec.json.encode(_Kept(dict(decisions), verified)))
            new.replace(self._path)
        except OSError as error:
            logger.info("decisions of fusing can't be kept in %s: %s", self._path.parent, error)


def _digest(model: PreTrainedModel, backend: Backend, settings: str) -> str:
    hashed = blake2b(digest_size=16)
    names = [torch.__version__, transformers.__version__, type(model).__name__, type(backend).__name__, backend.name]
    for text in (*names, settings, *sorted(cpu_features()), model.config.to_json_string(use_diff=False)):
        hashed.update(f"{text}\n".encode())
    ours = [*PACKAGE.glob("core/model/**/*.py"), *PACKAGE.glob("kernels/**/*.py"), *PACKAGE.glob("kernels/native/*.*")]
    for file in (Path(inspect.getfile(type(model))), *sorted(file for file in ours if file.is_file())):
        hashed.update(file.read_bytes())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {few_values(tensor)}\n".encode())
    return hashed.hexdigest()
