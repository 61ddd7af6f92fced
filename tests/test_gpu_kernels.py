"""GPU kernels, compiled on a machine without a GPU (`make gpu-kernels`; some minutes)."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from mainspring.kernels.flashinfer import prebuilt
from mainspring.kernels.flashinfer.prebuilt import Attention, KernelsError

pytestmark = [pytest.mark.gpu_kernels, pytest.mark.timeout(3600)]

FATBIN, MACHINE_CODE = 0xBA55ED50, 2  # magic number of nvcc's file in a library; kind of an entry in it


def architectures(library: Path) -> set[str]:
    """GPUs for which a library holds machine code: according to cuobjdump, else to the fatbin, without the suffix a."""
    if tool := shutil.which("cuobjdump"):
        listed = subprocess.run([tool, "--list-elf", library], capture_output=True, text=True, check=True).stdout
        return {word for line in listed.splitlines() for word in line.split(".") if word.startswith("sm_")}
    data, found = library.read_bytes(), set()
    start = data.find(struct.pack("<I", FATBIN))
    while start >= 0:
        header, size = struct.unpack_from("<HQ", data, start + 6)
        entry, end = start + header, start + header + size
        while entry < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
            if kind == MACHINE_CODE:
                found.add(f"sm_{struct.unpack_from('<I', data, entry + 28)[0]}")
            entry += header + size
        start = data.find(struct.pack("<I", FATBIN), end)
    return found


def test_decode_and_paged_prefill_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    try:
        prebuilt.find_nvcc()
        prebuilt.require_flashinfer()
    except KernelsError as error:
        pytest.fail(str(error), pytrace=False)
    of_model = prebuilt.modules_needed
    monkeypatch.setattr(
        prebuilt, "modules_needed", lambda *given: of_model(*given)[-3:-1]
    )  # not the small ones, nor fa3
    folder, told = tmp_path / "kernels", []
    kind = Attention(torch.bfloat16, torch.bfloat16, 128)
    manifest = prebuilt.compile_ahead([kind], ["9.0a"], folder, told.append)
    assert [name.split("_with_")[0] for name in manifest.modules] == ["batch_decode", "batch_prefill"]
    assert [line.split(", ")[-1] for line in told if line.startswith("building")] == [
        "1 left after it",
        "0 left after it",
    ]
    for name in manifest.modules:
        library = folder / name / f"{name}.so"
        assert architectures(library) in ({"sm_90a"}, {"sm_90"})
        if readelf := shutil.which("readelf"):
            needed = subprocess.run([readelf, "-d", library], capture_output=True, text=True, check=True).stdout
            assert "libcuda.so.1" in needed
            assert "libcudart.so." in needed
    assert prebuilt.read_manifest(folder) == manifest
    assert prebuilt.compile_ahead([kind], ["9.0a"], folder, told.append) == manifest
    assert "0 modules to build" in told[-1]


def test_attention_over_latents_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    of_model = prebuilt.modules_needed
    monkeypatch.setattr(prebuilt, "modules_needed", lambda *given: of_model(*given)[-2:])
    folder = tmp_path / "kernels"
    kind = Attention(torch.bfloat16, torch.float8_e4m3fn, 512, latent=True)
    manifest = prebuilt.compile_ahead([kind], ["9.0a"], folder, lambda _: None)
    assert ["dtype_kv_e4m3" in name for name in manifest.modules] == [True, False]
    for name in manifest.modules:
        assert name.startswith("batch_mla_")
        assert architectures(folder / name / f"{name}.so") in ({"sm_90a"}, {"sm_90"})


def test_sums_over_gpus_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    of_model = prebuilt.modules_needed
    monkeypatch.setattr(prebuilt, "modules_needed", lambda *given: of_model(*given)[-1:])
    folder = tmp_path / "kernels"
    manifest = prebuilt.compile_ahead([], ["9.0a"], folder, lambda _: None, ranks=True)
    [name] = manifest.modules
    assert architectures(folder / name / f"{name}.so") in ({"sm_90a"}, {"sm_90"})
