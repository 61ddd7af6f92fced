"""Real core processes: after any end of a frontend no process or file is left; after any end of a core the frontend
gets the reason."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

import mainspring
from mainspring.ipc.config import CacheConfig, EngineConfig, ModelConfig, ServiceConfig
from mainspring.ipc.errors import EngineDeadError, EngineStartError, ModelNotFoundError, NotSupportedError
from mainspring.ipc.messages import AddRequest, Sampling
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import make_runtime_dir, remove_runtime_dir

MODEL = str(Path(mainspring.__path__[0]) / "demo" / "model")
PROMPTLY = 5.0  # seconds
STARTS_WITHIN = 120.0

FRONTEND = """
import os, sys
from mainspring.ipc.config import EngineConfig, ModelConfig
from mainspring.ipc.messages import AddRequest, Sampling
from mainspring.ipc.sync_client import SyncClient

client = SyncClient.launch(EngineConfig(model_config=ModelConfig(model=sys.argv[1])))
for handle in range(4):
    client.add_request(AddRequest(handle, "", [5, 6, 7], Sampling(4000)))
client.get_outputs()
print(client._connection._core.supervisor.core_pid, flush=True)
{then}
"""
GO_ON = "while True: client.get_outputs()"


def config(model: str = MODEL, **cache: int) -> EngineConfig:
    return EngineConfig(
        model_config=ModelConfig(model=model, max_model_len=4096),
        cache_config=CacheConfig(**cache),  # type: ignore[arg-type]
    )


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of sockets in this test, for this process and its children."""
    path = Path(tempfile.mkdtemp(prefix="ms", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def client(folder: Path) -> Iterator[SyncClient]:
    client = SyncClient.launch(config())
    yield client
    client.close()


def eventually(holds: Callable[[], bool], timeout: float = PROMPTLY) -> bool:
    deadline = time.monotonic() + timeout
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def is_gone(pid: int) -> bool:
    """A zombie counts as gone, because a process whose parent died stays one until the system reaps it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def cores_of(pid: int | None = None) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children() if "mainspring.core" in p.cmdline()]


def frontend(then: str) -> subprocess.Popen[str]:
    script = FRONTEND.format(then=then)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script, MODEL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# ---------------------------------------------------------------------- the frontend ends


@pytest.mark.parametrize(
    ("then", "sent", "code"),
    [
        pytest.param("", None, 0, id="normal exit", marks=pytest.mark.slow),
        pytest.param("raise RuntimeError('mine')", None, 1, id="exception", marks=pytest.mark.slow),
        pytest.param(GO_ON, signal.SIGINT, -signal.SIGINT, id="ctrl-c", marks=pytest.mark.slow),
        pytest.param(GO_ON, signal.SIGKILL, -signal.SIGKILL, id="kill -9"),
        pytest.param(GO_ON, signal.SIGTERM, -signal.SIGTERM, id="kill", marks=pytest.mark.slow),
        pytest.param("os._exit(3)", None, 3, id="os._exit", marks=pytest.mark.slow),
        pytest.param("os.abort()", None, -signal.SIGABRT, id="abort", marks=pytest.mark.slow),
    ],
)
def test_however_a_frontend_ends_no_process_and_no_socket_is_left(
    folder: Path, then: str, sent: signal.Signals | None, code: int
) -> None:
    with frontend(then) as process:
        assert process.stdout is not None
        core = int(process.stdout.readline())
        if then == GO_ON:  # otherwise the core may have ended
            assert os.getpgid(core) == core, "what the terminal sends is the frontend's to handle"
        if sent is signal.SIGINT:
            os.killpg(process.pid, sent)  # to the whole process group, as a terminal does
        elif sent is not None:
            process.send_signal(sent)
        _, errors = process.communicate(timeout=PROMPTLY)
    assert process.returncode == code
    assert eventually(lambda: is_gone(core))
    assert eventually(lambda: not list(folder.iterdir()))
    if sent is None and code == 0:
        assert errors == ""


@pytest.mark.parametrize(
    "delay", [0.05, pytest.param(0.5, marks=pytest.mark.slow), pytest.param(1.5, marks=pytest.mark.slow)]
)
def test_a_frontend_killed_while_its_core_loads_leaves_nothing_either(folder: Path, delay: float) -> None:
    with frontend(GO_ON) as process:
        assert eventually(lambda: bool(cores_of(process.pid)), STARTS_WITHIN)
        (core,) = cores_of(process.pid)
        time.sleep(delay)
        process.kill()
    assert eventually(lambda: is_gone(core.pid), 2 * PROMPTLY)
    assert eventually(lambda: not list(folder.iterdir()))


LOADS_UNTIL_ITS_FRONTEND_DIES = """
import sys
from pathlib import Path
import pytest
sys.path.append(sys.argv[1])
import stand_in_process
from mainspring.ipc.config import EngineConfig, ModelConfig
from mainspring.ipc.sync_client import SyncClient

order = Path(sys.argv[2], "order")
order.write_text("orphan")
stand_in_process.replace_cores(order.parent, pytest.MonkeyPatch())
SyncClient.launch(EngineConfig(model_config=ModelConfig(model=str(order))))
"""


def test_a_core_whose_report_finds_no_frontend_leaves_nothing_either(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", LOADS_UNTIL_ITS_FRONTEND_DIES, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command) as process:
        assert eventually(lambda: bool(psutil.Process(process.pid).children()), STARTS_WITHIN)
        (core,) = psutil.Process(process.pid).children()
        assert eventually(lambda: not (tmp_path / "order").exists(), STARTS_WITHIN)  # it loads
        process.kill()
    assert eventually(lambda: is_gone(core.pid), 2 * PROMPTLY)
    assert not list(folder.iterdir())


def test_a_folder_is_removed_by_whoever_ends_last(folder: Path) -> None:
    path = make_runtime_dir()
    Path(path, "core.sock").touch()
    os.rename(path, f"{path}.unused")  # by a thread whose process ends now
    remove_runtime_dir(path)
    assert not list(folder.iterdir())


KILLED_BY_ITS_FIRST_PROCESS = """
import os, signal, subprocess

class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = Popen
"""


def test_a_frontend_killed_as_soon_as_there_is_a_core_process_leaves_nothing_either(folder: Path) -> None:
    script = KILLED_BY_ITS_FIRST_PROCESS + FRONTEND.format(then="")
    ended = subprocess.run([sys.executable, "-P", "-c", script, MODEL], stdout=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGKILL
    assert eventually(lambda: not list(folder.iterdir()), STARTS_WITHIN)


@pytest.mark.slow
def test_a_frontend_and_its_core_terminated_together_leave_nothing(folder: Path) -> None:
    process = frontend(GO_ON)
    assert process.stdout is not None
    core = int(process.stdout.readline())
    for pid in (core, process.pid):
        os.kill(pid, signal.SIGTERM)
    process.wait(PROMPTLY)
    assert eventually(lambda: is_gone(core) and not list(folder.iterdir()))
    process.communicate()


@pytest.mark.slow
def test_another_core_takes_the_place_of_one_that_was_terminated(folder: Path) -> None:
    client = SyncClient.launch(config())
    for _ in range(2):
        (core,) = cores_of()
        core.terminate()
        assert eventually(lambda pid=core.pid: is_gone(pid))
        assert client.call("ping") is None
    client.close()
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_client_without_references_ends_its_core(folder: Path) -> None:
    client = SyncClient.launch(config())
    (core,) = cores_of()
    del client
    gc.collect()
    assert not psutil.pid_exists(core.pid), "not even a zombie"
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_only_this_user_may_enter_the_sockets_folder_and_closing_twice_leaves_no_folder_zombie_or_descriptor(
    folder: Path,
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    client = SyncClient.launch(config())
    (core,) = cores_of()
    (own,) = folder.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in own.iterdir()] == ["core.sock"]
    started = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - started < PROMPTLY
    assert not psutil.pid_exists(core.pid)
    assert not list(folder.iterdir())
    del client
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


# ---------------------------------------------------------------------- the core ends


@pytest.mark.slow
def test_a_core_that_may_not_start_again_is_reported_with_its_signal_to_all_waiting_calls(folder: Path) -> None:
    client = SyncClient.launch(msgspec.structs.replace(config(), service_config=ServiceConfig(max_restarts=0)))
    client.add_request(AddRequest(0, "", [5, 6, 7], Sampling(4000)))
    assert client.get_outputs(STARTS_WITHIN) is not None

    def read() -> None:
        while client.get_outputs(STARTS_WITHIN) is not None:
            pass

    with ThreadPoolExecutor() as pool:
        reading = [pool.submit(read), pool.submit(read)]
        (core,) = cores_of()
        core.kill()
        for reader in reading:
            with pytest.raises(
                EngineDeadError, match="the core ended by signal SIGKILL, after 0 restarts within 600 s"
            ):
                reader.result(STARTS_WITHIN)
    with pytest.raises(EngineDeadError, match="the limit is max_restarts, 0"):
        client.call("ping")
    client.close()


@pytest.mark.slow
def test_a_core_that_does_not_find_its_model_raises_its_own_error_here(folder: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelNotFoundError, match="/no/such/folder"):
        SyncClient.launch(config("/no/such/folder"))
    assert cores_of() == []
    assert not list(folder.iterdir())
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_core_that_is_killed_while_it_loads_is_an_error_that_names_the_signal(folder: Path) -> None:
    def kill() -> None:
        assert eventually(lambda: bool(cores_of()), STARTS_WITHIN)
        cores_of()[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineStartError, match="by signal SIGKILL while it started"):
        SyncClient.launch(config())
    killer.join()
    assert cores_of() == []
    assert not list(folder.iterdir())


def test_a_socket_path_too_long_for_the_kernel_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(ValueError, match="the limit is 107"):
        SyncClient.launch(config())
    assert not list(long.iterdir())
    assert cores_of() == []


# ---------------------------------------------------------------------- and between


def test_an_invalid_request_or_call_leaves_the_core_serving(client: SyncClient) -> None:
    """The core checks again what a frontend would have refused."""
    vocab, longest = client.model.vocab_size, client.model.max_model_len
    wrong = [
        AddRequest(0, "", [], Sampling(4)),
        AddRequest(1, "", [vocab], Sampling(4)),
        AddRequest(2, "", [-1], Sampling(4)),
        AddRequest(3, "", [5] * longest, Sampling(4)),
        AddRequest(4, "", [5], Sampling(0)),
        AddRequest(5, "", [5], Sampling(4, temperature=float("nan"))),
        AddRequest(6, "", [5], Sampling(4, temperature=-1.0)),
        AddRequest(7, "", [5], Sampling(4, top_p=0.0)),
        AddRequest(8, "", [5], Sampling(4, seed=2**63)),
        AddRequest(9, "", [5], Sampling(4, top_k=2**63)),
        AddRequest(10, "", [5], Sampling(4, min_tokens=2**63)),
        AddRequest(11, "", [5], Sampling(4, stop_token_ids=[2**60])),
        AddRequest(12, "", [2**40], Sampling(4)),
        AddRequest(13, "", [5], Sampling(2, min_tokens=1), output_token_ids=[6, 7]),
    ]
    for request in wrong:
        client.add_request(request)
    with pytest.raises(NotSupportedError, match="no method 'no_such_method'"):
        client.call("no_such_method")
    client.add_request(AddRequest(99, "", [5, 6, 7], Sampling(3, seed=-(2**63), temperature=1.0, top_k=2**61)))
    ended: dict[int, tuple[str, str]] = {}
    while len(ended) < len(wrong) + 1:
        outputs = client.get_outputs(STARTS_WITHIN)
        assert outputs is not None, ended
        ended |= {f.handle: (f.reason, f.error) for f in outputs.finished}
    assert ended.pop(99) == ("length", "")
    assert ended == {request.handle: ("error", "InvalidRequestError") for request in wrong}
    assert client.call("stats")[0] == 0


@pytest.mark.slow
def test_a_cache_too_small_for_one_request_is_an_error_that_says_what_to_change(folder: Path) -> None:
    with pytest.raises(MemoryError, match="set a smaller max_model_len or a larger kv_cache_memory_bytes"):
        SyncClient.launch(config(num_gpu_blocks_override=3))
