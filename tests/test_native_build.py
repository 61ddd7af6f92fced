"""The native kernels are built once, in seconds, by the machine's compiler; otherwise an error gives the reason."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mainspring.kernels import BackendUnavailableError
from mainspring.kernels.native import build as native_build
from mainspring.kernels.native.native_backend import NativeBackend
from native_here import why_not

REASON = why_not()
needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LEVELS = [level.name for level in native_build._usable()]
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    # It treats a masked store as a store to the whole vector, so it is used only for instruction sets without masked
    # stores.
    "thread": ("-fsanitize=thread",),
}


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one function in place of ours, and an empty cache."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
    )
    (folder / "answer_test.cpp").write_text("#error not part of the library\n")
    monkeypatch.setattr(native_build, "SOURCES", folder)
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))
    return folder


def cpu_with(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.delenv("MAINSPRING_NATIVE_LEVEL", raising=False)
    monkeypatch.setattr(native_build, "cpu_features", lambda: frozenset(flags))


def kept() -> list[Path]:
    """Files in the cache except locks, which must stay because another process may wait for one."""
    return [path for path in native_build.cache_folder().iterdir() if path.suffix != ".lock"]


def test_the_best_level_of_the_processor_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_allow_tiles", lambda: True)
    for level in native_build.LEVELS:
        cpu_with(monkeypatch, *level.needs, "sse2")
        assert native_build.choose_level() == level
    best, next_best = native_build.LEVELS[:2]
    cpu_with(monkeypatch, *best.needs)
    monkeypatch.setenv("MAINSPRING_NATIVE_LEVEL", "avx2")
    assert native_build.choose_level().name == "avx2"
    monkeypatch.delenv("MAINSPRING_NATIVE_LEVEL")
    monkeypatch.setattr(native_build, "_allow_tiles", lambda: False)
    assert native_build.choose_level() == next_best
    with pytest.raises(BackendUnavailableError, match="level amx needs registers that the system does not allow"):
        native_build.choose_level("amx")


def test_where_bf16_is_slower_than_fp32_it_is_used_only_if_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_allow_tiles", lambda: False)
    cpu_with(monkeypatch, *native_build.LEVELS[0].needs, "avx512_fp16", "GenuineIntel")
    assert native_build.choose_level().name == "avx512"
    assert native_build.choose_level("avx512_bf16").name == "avx512_bf16"
    cpu_with(monkeypatch, *native_build.LEVELS[0].needs, "avx512_fp16", "AuthenticAMD")
    assert native_build.choose_level().name == "avx512_bf16"


@needs_compiler
def test_with_a_compiler_too_old_for_the_best_level_the_next_is_used(
    tiny_sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_library = native_build.compile_library

    def old_compiler(compiler: native_build.Compiler, flags: Sequence[str], *rest: Any) -> None:
        if "-mamx-tile" in flags:
            raise BackendUnavailableError("unrecognized option '-mamx-tile'")
        compile_library(compiler, flags, *rest)

    monkeypatch.setattr(native_build, "compile_library", old_compiler)
    monkeypatch.setattr(native_build, "_allow_tiles", lambda: True)
    cpu_with(monkeypatch, *native_build.LEVELS[0].needs)
    assert native_build.load().answer() == 42
    assert "the kernels for avx512_bf16, which serve in place of amx: unrecognized option" in caplog.text
    with pytest.raises(BackendUnavailableError, match="unrecognized option"):
        native_build.load("amx")


def test_a_level_that_cannot_be_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_with(monkeypatch, "sse2")
    with pytest.raises(BackendUnavailableError, match="need a processor with AVX2 and FMA, or with NEON, on Linux"):
        native_build.choose_level()
    with pytest.raises(BackendUnavailableError, match=r"level avx2 needs avx2, fma, f16c, bmi2"):
        native_build.choose_level("avx2")
    with pytest.raises(BackendUnavailableError, match="'sse9'; it must be one of amx, avx512_bf16, avx512, avx2"):
        native_build.choose_level("sse9")


def test_without_a_compiler_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tiny_sources: Path) -> None:
    native_build.find_compiler.cache_clear()
    try:
        monkeypatch.setenv("CXX", "/nonexistent/c++")
        with pytest.raises(BackendUnavailableError, match=r"'/nonexistent/c\+\+', which does not run; install g\+\+"):
            native_build.find_compiler()
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(BackendUnavailableError, match=r"none of c\+\+, g\+\+, clang\+\+ is on the PATH"):
            native_build.find_compiler()
    finally:
        native_build.find_compiler.cache_clear()


@needs_compiler
def test_a_library_is_built_once_and_again_when_a_source_changes(
    tiny_sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=native_build.__name__)
    level = native_build.choose_level()
    path = native_build.build(level)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert re.search(r"building the native kernels \(\w+\) with .+; this happens once", caplog.text)
    assert re.search(r"built the native kernels in \d+\.\d s", caplog.text)
    assert native_build.build(level) == path
    assert caplog.text.count("building") == 1
    assert kept() == [path], "nothing is left beside it"
    (tiny_sources / "answer.h").write_text("#define ANSWER 43\n")
    changed = native_build.build(level)
    assert changed != path
    assert ctypes.CDLL(str(changed)).answer() == 43


@needs_compiler
def test_a_library_of_the_wheel_is_loaded_without_a_compiler_unless_the_sources_differ(
    tiny_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny_sources / "answer.cpp").write_text(
        '#include "answer.h"\n#include <omp.h>\n'
        'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER + omp_in_parallel(); }\n'
    )
    monkeypatch.setattr(native_build, "SHIPPED", tiny_sources / "shipped")
    made = native_build.ship(tiny_sources / "shipped")
    assert {path.name.rpartition("-")[0] for path in made} == {"amx", "avx512_bf16", "avx512", "avx2"}

    def no_compiler(*_: object) -> native_build.Compiler:
        raise BackendUnavailableError("no compiler")

    monkeypatch.setattr(native_build, "find_compiler", no_compiler)
    monkeypatch.setattr(native_build, "_allow_tiles", lambda: True)
    for level in (level for level in native_build.LEVELS if "avx2" in level.needs):
        cpu_with(monkeypatch, *level.needs, "avx512_vnni", "avx_vnni")
        path = native_build.build(native_build.choose_level())
        assert path in made
        assert path.name.startswith(f"{level.name}-")
    assert native_build._load(path).answer() == 42
    (tiny_sources / "answer.h").write_text("#define ANSWER 43\n")
    with pytest.raises(BackendUnavailableError, match="no compiler"):
        native_build.build(native_build.choose_level())


@needs_compiler
def test_a_source_that_does_not_compile_is_named(tiny_sources: Path) -> None:
    (tiny_sources / "answer.cpp").write_text("#error out of order\n")
    with pytest.raises(BackendUnavailableError, match=r"did not compile: .*answer\.cpp.*out of order"):
        native_build.build(native_build.choose_level())
    assert not kept()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_CACHE", "/proc/nowhere")
    with pytest.raises(BackendUnavailableError, match="can't be kept in /proc/nowhere/native"):
        native_build.build(native_build.choose_level())


@needs_compiler
def test_a_cache_that_cannot_be_looked_into_is_named(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a home that belongs to another user; the superuser gets this error for too long a name."""
    monkeypatch.setenv("MAINSPRING_CACHE", f"/tmp/{'x' * 300}")
    with pytest.raises(BackendUnavailableError, match=r"can't be kept in /tmp/x+/native: .*name too long"):
        native_build.build(native_build.choose_level())


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "avx2-0.so"
    damaged.write_bytes(b"")
    with pytest.raises(BackendUnavailableError, match=r"can't be loaded: .*avx2-0\.so: file too short; remove it"):
        native_build._load(damaged)


def test_the_cache_is_where_other_caches_of_the_user_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("MAINSPRING_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/mainspring")
    assert native_build.cache_folder() == Path("/var/cache/mainspring/mainspring/native")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert native_build.cache_folder() == Path("/home/me/.cache/mainspring/native")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(BackendUnavailableError, match="set MAINSPRING_CACHE"):
        native_build.cache_folder()


@pytest.mark.slow
@needs_compiler
def test_two_processes_may_build_at_once(tiny_sources: Path) -> None:
    code = f"""
from pathlib import Path
from mainspring.kernels.native import build as native_build
native_build.SOURCES = Path({str(tiny_sources)!r})
import ctypes
print(ctypes.CDLL(str(native_build.build(native_build.choose_level()))).answer())
"""
    both = [
        subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == ["42", "42"]
    assert len(kept()) == 1


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_agrees_with_the_best(level: str) -> None:
    best, other = NativeBackend(), NativeBackend(level)
    x = torch.randn(9, 700, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(best.act_and_mul(x, "gelu"), other.act_and_mul(x, "gelu"), rtol=1e-5, atol=1e-6)
    seeds, sampled = torch.arange(9), torch.ones(9, dtype=torch.bool)
    assert torch.equal(best.choose(x, seeds, seeds, sampled), other.choose(x, seeds, seeds, sampled))


@needs_compiler
@pytest.mark.skipif(shutil.which("objdump") is None or platform.machine() != "x86_64", reason="needs objdump on x86")
@pytest.mark.parametrize("level", LEVELS)
def test_every_tile_of_a_product_fetches_ahead(level: str) -> None:
    """gcc dropped all fetches of a library once, and a third of the speed with them; no result shows it."""
    library = native_build.build(native_build.choose_level(level))
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    ).stdout
    tiles = {
        name: "prefetch" in body
        for name, body in re.findall(r"^[0-9a-f]+ <([^\n]*)>:\n(.*?)(?=^$)", listing, re.MULTILINE | re.DOTALL)
        if re.search(r"\btile<[^(]*\(", name)
    }
    assert len(tiles) > 10
    assert [name for name, fetches in tiles.items() if not fetches] == []


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "level"),
    [("address", level) for level in LEVELS if level == LEVELS[0] or not level.startswith("avx512")]
    + [("thread", "avx2")],
)
def test_every_kernel_runs_under_sanitizers(sanitizer: str, level: str, tmp_path: Path) -> None:
    compiler, chosen = native_build.find_compiler(), native_build.choose_level(level)
    flags = [flag for flag in native_build.FLAGS if flag not in ("-O3", "-fopenmp")]
    build = [*compiler.command, *flags, *chosen.flags, *SANITIZERS[sanitizer], "-DMAINSPRING_STD_THREADS", "-O1"]
    build += ["-g1"]  # lines in reports; the places of variables, which -g adds, take most of the time
    names = ["native_driver", "decoder", "products", "weights"]  # the driver includes native.cpp
    with ThreadPoolExecutor(2) as pool:
        commands = [
            [*build, "-c", str(native_build.SOURCES / f"{name}.cpp"), "-o", str(tmp_path / f"{name}.o")]
            for name in names
        ]
        list(pool.map(lambda command: subprocess.run(command, check=True, timeout=280), commands))
    program = tmp_path / "driver"
    objects = [str(tmp_path / f"{name}.o") for name in names]
    subprocess.run([*build, "-pthread", *objects, "-o", str(program)], check=True, timeout=60)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout[:15]) == (0, "all kernels ran"), done.stderr[-3000:]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_products_of_any_shape_alone(level: str, tmp_path: Path) -> None:
    program, source = tmp_path / "products", Path(__file__).parents[1] / "benchmarks" / "products.cpp"
    command = [*native_build.find_compiler().command, "-std=c++17", "-O1", *native_build.choose_level(level).flags]
    subprocess.run([*command, "-pthread", str(source), "-o", str(program)], check=True, timeout=280)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("all passed\n")
