"""Decisions made before a model is loaded: the device, its kernels, graphs, memory. No GPU is needed, because torch's
answers are replaced."""

from __future__ import annotations

import logging
from typing import get_args

import pytest
import torch

from mainspring.core.worker import backends as gpu
from mainspring.core.worker.backends import (
    backends_for,
    choose_backend,
    graph_sizes,
    pick_device,
    prepare_kernels,
    wait_for_memory,
)
from mainspring.ipc.config import AttentionBackend, DeviceConfig
from mainspring.ipc.errors import InvalidArgumentError
from mainspring.kernels import BackendUnavailableError
from mainspring.kernels.contract import AttentionSpec
from mainspring.kernels.flashinfer import flashinfer_backend as flashinfer
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from mainspring.kernels.registry import BACKENDS, Registration, automatic
from native_here import why_not

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SPEC = AttentionSpec(4, 2, 64, 64, 0.125)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, version: str | None = "13.0", says: str = "", count: int = 1) -> None:
    """Make torch behave as with a GPU; `says`: the error of its initialisation."""

    def init() -> None:
        if says:
            raise RuntimeError(says)

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(gpu, "_has_gpu", lambda: True)


@pytest.mark.parametrize(
    ("fake", "sentence"),
    [
        (
            {"version": None},
            rf"this torch, {torch.__version__.replace('+', '.')}, was built for CPUs: install its CUDA",
        ),
        ({"says": "Found no NVIDIA driver on your system.\nmore"}, r"no NVIDIA driver answers: install it.*Found no"),
        (
            {"says": "The NVIDIA driver on your system is too old (found version 11040)."},
            r"the NVIDIA driver is too old for CUDA 13.0: install a newer one \(.*found version 11040",
        ),
        ({"count": 0}, r"the NVIDIA driver shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"),
    ],
    ids=["torch for CPUs", "no driver", "old driver", "no GPU shown"],
)
def test_a_gpu_that_cannot_be_used_is_an_error_if_asked_for_and_a_warning_if_not(
    fake: dict[str, object], sentence: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda(monkeypatch, **fake)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=f"device is 'cuda', but {sentence}"):
        pick_device("cuda")
    with caplog.at_level(logging.WARNING):
        assert pick_device("auto") == CPU
    assert "there is a GPU, but" in caplog.text


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    assert pick_device("auto") == pick_device("cuda") == CUDA
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert pick_device("cpu") == CPU


def test_without_a_gpu_it_is_the_cpu_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert pick_device("auto") == CPU
    assert caplog.text == ""
    assert choose_backend(DeviceConfig(deterministic=True), CPU).name == ("reference" if why_not() else "native")


def test_where_flashinfer_is_missing_the_reference_runs_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*args: object) -> None:
        raise BackendUnavailableError("FlashInfer is not installed: pip install x")

    monkeypatch.setattr(flashinfer, "FlashInferBackend", unavailable)
    with caplog.at_level(logging.WARNING):
        assert choose_backend(DeviceConfig(), CUDA).name == "reference"
    assert "FlashInfer is not installed: pip install x; until then the reference kernels run" in caplog.text
    for options in (DeviceConfig(attention_backend="flashinfer"), DeviceConfig(deterministic=True)):
        with pytest.raises(InvalidArgumentError, match="FlashInfer is not installed"):
            choose_backend(options, CUDA)
    with pytest.raises(InvalidArgumentError, match="deterministic on a GPU needs"):
        choose_backend(DeviceConfig(attention_backend="reference", deterministic=True), CUDA)


class Choosy(ReferenceBackend):
    def refuses(self, spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        return "heads of 512 has no kernel" if spec.key_dim == 512 else None


def test_what_a_backend_refuses_goes_to_the_reference_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    large = SPEC._replace(key_dim=512, value_dim=512)
    backend = Choosy(deterministic=False)
    with caplog.at_level(logging.WARNING):
        chosen = backends_for([SPEC, large, large, SPEC], backend, torch.bfloat16, torch.bfloat16, CUDA)
    assert [b is backend for b in chosen] == [True, False, False, True]
    assert len(caplog.records) == 1
    assert "attention with heads of 512 has no kernel: the reference kernels run it" in caplog.text
    backend.deterministic = True
    with pytest.raises(InvalidArgumentError, match="deterministic is set, and attention with heads of 512"):
        backends_for([large], backend, torch.bfloat16, torch.bfloat16, CUDA)
    on_cpu = backends_for([large, SPEC], backend, torch.bfloat16, torch.bfloat16, CPU)  # both exist there
    assert [b is backend for b in on_cpu] == [False, True]
    assert on_cpu[0].deterministic


def test_the_names_of_the_configuration_are_those_of_the_registry() -> None:
    assert set(get_args(AttentionBackend)) == {"auto", *BACKENDS}
    assert (automatic("cpu"), automatic("cuda"), automatic("tpu")) == ("native", "flashinfer", "reference")


def test_a_new_backend_is_one_entry(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def make(device: torch.device, deterministic: bool, kernels_dir: str | None) -> Choosy:
        if kernels_dir is None:
            raise BackendUnavailableError("set kernels_dir")
        return Choosy(deterministic)

    monkeypatch.setitem(BACKENDS, "flashinfer", Registration(make))
    monkeypatch.setitem(BACKENDS, "choosy", Registration(make, frozenset({"cuda"})))
    assert choose_backend(DeviceConfig(kernels_dir="here", deterministic=True), CUDA).deterministic
    assert type(choose_backend(DeviceConfig(kernels_dir="here"), CUDA)) is Choosy
    assert type(choose_backend(DeviceConfig(), CUDA)) is ReferenceBackend
    with pytest.raises(InvalidArgumentError, match="deterministic on a GPU needs attention_backend='choosy'"):
        choose_backend(DeviceConfig(attention_backend="reference", deterministic=True), CUDA)


def test_kernels_that_can_not_be_prepared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, prepared = Choosy(), []
    prepare_kernels(backend, "auto", [SPEC], torch.bfloat16)

    def prepare(*given: object) -> None:
        prepared.append(given)
        raise BackendUnavailableError("nvcc is missing")

    monkeypatch.setattr(backend, "prepare", prepare)
    with pytest.raises(InvalidArgumentError, match="nvcc is missing"):
        prepare_kernels(backend, "float16", [SPEC], torch.bfloat16)
    assert prepared == [([SPEC], torch.bfloat16, torch.float16)]


def test_graphs_are_for_gpus_and_sizes_end_at_the_number_of_seats() -> None:
    assert graph_sizes(DeviceConfig(), CPU, 256) == []
    assert graph_sizes(DeviceConfig(enforce_eager=True), CUDA, 256) == []
    assert graph_sizes(DeviceConfig(), CUDA, 5) == [1, 2, 4, 5]
    assert graph_sizes(DeviceConfig(), CUDA, 256)[-2:] == [224, 256]
    assert graph_sizes(DeviceConfig(), CUDA, 4096)[-1] == 512
    assert graph_sizes(DeviceConfig(cudagraph_capture_sizes=[64, 8, 8, 300]), CUDA, 256) == [8, 64]


def test_a_restart_waits_for_the_memory_of_the_dead_core_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter([1, 2, 5, 10])
    monkeypatch.setattr(gpu, "free_bytes", lambda device: next(free))
    wait_for_memory(CUDA, 10)
    assert next(free, None) is None
    monkeypatch.setattr(gpu, "free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(gpu, "MEMORY_WAIT_SECONDS", 0.0)
    wait_for_memory(CUDA, 2 << 30)
    assert "1.1 GB of the GPU are free, and the last core took 2.1 GB" in caplog.text
