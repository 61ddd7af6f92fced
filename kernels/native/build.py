"""The native kernels: a library that came with the wheel, or one that the machine's own compiler makes on first use.

A library is named by a digest of everything that shapes it. For one of a wheel these are the sources and the flags;
`ship` makes some for the common instruction sets. One that is made here also depends on the compiler's version and the
OpenMP runtime. It is kept, written beside its place and renamed; of two processes that want the same one, the second
waits for the first.

torch brings an OpenMP runtime of its own. A second one in the process would mean two teams of threads that fight for
the cores, so the objects are compiled for OpenMP and linked to the very file that torch has loaded: a library of a
wheel when it is loaded, because that file has another name in each version of torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch  # noqa: F401 -- loads its OpenMP runtime

from .. import BackendUnavailableError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent
SHIPPED = SOURCES / "shipped"  # libraries of a wheel
COMPILERS = ("c++", "g++", "clang++")  # after CXX
FLAGS = (
    "-std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math "
    # A product and a sum become one operation where the source says so and nowhere else: bits must not depend on how
    # the compiler unrolled a loop.
    "-ffp-contract=off"
).split()
OPENMP_RUNTIMES = ("libgomp", "libomp", "libiomp5")


def _flags(needs: Sequence[str]) -> tuple[str, ...]:
    return tuple("-m" + name.replace("_", "-" if name.startswith("amx") else "") for name in needs)


class Level(NamedTuple):
    """An instruction set the kernels are written for."""

    name: str
    needs: tuple[str, ...]  # as /proc/cpuinfo spells them
    flags: tuple[str, ...]  # of the compiler


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")
_WIDE = "-mprefer-vector-width=512"
_AMX = (*_AVX512_BF16, "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
_OPTIONAL = {"avx512": "avx512_vnni", "avx2": "avx_vnni"}  # used where they are, by levels whose names begin so
LEVELS = (
    Level("amx", _AMX, (*_flags(_AMX), _WIDE)),
    Level("avx512_bf16", _AVX512_BF16, (*_flags(_AVX512_BF16), _WIDE)),
    Level("avx512", _AVX512, (*_flags(_AVX512), _WIDE)),
    Level("avx2", _AVX2, _flags(_AVX2)),
    Level("neon_bf16", ("asimd", "i8mm", "bf16"), ("-march=armv8.2-a+i8mm+bf16",)),
    Level("neon", ("asimd",), ()),
)
"""The best of each kind of processor first."""
_SLOW_BF16 = frozenset({"GenuineIntel", "avx512_fp16"})
"""Marks of processors that multiply bf16 in AVX-512 at half the speed of fp32, which is used there. They have AMX, but
not every system lets a process use it."""
_COMMON = (
    ("amx", ""),
    ("avx512_bf16", "avx512_vnni"),
    ("avx512", "avx512_vnni"),
    ("avx512", ""),
    ("avx2", "avx_vnni"),
    ("avx2", ""),
    ("neon_bf16", ""),
    ("neon", ""),
)
"""Levels that a wheel has libraries for, with an optional feature or without."""


class Compiler(NamedTuple):
    """A C++ compiler that answers."""

    command: tuple[str, ...]
    version: str  # the first line of what --version says


def load(level: str | None = None) -> ctypes.CDLL:
    """The native library, compiled first if need be. `level` names one of `LEVELS`; None: MAINSPRING_NATIVE_LEVEL, or
    the best this processor has.

    A compiler may be too old for the best level; then the best one that it can build is used.

    Raises:
        BackendUnavailableError: no compiler, a processor the kernels are not written for, or a failed build.
    """
    chosen = choose_level(level)
    try:
        return _load(build(chosen))
    except BackendUnavailableError as error:
        if level or os.environ.get("MAINSPRING_NATIVE_LEVEL"):
            raise
        for other in _by_speed()[1:]:
            with suppress(BackendUnavailableError):
                library = _load(build(other))
                logger.warning("the kernels for %s, which serve in place of %s: %s", other.name, chosen.name, error)
                return library
        raise


@functools.cache
def function(library: ctypes.CDLL, name: str, layout: str, result: Any = None) -> Callable[..., Any]:
    """A function of the library. It takes numbers and packs them into 64-bit words; `layout` is that of `struct`."""
    found = getattr(library, f"mainspring_{name}")
    found.argtypes, found.restype = [ctypes.c_char_p], result
    pack = struct.Struct(f"={layout}").pack
    return lambda *words: found(pack(*words))


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        if path.parent == SHIPPED:
            ctypes.CDLL(find_runtime(), ctypes.RTLD_GLOBAL)  # where its calls of OpenMP lead
        return ctypes.CDLL(str(path))
    except OSError as error:  # the file is damaged, or its file system is mounted with noexec
        raise BackendUnavailableError(
            f"the native kernels can't be loaded: {error}; remove it, or set MAINSPRING_CACHE to another folder"
        ) from error


def choose_level(name: str | None = None) -> Level:
    """The level of this name, or the best there is."""
    name = name or os.environ.get("MAINSPRING_NATIVE_LEVEL")
    named = [level for level in LEVELS if level.name == name]
    if name and not named:
        known = ", ".join(level.name for level in LEVELS)
        raise BackendUnavailableError(f"MAINSPRING_NATIVE_LEVEL is {name!r}; it must be one of {known}")
    if usable := _usable(named) if named else _by_speed():
        return usable[0]
    if named:
        missing = [flag for flag in named[0].needs if flag not in cpu_features()]
        raise BackendUnavailableError(
            f"the native level {name} needs {', '.join(missing)}; this processor has not"
            if missing
            else f"the native level {name} needs registers that the system does not allow"
        )
    raise BackendUnavailableError(
        "the native kernels need a processor with AVX2 and FMA, or with NEON, on Linux; this is "
        f"{platform.machine()} on {platform.system()}"
    )


def _usable(levels: Sequence[Level] = LEVELS) -> list[Level]:
    """Those of `levels` that this processor can run and its system allows."""
    return [
        level for level in levels if cpu_features().issuperset(level.needs) and (level.name != "amx" or _allow_tiles())
    ]


def _by_speed() -> list[Level]:
    """The usable levels, the fastest first."""
    slow = "avx512_bf16" if cpu_features() >= _SLOW_BF16 else ""
    return sorted(_usable(), key=lambda level: level.name == slow)


@functools.cache
def _allow_tiles() -> bool:
    """Ask the system for AMX's registers, for all threads of this process. An old kernel has no such call, and a
    sandbox may refuse it."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


@functools.cache
def cpu_features() -> frozenset[str]:
    """What /proc/cpuinfo lists, and whose processor it is; empty where there is none."""
    lines = [line for line in _lines_of("/proc/cpuinfo") if line.startswith(("flags", "Features", "vendor_id"))]
    return frozenset(word for line in lines for word in line.partition(":")[2].split())


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


@functools.cache
def find_compiler() -> Compiler:
    """CXX, or the first of `COMPILERS` that answers.

    Raises:
        BackendUnavailableError: none does.
    """
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [[name] for name in COMPILERS]:
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(tuple(command), done.stdout.partition("\n")[0])
    tried = f"CXX is {named!r}, which does not run" if named else f"none of {', '.join(COMPILERS)} is on the PATH"
    raise BackendUnavailableError(f"the native kernels need a C++17 compiler, and {tried}; install g++ or set CXX")


def openmp_runtimes() -> list[str]:
    """The OpenMP runtimes mapped into this process; torch brings one. Empty where there is no /proc."""
    lines = _lines_of("/proc/self/maps")
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(OPENMP_RUNTIMES))


def find_runtime() -> str:
    """The OpenMP runtime that torch has loaded.

    Raises:
        BackendUnavailableError: there is none, or a second one beside it.
    """
    runtimes = openmp_runtimes()
    if len(runtimes) != 1:
        found = " and ".join(runtimes) or "none"
        raise BackendUnavailableError(f"the native kernels need the one OpenMP runtime that torch brings, not {found}")
    return runtimes[0]


def cache_folder() -> Path:
    """Where libraries are kept: native/ in MAINSPRING_CACHE, else in mainspring/ of XDG_CACHE_HOME or ~/.cache.

    Raises:
        BackendUnavailableError: this user has no home.
    """
    if root := os.environ.get("MAINSPRING_CACHE"):
        return Path(root, "native")
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mainspring", "native")
    except RuntimeError as error:
        raise BackendUnavailableError("the native kernels need a folder: set MAINSPRING_CACHE to one") from error


def build(level: Level) -> Path:
    """The library of `level`: the wheel's, the one that was kept, or a new one, which takes seconds and says so in the
    log.

    Raises:
        BackendUnavailableError: it can't be built. The message ends with what the compiler said first.
    """
    flags = _flags_of(level, cpu_features())
    shipped = _shipped(level, flags)
    return shipped if shipped.exists() else _made(level, flags)


def _made(level: Level, flags: Sequence[str]) -> Path:
    """The library that was kept, or a new one. Raises as `build`."""
    compiler, runtime = find_compiler(), find_runtime()
    whole = _digest(flags, *compiler.command, compiler.version, runtime, shutil.which(compiler.command[0]) or "")
    path = cache_folder() / f"{level.name}-{whole}.so"
    start = time.perf_counter()
    try:
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # so that two processes don't do the same work
            if path.exists():
                return path
            logger.info("building the native kernels (%s) with %s; this happens once", level.name, compiler.version)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
                compile_library(compiler, flags, runtime, Path(folder) / path.name)
                (Path(folder) / path.name).replace(path)
    except OSError as e:
        raise BackendUnavailableError(f"the native kernels can't be kept in {path.parent}: {e}") from e
    logger.info("built the native kernels in %.1f s: %s", time.perf_counter() - start, path)
    return path


def ship(folder: Path) -> list[Path]:
    """Compile libraries for this kind of processor into `folder`, which is to be `SHIPPED` in a wheel.

    Raises:
        BackendUnavailableError: the compiler can't make one.
    """
    compiler, made = find_compiler(), []
    folder.mkdir(parents=True, exist_ok=True)
    levels = {level.name: level for level in LEVELS if ("asimd" in level.needs) == (platform.machine() == "aarch64")}
    for name, feature in _COMMON:
        if name in levels:
            flags = _flags_of(levels[name], {feature})
            made.append(folder / _shipped(levels[name], flags).name)
            with tempfile.TemporaryDirectory() as place:
                library = Path(place) / made[-1].name
                compile_library(compiler, (*flags, "-static-libstdc++", "-static-libgcc"), None, library)
                shutil.copy(library, folder)
    return made


def _flags_of(level: Level, features: Set[str]) -> tuple[str, ...]:
    optional = [name for start, name in _OPTIONAL.items() if level.name.startswith(start) and name in features]
    return *FLAGS, *level.flags, *_flags(optional)


def _shipped(level: Level, flags: Sequence[str]) -> Path:
    return SHIPPED / f"{level.name}-{_digest(flags)}.so"


def _digest(flags: Sequence[str], *more: str) -> str:
    """Names a library by what it is made from: the sources, flags and `more`."""
    hashed = hashlib.blake2b(digest_size=12)
    parts = [*more, *flags]
    for file in sorted([*SOURCES.glob("*.h"), *_translation_units()]):
        parts += [file.name, file.read_text()]
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part.encode())
    return hashed.hexdigest()


def compile_library(compiler: Compiler, flags: Sequence[str], runtime: str | None, library: Path) -> None:
    """Compile every source beside `library`, two at a time, and link them. runtime: of OpenMP; None: it is found when
    the library is loaded."""

    def object_of(source: Path) -> str:
        made = library.with_name(source.stem + ".o")
        _run([*compiler.command, *flags, "-c", str(source), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(object_of, _translation_units()))
    linked = [flag for flag in flags if flag.startswith("-static")] if runtime is None else [runtime]
    _run([*compiler.command, "-shared", "-o", str(library), *objects, *linked])


def _translation_units() -> list[Path]:
    return [file for file in sorted(SOURCES.glob("*.cpp")) if not file.stem.endswith(("_test", "_driver"))]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        raise BackendUnavailableError(f"the native kernels did not compile: {said.strip() or shlex.join(command)}")


if __name__ == "__main__":
    ship(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
