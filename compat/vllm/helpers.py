"""Small functions that scripts import from vLLM beside the engine."""

from __future__ import annotations

import argparse
import gc
import logging
import socket
import sys
import uuid
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from ...engine.args import FIELDS, add_vllm_flags, dashed

if TYPE_CHECKING:
    import numpy as np

init_logger = logging.getLogger
VLLM_USE_V1 = True  # which of its two engines vLLM runs


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser that takes ``--max_tokens`` for ``--max-tokens``. Fields of `EngineArgs` whose flags are not
    given have their defaults in the result."""

    def parse_known_args(  # type: ignore[override]  # one signature for its three
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = dashed(sys.argv[1:] if args is None else args)
        if "--max-model-len" in self._option_string_actions:
            add_vllm_flags(self, given)
        found, others = super().parse_known_args(given, namespace)
        for action in self._actions:
            if action.dest in FIELDS and not hasattr(found, action.dest):
                setattr(found, action.dest, copy(FIELDS[action.dest].default))
        return found, others


class ShardedStateLoader:
    """Names of the files of ``load_format="sharded_state"``. Files of the last pattern are neither written nor read."""

    DEFAULT_PATTERN = TP_ONLY_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
    PP_AND_TP_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"


class Platform:
    """What scripts ask about this machine's device."""

    def is_cuda(self) -> bool:
        return bool(_torch().cuda.is_available())

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return not self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    def empty_cache(self) -> None:
        """Return this process's unused memory of the GPU. The core has its own."""
        _torch().cuda.empty_cache()


current_platform = Platform()


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """An image of PIL in another mode; what is transparent becomes white."""
    if image.mode == "RGBA" and to_mode == "RGB":
        white = image.copy()
        white.paste((255, 255, 255, 255), (0, 0, *image.size))
        white.alpha_composite(image)
        image = white
    return image if image.mode == to_mode else image.convert(to_mode)


def tensor_of(array: np.ndarray) -> Any:
    """A torch tensor with the array's values."""
    return _torch().from_numpy(array.copy())


def _torch() -> Any:
    import torch

    return torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what deleted engines hold. There are no process groups to take apart."""
    gc.collect()


def destroy_distributed_environment() -> None:
    """Nothing: there is no process group."""


def destroy_model_parallel() -> None:
    """Nothing: there is no process group."""


def get_ip() -> str:
    """This machine's address towards others; 127.0.0.1 if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: a datagram socket sends nothing yet
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def hf_api() -> Any:
    """A client of the Hugging Face hub."""
    from huggingface_hub import HfApi

    return HfApi()


def random_uuid() -> str:
    return uuid.uuid4().hex


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first four numbers of a vector, and its size."""
    shown = ", ".join([*map(str, embeds[:4]), *(["..."] if len(embeds) > 4 else [])])
    print(f"{prefix}: [{shown}] (size={len(embeds)})")
