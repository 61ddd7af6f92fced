"""The slices of processor time that threads of a core ask for, as the kernel tells them."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mainspring import LLM
from mainspring.ipc.time_slices import SLICE_NS

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
LINUX = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2]) if sys.platform == "linux" else ()

pytestmark = pytest.mark.skipif(LINUX < (6, 12) or SCHED_GETATTR is None, reason="no slices that a process may choose")


def slice_of(thread: int) -> int:
    words = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR, thread, words, 48, 0) == 0
    slice_ns: int = struct.unpack("=IIQiIQQQ", words.raw)[5]
    return slice_ns


def test_threads_of_a_core_run_in_short_slices() -> None:
    with LLM(enforce_eager=True) as llm:
        pid = llm.llm_engine.engine_core._connection._core.supervisor.core_pid  # type: ignore[attr-defined]
        threads = [int(one.name) for one in Path(f"/proc/{pid}/task").iterdir()]
        assert len(threads) > 3  # those of the model, of libzmq and of the sockets
        assert {slice_of(one) for one in threads} == {SLICE_NS}
        assert slice_of(os.getpid()) != SLICE_NS  # nothing of the user's


def test_the_niceness_stays() -> None:
    code = "import os; from mainspring.ipc.time_slices import take_short_slices as take; os.nice(7); take()"
    done = subprocess.run([sys.executable, "-c", f"{code}; print(os.nice(0))"], capture_output=True, timeout=60)
    assert done.stdout.strip() == b"7", done.stderr
