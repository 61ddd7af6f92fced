"""Kernels built ahead of time: the kernels a model needs, the content of a folder, and the messages if something is
missing.

Nothing is compiled here; `make gpu-kernels` does that. Tests that need FlashInfer are skipped if it is not installed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from mainspring import EngineArgs
from mainspring.cli.main import main
from mainspring.core.model.learn.attention_of_config import attention_of_config
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import InvalidArgumentError
from mainspring.kernels.contract import AttentionSpec
from mainspring.kernels.flashinfer import prebuilt
from mainspring.kernels.flashinfer.prebuilt import Attention, KernelsError, Manifest
from mainspring.tools import build_kernels
from tiers import EACH_ARCHITECTURE, fast_only

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HOPPER = Manifest("0.6.15", "13.0", ["9.0a"], {"page": 538_912, "sampling": 2_000_000})


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvcc that prints only its version and its GPUs."""
    path = tmp_path / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.88"\n'
        '[ "$1" = --list-gpu-code ] && printf "sm_52\\nsm_80\\nsm_90\\nsm_120\\n"\nexit 0\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return path


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The attributes of the package that are used."""
    env = SimpleNamespace(FLASHINFER_AOT_DIR=None, FLASHINFER_WORKSPACE_DIR=tmp_path / "workspace")
    package = SimpleNamespace(__version__="0.6.15", jit=SimpleNamespace(env=env))
    for variable in ("FLASHINFER_EXTRA_LDFLAGS", "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_CUDA_ARCH_LIST"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(prebuilt, "require_flashinfer", lambda: package)
    monkeypatch.setattr(prebuilt, "_target_archs", lambda: ["9.0a"])
    return package


def folder_with(manifest: Manifest, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest._asdict()))
    return folder


@pytest.mark.parametrize(
    ("dim", "size"), [(1, 64), (64, 64), (80, 128), (96, 128), (128, 128), (192, 256), (257, None)]
)
def test_heads_are_padded_to_the_next_size_there_is(dim: int, size: int | None) -> None:
    assert prebuilt.head_dim(dim) == size


def test_the_options_compiled_in_are_those_that_a_layer_needs() -> None:
    plain = AttentionSpec(32, 8, 128, 128, 0.1)
    assert prebuilt.attention_of(plain, BF16, BF16) == Attention(BF16, BF16, 128)
    assert prebuilt.attention_of(plain._replace(num_q_heads=8, scale=1.0), BF16, BF16) == Attention(BF16, BF16, 128)
    other = plain._replace(window=4096, softcap=50.0, key_dim=96, value_dim=96)
    assert prebuilt.attention_of(other, FP16, FP8) == Attention(FP16, FP8, 128, True, True)


def test_latents_have_one_kernel_in_which_shorter_ones_are_padded() -> None:
    latents = AttentionSpec(128, 1, 576, 512, 0.1, latent=True)
    want = Attention(BF16, FP8, 512, latent=True)
    assert prebuilt.attention_of(latents, BF16, FP8) == want
    assert prebuilt.attention_of(latents._replace(key_dim=288, value_dim=256), BF16, FP8) == want
    assert prebuilt.attention_of(latents._replace(key_dim=1088, value_dim=1024), BF16, BF16) is None


@pytest.mark.parametrize(
    ("change", "dtype", "kv_dtype"),
    [
        ({"key_dim": 320, "value_dim": 320}, BF16, BF16),
        ({"key_dim": 120}, BF16, BF16),  # keys and values of two sizes
        ({}, torch.float32, torch.float32),
        ({}, BF16, FP16),
    ],
)
def test_some_layers_have_no_kernels(change: dict[str, int], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    assert prebuilt.attention_of(AttentionSpec(8, 8, 128, 128, 0.1)._replace(**change), dtype, kv_dtype) is None


def test_the_folder_is_the_argument_else_the_environments_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAINSPRING_KERNELS", raising=False)
    assert prebuilt.kernels_folder(None) == Path("~/.cache/mainspring/kernels").expanduser()
    monkeypatch.setenv("MAINSPRING_KERNELS", "/kernels")
    assert prebuilt.kernels_folder(None) == Path("/kernels")
    assert prebuilt.kernels_folder("/mine") == Path("/mine")


def test_a_folder_that_fits_takes_the_place_of_flashinfers(tmp_path: Path, flashinfer: SimpleNamespace) -> None:
    assert prebuilt.use(str(folder_with(HOPPER, tmp_path))) == tmp_path
    assert tmp_path == flashinfer.jit.env.FLASHINFER_AOT_DIR


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (HOPPER._replace(flashinfer="0.6.14"), "FlashInfer 0.6.14, CUDA 13.0, for 9.0a, and this is FlashInfer 0.6.15"),
        (HOPPER._replace(archs=["8.0", "8.9"]), "for 8.0, 8.9, and this GPU is 9.0a"),
        (HOPPER._replace(cuda="12.8"), "CUDA 12.8, for 9.0a, and this torch is for CUDA 13.0"),
        (None, "holds no kernels"),
    ],
)
def test_a_folder_that_does_not_fit_is_not_used_with_a_warning(
    manifest: Manifest | None,
    words: str,
    tmp_path: Path,
    flashinfer: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if manifest is not None:
        folder_with(manifest, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert prebuilt.use(str(tmp_path)) is None
    assert words in caplog.text
    assert "mainspring kernels build" in caplog.text
    assert flashinfer.jit.env.FLASHINFER_AOT_DIR is None


@pytest.mark.usefixtures("flashinfer")
def test_a_missing_default_folder_gives_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MAINSPRING_KERNELS", str(tmp_path / "none"))
    assert prebuilt.use(None) is None
    assert not caplog.records


@pytest.mark.parametrize("text", ["", "[]", '{"flashinfer": "0.6.15"}', "null", '{"more": 1}'])
def test_a_damaged_manifest_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(KernelsError, match=r"manifest\.json is no manifest of kernels"):
        prebuilt.read_manifest(tmp_path)


def test_without_a_compiler_the_error_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/no/such")
    with pytest.raises(
        KernelsError, match="no compiler at /no/such/bin/nvcc: install the CUDA toolkit, or set CUDA_HOME"
    ):
        prebuilt.find_nvcc()


@pytest.mark.parametrize("arch", ["4.2", "5.2", "hopper", "90a", "9.0x"])
def test_a_gpu_the_compiler_does_not_know_is_refused_with_those_it_knows(arch: str, nvcc: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelsError, match=rf"arch is '{arch}'; .* knows 8\.0, 9\.0, 12\.0, as in 9\.0a"):
        prebuilt.compile_ahead([], [arch], tmp_path, print)


@pytest.mark.usefixtures("nvcc", "flashinfer")
def test_a_folder_of_other_kernels_is_not_added_to(tmp_path: Path) -> None:
    folder_with(HOPPER._replace(flashinfer="0.6.14"), tmp_path)
    with pytest.raises(KernelsError, match=r"holds kernels of FlashInfer 0\.6\.14.*not kernels of FlashInfer 0\.6\.15"):
        prebuilt.compile_ahead([], ["9.0a"], tmp_path, print)


class Module:
    """A stand-in for a JitSpec: compiled if its library exists."""

    def __init__(self, name: str, folder: Path, message: str = "") -> None:
        self.name, self._message = name, message
        self.jit_library_path = folder / f"{name}.so"

    @property
    def is_compiled(self) -> bool:
        return self.jit_library_path.exists()

    def build(self, verbose: bool) -> None:
        if self._message:
            raise RuntimeError(self._message)
        self.jit_library_path.write_bytes(b"code")


@pytest.mark.usefixtures("nvcc", "flashinfer")
def test_a_kernel_that_fails_to_compile_is_named_and_the_rest_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "prepare_compiler", lambda: None)
    modules = [
        Module("one", tmp_path),
        Module("two", tmp_path, "Ninja failed.\nx.cu:3: fatal error: no x.h\n"),
        Module("three", tmp_path),
    ]
    monkeypatch.setattr(prebuilt, "modules_needed", lambda *_: modules)
    folder, told = tmp_path / "kernels", []
    with pytest.raises(KernelsError, match="1 of 3 modules did not compile: two"):
        prebuilt.compile_ahead([], ["9.0a"], folder, told.append)
    assert "building one, 2 left after it" in told
    assert "  two did not compile: x.cu:3: fatal error: no x.h" in told
    assert (folder / "three" / "three.so").read_bytes() == b"code"
    assert prebuilt.read_manifest(folder) == HOPPER._replace(modules={"one": 4, "three": 4})


def test_missing_kernels_are_compiled_with_a_log_line_before_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "prepare_compiler", lambda: None)
    modules = [Module(name, tmp_path) for name in ("one", "two", "three")]
    modules[0].build(verbose=False)
    assert prebuilt.missing(modules) == modules[1:]
    prebuilt.compile_missing(modules)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "compiling two, 1 left after it",
        "compiling three, 0 left after it",
    ]
    assert not prebuilt.missing(modules)


@pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None, reason="no C++ compiler or ninja here"
)
@pytest.mark.usefixtures("nvcc")
def test_a_bare_compiler_is_helped_in_one_way_only(flashinfer: SimpleNamespace) -> None:
    """FlashInfer recompiles modules that were compiled with other flags."""
    prebuilt.prepare_compiler()
    flags = [os.environ["FLASHINFER_EXTRA_LDFLAGS"], os.environ["FLASHINFER_EXTRA_CUDAFLAGS"]]
    stubs = flashinfer.jit.env.FLASHINFER_WORKSPACE_DIR / "stubs"
    assert {path.name for path in stubs.iterdir()} == {"libcuda.so", "libcudart.so"}
    assert flags[0] == f"-L{stubs} -Wl,--no-as-needed -lcudart -lcuda"
    assert flags[1].endswith("nvidia/cu13/include")
    prebuilt.prepare_compiler()
    assert flags == [os.environ["FLASHINFER_EXTRA_LDFLAGS"], os.environ["FLASHINFER_EXTRA_CUDAFLAGS"]]


def test_list_tells_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_kernels.main(["list", str(folder_with(HOPPER, tmp_path))]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "page  9.0a  FlashInfer 0.6.15  CUDA 13.0  0.5 MB"
    assert out[-1] == f"2 modules, 2.5 MB in {tmp_path}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "/no/such"], "/no/such holds no kernels: mainspring kernels build makes them"),
        (["build", "--arch=9.0a", "--head-dim=300"], "head_dim is 300; it must be from 1 to 256"),
        (["build", "--arch=9.0a", "--model=x", "--window"], "leave out --head-dim, --window, --soft-cap, --latents"),
        (["build", "--arch=9.0a", "--model=/no/such/model"], "there is no folder '/no/such/model'"),
    ],
)
@pytest.mark.usefixtures("nvcc")
def test_errors_are_a_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_kernels.main(arguments) == 1
    assert words in capsys.readouterr().err


def test_options_make_one_kind_for_each_head_size_with_and_without_a_window(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(prebuilt, "compile_ahead", lambda *arguments: asked.append(arguments))
    options = "--dtype fp16 --head-dim 64 96 --window --soft-cap --kv-dtype fp8".split()
    assert build_kernels.main(["build", "--arch", "8.0", "9.0a", *options, "--output", str(tmp_path)]) == 0
    assert build_kernels.main(["build", "--arch", "9.0a"]) == 0
    assert build_kernels.main(["build", "--arch", "9.0a", "--latents"]) == 0
    assert build_kernels.main(["build", "--arch", "9.0a", "--ranks"]) == 0
    kinds, archs, folder, _, ranks = asked[0]
    assert not ranks
    assert asked[3][-1]
    assert kinds == [Attention(FP16, FP8, size, window, True) for size in (64, 128) for window in (False, True)]
    assert (archs, folder) == (["8.0", "9.0a"], tmp_path)
    assert asked[1][0] == [Attention(BF16, BF16, 128)]
    assert asked[2][0] == [Attention(BF16, BF16, 512, latent=True)]


@pytest.mark.usefixtures("nvcc")
def test_a_models_kernels_are_those_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.make("gemma2", tmp_path / "gemma2", head_dim=96)
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    asked: list[Any] = []
    monkeypatch.setattr(prebuilt, "compile_ahead", lambda *arguments: asked.append(arguments))
    assert build_kernels.main(["build", "--arch=9.0a", f"--model={path}", "--dtype=bf16"]) == 0
    assert set(asked[0][0]) == {Attention(BF16, BF16, 128, window, True) for window in (False, True)}
    assert build_kernels.main(["build", "--arch=9.0a", f"--model={path}"]) == 1, "an fp32 model has no kernels"


@pytest.mark.parametrize("architecture", EACH_ARCHITECTURE + fast_only(["deepseek_v3"], tiny.LATENT))
def test_without_weights_a_models_attention_is_what_it_is_with_them(architecture: str, tmp_path: Path) -> None:
    from mainspring.core.model.load.loader import load_model

    config = ModelConfig(model=str(tiny.make(architecture, tmp_path)))
    loaded = load_model(config, LoadConfig(), torch.device("cpu"))
    assert attention_of_config(config) == (loaded.layers, loaded.dtype)


def test_the_command_needs_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder_with(HOPPER, tmp_path)
    assert main(["kernels", "list", str(tmp_path)]) == 0
    assert "2 modules" in capfd.readouterr().out
    assert main(["kernels", "build"]) == 2
    assert "--arch" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"cudagraph_capture_sizes": [4, 0]}, "cudagraph_capture_sizes is 0; it must be at least 1"),
        ({"cudagraph_capture_sizes": 4}, "cudagraph_capture_sizes is 4; it must be a list of ints or None"),
        ({"async_scheduling": "yes"}, "async_scheduling is 'yes'; it must be True or False or None"),
        ({"attention_backend": "fa4"}, "must be one of 'auto', 'flashinfer', 'native', 'reference'"),
    ],
)
def test_settings_for_a_gpu_are_checked(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        EngineArgs(**setting).create_engine_config()


def test_flags_for_a_gpu_become_settings() -> None:
    import argparse

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    flags = "--cudagraph-capture-sizes 1,2,4 --no-async-scheduling --deterministic --enforce-eager --kernels-dir /k"
    config = EngineArgs.from_cli_args(parser.parse_args(flags.split())).create_engine_config()
    device = config.device_config
    assert (device.cudagraph_capture_sizes, device.deterministic, device.enforce_eager) == ([1, 2, 4], True, True)
    assert (device.kernels_dir, config.scheduler_config.async_scheduling) == ("/k", False)


NAMES = """
import os, sys, torch
from mainspring.kernels.flashinfer import prebuilt
from mainspring.kernels.flashinfer.prebuilt import Attention
kinds = [Attention(torch.bfloat16, torch.bfloat16, 128), Attention(torch.bfloat16, torch.float8_e4m3fn, 64, True, True)]
print(*[module.name for module in prebuilt.modules_needed([*kinds, kinds[0]])])
latents = Attention(torch.bfloat16, torch.float8_e4m3fn, 512, latent=True)
print(*[module.name for module in prebuilt.modules_needed([latents])][7:])
package = prebuilt.require_flashinfer()
package.jit.env.FLASHINFER_AOT_DIR = prebuilt.Path(sys.argv[1])
print(*[module.name for module in prebuilt.missing(prebuilt.modules_needed(kinds[:1]))])
"""


def test_modules_have_the_names_that_flashinfer_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a separate process, because FlashInfer reads its environment when it is imported."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "page.so").touch()
    done = subprocess.run(
        [sys.executable, "-P", "-c", NAMES, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names, of_latents, missing = (line.split() for line in done.stdout.splitlines()[-3:])
    assert names[:7] == "page norm rope sampling silu_and_mul gelu_and_mul gelu_tanh_and_mul".split()
    assert [(name.split("_with_")[0], name.endswith("_sm90")) for name in names[7:]] == [
        ("batch_decode", False),
        ("batch_prefill", False),
        ("batch_prefill", True),
        ("batch_decode", False),
        ("batch_prefill", False),
        ("batch_decode", False),
        ("batch_prefill", False),
        ("batch_prefill", True),
    ]
    assert [name for name in names if "dtype_kv_e4m3" in name and "head_dim_qk_64" in name] == names[10:12]
    assert all("use_swa_True" in name and "use_logits_cap_True" in name for name in names[10:])
    assert all("dtype_kv_bf16" in name for name in names[12:]), "for the trial run of loading"
    assert missing == names[1:10]
    assert [("dtype_kv_e4m3" in name, name.endswith("_sm90")) for name in of_latents] == [(True, True), (False, True)]
    assert all(name.startswith("batch_mla_") for name in of_latents)
