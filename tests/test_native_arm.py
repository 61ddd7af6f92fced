"""The native kernels for aarch64, compiled by a cross compiler and run under an emulator (Debian:
g++-aarch64-linux-gnu, qemu-user). Their vectors are as wide as those of AVX2, and each operation rounds as there, so
the bits are the same."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mainspring.kernels.native import build as native_build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NOT_HERE = ("-O3", "-fopenmp", "-fPIC")
FLAGS = [*(flag for flag in native_build.FLAGS if flag not in NOT_HERE), "-O1", "-static", "-pthread"]
ARM = [level.name for level in native_build.LEVELS if "asimd" in level.needs]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"{COMPILER} is not installed"),
    pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"{EMULATOR} is not installed"),
]


def flags_of(level: str) -> tuple[str, ...]:
    (found,) = [one for one in native_build.LEVELS if one.name == level]
    return found.flags


def run(command: Sequence[str | Path]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def driver(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> Path:
    """The program that runs every kernel."""
    folder.mkdir()
    build = [*compiler, *FLAGS, *flags, "-DMAINSPRING_STD_THREADS"]
    names = ["native_driver", "decoder", "products", "weights"]
    with ThreadPoolExecutor(2) as pool:
        sources = [[*build, "-c", native_build.SOURCES / f"{name}.cpp", "-o", folder / f"{name}.o"] for name in names]
        list(pool.map(run, sources))
    run([*build, *(folder / f"{name}.o" for name in names), "-o", folder / "driver"])
    return folder / "driver"


@pytest.mark.skipif("avx2" not in native_build.cpu_features(), reason="this processor has no AVX2 to compare with")
def test_every_kernel_gives_the_bits_of_avx2(tmp_path: Path) -> None:
    compiler = native_build.find_compiler().command
    expected = run([driver(compiler, flags_of("avx2"), tmp_path / "avx2")])
    assert expected.startswith("all kernels ran: ")
    assert run([EMULATOR, driver([COMPILER], flags_of("neon"), tmp_path / "neon")]) == expected


@pytest.mark.parametrize("level", ARM)
def test_products_of_any_shape_give_the_bits_of_plain_loops(level: str, tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "benchmarks" / "products.cpp"
    run([COMPILER, *FLAGS, *flags_of(level), source, "-o", tmp_path / "products"])
    assert run([EMULATOR, "-cpu", "max", tmp_path / "products"]).endswith("all passed\n")
