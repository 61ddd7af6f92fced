"""Settings and fixtures for all tests: hypothesis prints how to repeat a failure, and no core process outlives the
session."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# Tests run in parallel and most models are tiny, so more OpenMP threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts background jobs with SIGINT ignored, and children inherit that. Tests of Ctrl-C need the handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("mainspring", deadline=None, print_blob=True)
settings.register_profile("quick", settings.get_profile("mainspring"), max_examples=10)
settings.register_profile("thorough", settings.get_profile("mainspring"), max_examples=1000)
settings.load_profile("mainspring")  # 100 examples; the option --hypothesis-profile replaces it

CORES_END_WITHIN_S = 5

# Tests of these files start processes, kill them or watch a clock. On a machine that others share one may fail for lack
# of time, so it runs a second time. The summary names it (RERUN): that is a fault to look for, in the test or behind it.
PROCESS_TESTS = {
    f"test_{name}.py"
    for name in (
        "adapters_recovery batch_files benchmarks blame chaos cli clients collective_rpc connection_limits "
        "curve daemon data_parallel engine_recovery health http_hostile http_recovery lifecycle "
        "media_processes media_safety node_client pipeline rank_gate ranks remote_ranks server sessions start "
        "supervisor tracing transport weight_transfer"
    ).split()
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in PROCESS_TESTS:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collections: torch and transformers add 0.3 s to each collection."""
    gc.collect()
    gc.freeze()


def _cores_left() -> list[psutil.Process]:
    """Core processes and media workers that this process, or a child of it, started."""
    cores = []
    for process in psutil.Process().children(recursive=True):
        try:
            if {"mainspring.core", "mainspring.media"} & set(process.cmdline()):
                cores.append(process)
        except psutil.Error:  # it ended meanwhile
            continue
    return cores


@pytest.fixture(scope="session", autouse=True)
def native_kernels() -> None:
    """Compile the native kernels before the first test, because a compilation could exceed a test's timeout."""
    from mainspring.kernels.native import build as native_build
    from native_here import why_not

    if why_not() is None:
        native_build.build(native_build.choose_level())


@pytest.fixture(scope="session", autouse=True)
def references_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> None:
    """One folder for the reference outputs of all pytest workers of a run."""
    import references

    base = tmp_path_factory.getbasetemp()
    references.folder = (base if worker_id == "master" else base.parent) / "references"
    references.folder.mkdir(exist_ok=True)


@pytest.fixture(scope="session", autouse=True)
def no_core_is_left_behind() -> Iterator[None]:
    """Fail if a core process is left. Set up first, so torn down last; under xdist the last test of a worker gets the
    error."""
    yield
    deadline = time.monotonic() + CORES_END_WITHIN_S
    while (left := _cores_left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left, f"core processes left behind: {left}"
