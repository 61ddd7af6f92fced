"""FlashInfer's kernels ahead of time: which a model needs, how they are built without a GPU, where they are found.

FlashInfer compiles a module when it is first asked for, unless its ahead-of-time folder holds ``NAME/NAME.so``. So a
folder of such files, with a manifest beside them that says what they were built for, takes that folder's place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sysconfig
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import BackendUnavailableError

if TYPE_CHECKING:
    import torch

    from ..contract import AttentionSpec

logger = logging.getLogger(__name__)

FLASHINFER = ("0.6.15", "0.7")  # from this version on, and before that one
HEAD_DIMS = (64, 128, 256)
OLDEST_ARCH = 75  # that FlashInfer knows
MANIFEST = "manifest.json"
Module = Any  # flashinfer.jit.JitSpec


class KernelsError(BackendUnavailableError):
    """Kernels can't be built, or not be used. The message is one sentence that says what to install or set."""


class Attention(NamedTuple):
    """What of an attention layer is compiled into its kernels."""

    dtype: torch.dtype  # of queries and outputs: 16 bits
    kv_dtype: torch.dtype
    head_dim: int  # one of HEAD_DIMS; of latents their DIM
    window: bool = False
    softcap: bool = False
    latent: bool = False


class Manifest(NamedTuple):
    """What the kernels of a folder were built for, and how large they are."""

    flashinfer: str
    cuda: str
    archs: list[str]
    modules: dict[str, int]  # name → bytes


def head_dim(dim: int) -> int | None:
    """The head size of the kernels that serve heads of `dim`, padded with zeros; None where there is none."""
    return next((size for size in HEAD_DIMS if size >= dim), None)


def attention_of(spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> Attention | None:
    """What kernels a layer needs; None where FlashInfer has none for it."""
    from . import latents

    if spec.bias is not None or dtype.itemsize != 2 or (kv_dtype != dtype and kv_dtype.itemsize != 1):
        return None
    if spec.latent:
        return (
            None if latents.refusal(spec, kv_dtype.itemsize) else Attention(dtype, kv_dtype, latents.DIM, latent=True)
        )
    size = head_dim(spec.key_dim)
    if size is None or spec.value_dim != spec.key_dim:
        return None
    return Attention(dtype, kv_dtype, size, spec.window is not None, spec.softcap is not None)


def require_flashinfer() -> Any:
    """The flashinfer package. Raises `KernelsError` where it is missing, or of a version this was not made for."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # not the one that is compiled as it runs
    scripts = sysconfig.get_path("scripts")  # where pip puts ninja, which an environment that is not active hides
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), scripts])
    try:
        import flashinfer
        import flashinfer.jit
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelsError(
            f"FlashInfer can't be imported ({error}): install it with pip install 'mainspring[gpu]'"
        ) from error
    first, beyond = FLASHINFER
    if not _numbers(first) <= _numbers(flashinfer.__version__) < _numbers(beyond):
        raise KernelsError(
            f"FlashInfer is {flashinfer.__version__}; install one from {first} on, but before {beyond}: "
            f"pip install 'mainspring[gpu]'"
        )
    return flashinfer


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def modules_needed(attentions: Iterable[Attention], ranks: bool = False) -> list[Module]:
    """FlashInfer's modules for these kinds of attention and for all around them, each once, quick ones first; with
    `ranks` also for sums over several GPUs.

    They are for the GPUs of this machine, or for those that ``FLASHINFER_CUDA_ARCH_LIST`` named when FlashInfer was
    imported.
    """
    import torch

    from . import latents

    jit = require_flashinfer().jit
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module
    from flashinfer.utils import is_fa3_backend_supported

    modules = [gen_page_module(), jit.norm.gen_norm_module(), gen_rope_module(), jit.sampling.gen_sampling_module()]
    modules += [jit.gen_act_and_mul_module(name) for name in ("silu", "gelu", "gelu_tanh")]
    if ranks:
        from flashinfer.jit.comm import gen_vllm_comm_module

        modules.append(gen_vllm_comm_module())
    archs = jit.core.current_compilation_context.TARGET_CUDA_ARCHS
    hopper = (9, "0a") in archs
    # Beside each kind the one that the trial run of loading needs: its cache has the dtype of the queries.
    for kind in dict.fromkeys(kind for a in attentions for kind in (a, a._replace(kv_dtype=a.dtype))):
        q, kv = kind.dtype, kind.kv_dtype
        if kind.latent:
            backends = [name for name, wanted in (("fa2", q == kv and len(archs) > hopper), ("fa3", hopper)) if wanted]
            of_latents = q, kv, q, torch.int32, latents.DIM, latents.SHARED, False
            modules += [jit.gen_batch_mla_module(name, *of_latents) for name in backends]
            continue
        common = (q, kv, q, torch.int32, kind.head_dim, kind.head_dim, 0, kind.window, kind.softcap)
        modules.append(jit.gen_batch_decode_module(*common))
        modules.append(jit.gen_batch_prefill_module("fa2", *common, False))
        if hopper and is_fa3_backend_supported(0, False, False, q, kv):
            modules.append(jit.gen_batch_prefill_module("fa3", *common, False))
    return modules


def missing(modules: Iterable[Module]) -> list[Module]:
    """Those that would be compiled when they are first used."""
    return [module for module in modules if not module.is_compiled]


def compile_missing(modules: Iterable[Module]) -> None:
    """Compile now what else would be at first use, with a line before each. Raises `KernelsError` where one fails."""
    todo = missing(modules)
    for left, module in zip(range(len(todo) - 1, -1, -1), todo, strict=True):
        logger.warning("compiling %s, %d left after it (ahead of time: mainspring kernels build)", module.name, left)
        _compile(module)


def compile_ahead(
    attentions: Iterable[Attention],
    archs: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
    ranks: bool = False,
) -> Manifest:
    """Compile what these kinds of attention need, for GPUs of `archs` (such as ``9.0a``), into `folder`; `ranks` as in
    `modules_needed`.

    What is there already stays. `say` is told of each module before it is built. To be called before anything imports
    FlashInfer. Raises `KernelsError`.
    """
    nvcc = find_nvcc()
    _check_archs(archs, nvcc)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(archs)
    version = require_flashinfer().__version__
    manifest = Manifest(version, cuda_version(nvcc), _target_archs(), {})
    if (found := read_manifest(folder)) is not None:
        if found[:3] != manifest[:3]:
            raise KernelsError(f"{folder} holds {_described(found)}, not {_described(manifest)}: give another folder")
        manifest = found
    needed = modules_needed(attentions, ranks)
    todo = [module for module in needed if module.name not in manifest.modules]
    say(f"{_described(manifest)}: {len(todo)} modules to build into {folder}, {len(needed) - len(todo)} are there")
    failed: list[str] = []
    for i, module in enumerate(todo):
        say(f"building {module.name}, {len(todo) - i - 1} left after it")
        began = time.monotonic()
        try:
            _compile(module)
        except KernelsError as error:
            say(f"  {error}")
            failed.append(module.name)
            continue
        place = folder / module.name / f"{module.name}.so"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module.jit_library_path, place.with_suffix(".new"))
        os.replace(place.with_suffix(".new"), place)
        manifest.modules[module.name] = place.stat().st_size
        _write_manifest(folder, manifest)
        say(f"  {place.stat().st_size / 1e6:.1f} MB in {time.monotonic() - began:.0f} s")
    if failed:
        raise KernelsError(f"{len(failed)} of {len(todo)} modules did not compile: {', '.join(failed)}")
    return manifest


def use(kernels_dir: str | None) -> Path | None:
    """Let FlashInfer take kernels from `kernels_dir`, or where that is None from the default folder; → the folder.

    Where what it holds does not fit, None, with a warning: kernels are then compiled here.

    Raises:
        KernelsError: FlashInfer is missing or of another version, or the folder's manifest can't be read.
    """
    import torch

    flashinfer = require_flashinfer()
    folder = kernels_folder(kernels_dir)
    manifest = read_manifest(folder)
    wrong = ""
    if manifest is None:
        wrong = f"{folder} holds no kernels" if kernels_dir else ""
    elif manifest.flashinfer != flashinfer.__version__:
        wrong = f"{folder} holds {_described(manifest)}, and this is FlashInfer {flashinfer.__version__}"
    elif lacking := set(_target_archs()) - set(manifest.archs):
        wrong = f"{folder} holds {_described(manifest)}, and this GPU is {', '.join(lacking)}"
    elif torch.version.cuda and manifest.cuda.split(".")[0] != torch.version.cuda.split(".")[0]:
        wrong = f"{folder} holds {_described(manifest)}, and this torch is for CUDA {torch.version.cuda}"
    if wrong:
        logger.warning("%s: build them again with mainspring kernels build", wrong)
    with suppress(KernelsError, OSError, subprocess.SubprocessError):  # nothing may have to be compiled
        prepare_compiler()
    if wrong or manifest is None:
        return None
    flashinfer.jit.env.FLASHINFER_AOT_DIR = folder
    return folder


def kernels_folder(kernels_dir: str | None) -> Path:
    """Where kernels are looked for."""
    folder = kernels_dir or os.environ.get("MAINSPRING_KERNELS") or "~/.cache/mainspring/kernels"
    return Path(folder).expanduser().absolute()


def read_manifest(folder: Path) -> Manifest | None:
    """What a folder holds; None where it holds no kernels. Raises `KernelsError` for a manifest that can't be read."""
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise KernelsError(f"{folder / MANIFEST} is no manifest of kernels ({error}): remove the folder") from error
    return manifest


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    new = folder / f"{MANIFEST}.new"
    new.write_text(json.dumps(manifest._asdict(), indent=1) + "\n")
    os.replace(new, folder / MANIFEST)


def _described(manifest: Manifest) -> str:
    return f"kernels of FlashInfer {manifest.flashinfer}, CUDA {manifest.cuda}, for {', '.join(manifest.archs)}"


def _target_archs() -> list[str]:
    """The GPUs that FlashInfer compiles for, in its own spelling: those of this machine, unless told otherwise."""
    from flashinfer.compilation_context import CompilationContext

    return [f"{major}.{minor}" for major, minor in sorted(CompilationContext().TARGET_CUDA_ARCHS)]


def find_nvcc() -> Path:
    """CUDA's compiler, where FlashInfer looks for it. Raises `KernelsError` where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = None if home else shutil.which("nvcc")
    nvcc = Path(found) if found else Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    if not nvcc.is_file():
        raise KernelsError(f"there is no compiler at {nvcc}: install the CUDA toolkit, or set CUDA_HOME to where it is")
    return nvcc


def cuda_version(nvcc: Path) -> str:
    found = re.search(r"release (\d+\.\d+)", _output_of(nvcc, "--version"))
    if found is None:
        raise KernelsError(f"{nvcc} does not tell its version: set CUDA_HOME to a CUDA toolkit")
    return found[1]


def _check_archs(archs: Sequence[str], nvcc: Path) -> None:
    known = sorted(map(int, re.findall(r"sm_(\d+)", _output_of(nvcc, "--list-gpu-code"))))
    known = known[bisect_left(known, OLDEST_ARCH) :]
    names = [f"{code // 10}.{code % 10}" for code in known]
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?", arch) or arch.rstrip("af") not in names:
            raise KernelsError(f"arch is {arch!r}; the compiler at {nvcc} knows {', '.join(names)}, as in 9.0a")


def _output_of(nvcc: Path, option: str) -> str:
    try:
        return subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise KernelsError(f"{nvcc} does not run ({error}): set CUDA_HOME to a CUDA toolkit") from error


def _compile(module: Module) -> None:
    prepare_compiler()
    try:
        module.build(verbose=False)
    except (RuntimeError, OSError) as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or str(error).splitlines()
        raise KernelsError(f"{module.name} did not compile: {lines[0].strip()}") from error


def prepare_compiler() -> None:
    """Let FlashInfer compile with a bare compiler, from now on: with other flags it would compile everything again.

    Headers that the toolkit lacks are taken from the packages that torch came with. Where the driver's library is
    absent, or the runtime's, an empty one of its name does: the real one is found by that name when a module is loaded,
    so both are noted even where nothing seems to need them. Raises `KernelsError` where a tool is missing.
    """
    cuda = cuda_version(find_nvcc()).split(".")[0]
    for tool in ("ninja", "c++"):
        if shutil.which(tool) is None:
            raise KernelsError(f"{tool} is missing, which compiles kernels: install it")
    stubs = require_flashinfer().jit.env.FLASHINFER_WORKSPACE_DIR / "stubs"
    for library, version in (("libcuda.so", "1"), ("libcudart.so", cuda)):
        if not (stubs / library).exists():
            stubs.mkdir(parents=True, exist_ok=True)
            new = stubs / f"{library}.{os.getpid()}"
            soname = f"-Wl,-soname,{library}.{version}"
            subprocess.run(["c++", "-shared", "-x", "c", os.devnull, "-o", new, soname], check=True)
            os.replace(new, stubs / library)
    headers = Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{cuda}" / "include"
    for variable, flags in (
        ("FLASHINFER_EXTRA_LDFLAGS", f"-L{stubs} -Wl,--no-as-needed -lcudart -lcuda"),
        ("FLASHINFER_EXTRA_CUDAFLAGS", f"-isystem {headers}"),
    ):
        if flags not in (before := os.environ.get(variable, "")):
            os.environ[variable] = f"{before} {flags}".strip()
