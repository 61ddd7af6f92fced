"""Before a model is loaded: choose the device and the kernels, and wait for free device memory."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ...ipc.config import DeviceConfig
from ...ipc.errors import InvalidArgumentError
from ...kernels import BackendUnavailableError
from ...kernels.contract import AttentionSpec, Backend
from ...kernels.registry import BACKENDS, automatic, reference_on
from .kv_layout import cache_dtype

logger = logging.getLogger(__name__)

MEMORY_WAIT_SECONDS = 30.0  # seconds to wait at most until the driver has freed the GPU memory of a core that died
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def pick_device(name: str, rank: int = 0) -> torch.device:
    """The torch device for the option `device`. ``auto`` means a GPU if there is one. Each rank has a GPU of its own.

    Raises:
        InvalidArgumentError: the name asks for a GPU, and no GPU can be used; or there is none for this rank.
    """
    if name == "cpu" or (name == "auto" and not _has_gpu()):
        return torch.device("cpu")
    if torch.version.cuda is None:
        trouble = f"this torch, {torch.__version__}, was built for CPUs: install its CUDA build"
    else:
        trouble = _driver_trouble()
    if not trouble and rank >= torch.cuda.device_count():
        raise InvalidArgumentError(
            f"tensor_parallel_size times pipeline_parallel_size is {rank + 1} or more, which is more than the "
            f"{torch.cuda.device_count()} GPUs that there are"
        )
    if not trouble:
        return torch.device(name if ":" in name else f"cuda:{rank}")
    if name == "auto":
        logger.warning("there is a GPU, but %s; the model runs on the CPU", trouble)
        return torch.device("cpu")
    raise InvalidArgumentError(f"device is {name!r}, but {trouble}")


def _has_gpu() -> bool:
    return torch.cuda.is_available() or Path("/dev/nvidia0").exists()


def _driver_trouble() -> str:
    try:
        torch.cuda.init()
        found = torch.cuda.device_count()
        return "" if found else "the NVIDIA driver shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if "too old" in text:
            return f"the NVIDIA driver is too old for CUDA {torch.version.cuda}: install a newer one ({text})"
        return f"no NVIDIA driver answers: install it, and see that nvidia-smi runs ({text})"


def choose_backend(options: DeviceConfig, device: torch.device) -> Backend:
    """The kernels for `device`.

    Raises:
        InvalidArgumentError: the requested backend can't run here.
    """
    asked, on_gpu = options.attention_backend, device.type == "cuda"
    name = automatic(device.type) if asked == "auto" else asked
    try:
        backend = BACKENDS[name].make(device, options.deterministic, options.kernels_dir)
    except BackendUnavailableError as error:
        if asked != "auto" or (options.deterministic and on_gpu):
            raise InvalidArgumentError(str(error)) from error
        logger.warning("%s; until then the reference kernels run, many times slower", error)
        backend = reference_on(device)
    if options.deterministic and not backend.deterministic:
        raise InvalidArgumentError(f"deterministic on a GPU needs attention_backend={automatic(device.type)!r}")
    return backend


def backends_for(
    specs: Sequence[AttentionSpec],
    backend: Backend,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> list[Backend]:
    """The backend of each attention call: `backend`, or the reference kernels if `backend` refuses the call."""
    fallback = reference_on(device)
    reasons = {spec: backend.refuses(spec, dtype, kv_dtype) for spec in specs}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        if backend.deterministic and not fallback.deterministic:
            raise InvalidArgumentError(f"deterministic is set, and attention with {reason}")
        _warn_once(reason)
    return [fallback if reasons[spec] else backend for spec in specs]


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("attention with %s: the reference kernels run it, many times slower", reason)


def prepare_kernels(backend: Backend, kv_cache_dtype: str, specs: Sequence[AttentionSpec], dtype: torch.dtype) -> None:
    """Compile the kernels that the model needs and that are not built yet, so that no request has to wait for them.

    Args:
        kv_cache_dtype: see `cache_dtype`.

    Raises:
        InvalidArgumentError: the compilation fails.
    """
    try:
        backend.prepare(specs, dtype, cache_dtype(kv_cache_dtype, dtype))
    except BackendUnavailableError as error:
        raise InvalidArgumentError(str(error)) from error


def graph_sizes(options: DeviceConfig, device: torch.device, max_num_seqs: int) -> list[int]:
    """The batch sizes, in decoding requests, for which CUDA graphs are captured."""
    if device.type != "cuda" or options.enforce_eager:
        return []
    wanted = options.cudagraph_capture_sizes
    if wanted is None:
        return sorted({size for size in _SIZES if size < max_num_seqs} | {min(max_num_seqs, _SIZES[-1])})
    return sorted({size for size in wanted if size <= max_num_seqs})


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU; 0 for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def wait_for_memory(device: torch.device, needed: int) -> None:
    """Wait until `needed` bytes are free: the memory of a core that was killed may be in use for another moment."""
    until = time.monotonic() + MEMORY_WAIT_SECONDS
    while free_bytes(device) < needed:
        if time.monotonic() > until:
            logger.warning(
                "%.1f GB of the GPU are free, and the last core took %.1f GB", free_bytes(device) / 1e9, needed / 1e9
            )
            return
        time.sleep(0.1)
