"""LLMEngine: add, step, collect; threads, forked children, and a dead core.

Most tests use a `ScriptedClient` in place of a core, because it gives tokens at the time and in the order that a test
needs. Tests with a real core, in-process and in a separate process, are at the end and in test_llm.py.
"""

from __future__ import annotations

import ast
import gc
import inspect
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainspring import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from mainspring.demo import MODEL_PATH
from mainspring.engine import llm_engine
from mainspring.engine.text.tokenizer import load_tokenizer
from mainspring.ipc.codec import encode_value
from mainspring.ipc.config import ModelConfig
from mainspring.ipc.errors import (
    ConnectError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    ModelNotFoundError,
    NotSupportedError,
    WrongProcessError,
)
from mainspring.ipc.messages import AddRequest, Finished, ModelFacts, Outputs
from mainspring.ipc.tokenizer_files import digest_of, read_files
from stand_in_core import StandInOwner, stand_in
from wire import eventually

EOS = 2


class ScriptedClient:
    """A `CoreClient` whose outputs the test puts into a queue; None in it is a dead core."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model = ModelFacts(vocab_size=1024, hidden_size=4, max_model_len=64, dtype="float32", eos_token_ids=[EOS])
        self.added: list[AddRequest] = []
        self.tensors: list[Sequence[np.ndarray]] = []
        self.aborted: list[int] = []
        self.queue: queue.Queue[Outputs | None] = queue.Queue()
        self.closed = 0
        self.dead = False

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        if self.dead:
            raise EngineDeadError("the core is gone")
        self.added.append(request)
        self.tensors.append(tensors)

    def abort(self, handles: Sequence[int]) -> None:
        self.aborted += handles

    def get_outputs(self, timeout: float | None = None) -> Outputs | None:
        found = self.queue.get(timeout=20)
        if found is None:
            self.dead = True
            raise EngineDeadError("the core is gone")
        return found

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        return {"reset_prefix_cache": True}[method]

    def close(self) -> None:
        self.closed += 1

    def say(self, *tokens: tuple[int, int], finished: Sequence[Finished] = ()) -> None:
        self.queue.put(Outputs([handle for handle, _ in tokens], [token for _, token in tokens], finished=[*finished]))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMEngine]:
    monkeypatch.setattr(llm_engine, "make_client", lambda config, multiprocess: ScriptedClient(config))
    made = LLMEngine.from_engine_args(EngineArgs())
    yield made
    made.shutdown()


def core(engine: LLMEngine) -> ScriptedClient:
    assert isinstance(engine.engine_core, ScriptedClient)
    return engine.engine_core


GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_add_step_collect(engine: LLMEngine) -> None:
    assert engine.add_request("a", "hello", GREEDY) == "a"
    (sent,) = core(engine).added
    assert sent.prompt_token_ids == engine.get_tokenizer().encode("hello")
    core(engine).say((sent.handle, 50))
    core(engine).say((sent.handle, EOS), finished=[Finished(sent.handle, "stop", EOS)])
    (first,) = engine.step()
    assert (first.request_id, first.finished, engine.get_num_unfinished_requests()) == ("a", False, 1)
    (last,) = engine.step()
    assert (last.finished, last.outputs[0].token_ids) == (True, [50, EOS])
    assert not engine.has_unfinished_requests()


def test_with_nothing_in_flight_a_step_returns_at_once(engine: LLMEngine) -> None:
    assert engine.step() == []


def test_an_id_that_is_still_running_is_refused_and_free_again_after_its_end(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", GREEDY)
    with pytest.raises(DuplicateRequestError, match="'a' is still running"):
        engine.add_request("a", "hello", GREEDY)
    assert len(core(engine).added) == 1
    engine.abort_request("a")
    engine.add_request("a", "hello", GREEDY)
    assert len({message.handle for message in core(engine).added}) == 2, "handles are never used twice"


def test_a_refused_request_leaves_nothing_behind(engine: LLMEngine) -> None:
    for prompt, params in (("", GREEDY), ([5000], GREEDY), ([1] * 64, GREEDY), ("x", None)):
        with pytest.raises(InvalidRequestError):
            engine.add_request("a", prompt, params)
    assert not engine.has_unfinished_requests()
    assert core(engine).added == []


def test_an_abort_gives_a_last_output_at_once_and_unknown_ids_are_ignored(engine: LLMEngine) -> None:
    for name in ("a", "b", "7"):
        engine.add_request(name, "hello", GREEDY)
    engine.abort_request("a")
    engine.abort_request(("b", "nobody", 7))
    engine.abort_request(["a"])
    assert core(engine).aborted == [message.handle for message in core(engine).added]
    assert engine.get_num_unfinished_requests() == 3
    outputs = engine.step()
    assert [(o.request_id, o.finished, o.outputs[0].finish_reason) for o in outputs] == [
        ("a", True, "abort"), ("b", True, "abort"), ("7", True, "abort")
    ]  # fmt: skip
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_a_stop_string_aborts_in_the_core_and_what_still_comes_is_dropped(engine: LLMEngine) -> None:
    engine.add_request("a", "x", SamplingParams(stop="b"))
    engine.add_request("b", "x", GREEDY)
    a, b = (message.handle for message in core(engine).added)
    token = engine.get_tokenizer().encode("b", add_special_tokens=False)[0]
    core(engine).say((a, token), (b, 50))
    core(engine).say((a, 51), (b, 52), finished=[Finished(a, "abort")])
    first, second = engine.step()
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("stop", "b")
    assert core(engine).aborted == [a]
    assert [output.request_id for output in engine.step()] == [second.request_id]


def test_older_forms_reach_the_same_request(engine: LLMEngine) -> None:
    engine.add_request("0", None, GREEDY, [3, 4], 12.5)
    engine.add_request(1, prompt="shown", sampling_params=GREEDY, prompt_token_ids=[3, 4])  # type: ignore[arg-type]
    engine.add_request("2", inputs={"prompt_token_ids": [3, 4]}, params=GREEDY)
    engine.add_request("3", [3, 4], GREEDY, priority=5, prompt_text="shown")
    assert [message.prompt_token_ids for message in core(engine).added] == [[3, 4]] * 4
    assert [message.request_id for message in core(engine).added] == ["0", "1", "2", "3"]
    assert core(engine).added[3].priority == 5
    for message in core(engine).added:
        core(engine).say((message.handle, 50))
    outputs = [engine.step()[0] for _ in range(4)]
    assert [output.prompt for output in outputs] == [None, "shown", None, "shown"]
    assert outputs[0].metrics is not None
    assert outputs[0].metrics.arrival_time == 12.5


def test_a_prepared_request_is_taken_in_place_of_a_prompt(engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    prepared = engine.input_processor.process_inputs("own", "hello", GREEDY)
    assert engine.add_request("other", prepared) == "own"
    assert "'own'" in caplog.text
    assert core(engine).added[0].request_id == "own"


def test_embeddings_are_sent_as_a_tensor_with_every_completion(engine: LLMEngine) -> None:
    array = np.ones((3, 4), np.float32)
    engine.add_request("a", {"prompt_embeds": array}, SamplingParams(n=2))
    assert [message.prompt_token_ids for message in core(engine).added] == [[0, 0, 0]] * 2
    assert all(np.array_equal(tensors[0], array) for tensors in core(engine).tensors)
    core(engine).say((core(engine).added[0].handle, 50))
    assert engine.step()[0].prompt_token_ids is None


def test_parameters_of_the_caller_are_never_changed(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=None, stop="x")
    before = params.clone()
    engine.add_request("a", "hello", params)
    assert params == before


def test_a_dead_core_is_an_error_and_its_requests_are_forgotten(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", GREEDY)
    core(engine).queue.put(None)
    with pytest.raises(EngineDeadError):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    with pytest.raises(EngineDeadError):
        engine.add_request("b", "hello", GREEDY)
    assert not engine.has_unfinished_requests()


def test_a_request_of_which_only_a_part_could_be_sent_is_aborted(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = core(engine)

    def add_request(request: AddRequest, tensors: Sequence[np.ndarray] = ()) -> None:
        if len(client.added) == 2:
            raise KeyboardInterrupt
        client.added.append(request)

    monkeypatch.setattr(client, "add_request", add_request)
    with pytest.raises(KeyboardInterrupt):
        engine.add_request("a", "hello", SamplingParams(n=3))
    assert client.aborted == [1, 2, 3]
    assert not engine.has_unfinished_requests()


def test_another_thread_adds_and_aborts_while_one_waits_in_step(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", GREEDY)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(engine.step()))
    waiting.start()
    time.sleep(0.05)
    engine.add_request("b", "hello", GREEDY)
    engine.abort_request("a")
    assert engine.get_num_unfinished_requests() == 2
    assert waiting.is_alive()
    core(engine).say((core(engine).added[1].handle, 50))
    waiting.join(10)
    assert [output.request_id for output in found] == ["a", "b"]


def test_a_step_that_waited_for_another_threads_step_does_not_wait_for_nothing(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", GREEDY)
    handle = core(engine).added[0].handle
    found: queue.Queue[Any] = queue.Queue()
    threads = [threading.Thread(target=lambda: found.put(engine.step())) for _ in range(2)]
    for thread in threads:
        thread.start()
    core(engine).say((handle, 50), finished=[Finished(handle, "length")])
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert sorted(len(found.get()) for _ in threads) == [0, 1]


def test_every_method_raises_in_a_forked_child_and_the_parent_goes_on(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", GREEDY)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for act in (
            lambda: engine.add_request("b", "x", GREEDY),
            lambda: engine.abort_request("a"),
            engine.step,
            engine.reset_prefix_cache,
        ):
            try:
                act()
                said.append("nothing")
            except WrongProcessError:
                said.append("WrongProcessError")
            except BaseException as error:
                said.append(repr(error))
        engine.shutdown()
        said.append(str(core(engine).closed))
        os.write(write, " ".join(said).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1000).decode() == "WrongProcessError WrongProcessError WrongProcessError WrongProcessError 0"
    os.close(read)
    os.close(write)
    core(engine).say((core(engine).added[0].handle, 50))
    assert len(engine.step()) == 1


def test_shutdown_is_done_once_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_engine, "make_client", lambda config, multiprocess: ScriptedClient(config))
    with LLMEngine.from_engine_args(EngineArgs()) as engine:
        client = core(engine)
    engine.shutdown()
    assert client.closed == 1
    engine = LLMEngine(EngineArgs().create_engine_config())
    client, gone = core(engine), weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert client.closed == 1


def test_the_end_of_sequence_is_the_checkpoints_and_the_tokenizers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(llm_engine, "make_client", lambda config, multiprocess: ScriptedClient(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 10]}')
    with LLMEngine.from_engine_args(EngineArgs(generation_config=str(tmp_path))) as engine:
        engine.add_request("a", "hello", GREEDY)
        assert core(engine).added[0].sampling.stop_token_ids == [EOS, 9, 10]
    with LLMEngine.from_engine_args(EngineArgs(generation_config="none", skip_tokenizer_init=True)) as engine:
        engine.add_request("a", [5], GREEDY)
        assert core(engine).added[0].sampling.stop_token_ids == [EOS], "what the core says, where nobody else does"
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            engine.get_tokenizer()


def test_the_client_is_a_separate_process_unless_false_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def make(config: Any, multiprocess: bool) -> ScriptedClient:
        asked.append(multiprocess)
        return ScriptedClient(config)

    monkeypatch.setattr(llm_engine, "make_client", make)
    for enable in (None, True, False):
        LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=enable).shutdown()
    LLMEngine.from_vllm_config(EngineArgs().create_engine_config()).shutdown()
    assert asked == [True, True, False, True]


def test_arguments_whose_feature_does_not_exist_yet_are_refused_by_name() -> None:
    config = EngineArgs().create_engine_config()
    with pytest.raises(NotSupportedError, match="executor_class"):
        LLMEngine(config, executor_class=object)  # type: ignore[arg-type]


def test_signatures_begin_as_vllms_do() -> None:
    parameters = list(inspect.signature(LLMEngine.add_request).parameters)
    assert parameters[1:10] == [
        "request_id", "prompt", "params", "arrival_time", "lora_request", "tokenization_kwargs", "trace_headers",
        "priority", "prompt_text",
    ]  # fmt: skip
    parameters = list(inspect.signature(LLMEngine.__init__).parameters)
    assert parameters[1:7] == [
        "vllm_config", "executor_class", "log_stats", "aggregate_engine_logging", "usage_context", "stat_loggers",
    ]  # fmt: skip


def test_importing_a_frontend_brings_nothing_that_is_heavy() -> None:
    heavy = "numpy zmq jinja2 tokenizers prometheus_client opentelemetry safetensors tqdm".split()
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from mainspring import LLM, LLMEngine, AsyncLLMEngine, EngineArgs, SamplingParams\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "they are imported when an engine is made"


def test_every_public_name_is_there_and_listed() -> None:
    import mainspring

    for name in mainspring.__all__:
        assert getattr(mainspring, name) is not None
        assert name in dir(mainspring)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = mainspring.Nothing  # type: ignore[attr-defined]


def test_the_stub_for_type_checkers_names_what_is_there() -> None:
    import mainspring

    stub = ast.parse((Path(mainspring.__file__).parent / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {(node.module, one.asname) for node in imports for one in node.names} == {
        (module, name) for module, names in mainspring._MODULES.items() for name in names.split()
    }


# ------------------------------------------------------------------ with a real core

ONE_BY_ONE = SamplingParams(temperature=0.0, max_tokens=6, output_kind=RequestOutputKind.DELTA)


def run(engine: LLMEngine) -> dict[str, str]:
    found: dict[str, str] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = found.get(output.request_id, "") + output.outputs[0].text
    return found


@pytest.mark.parametrize("multiprocess", [True, False], ids=["own process", "in-process"])
def test_a_real_core_gives_the_same_text_alone_and_together(multiprocess: bool) -> None:
    prompts = [f"What is {at} plus {at + 1}?" for at in range(6)]
    with LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=multiprocess) as engine:
        assert engine.get_cache_config().num_gpu_blocks
        assert engine.get_model_config().max_model_len
        alone = {}
        for at, prompt in enumerate(prompts):
            engine.add_request(str(at), prompt, ONE_BY_ONE)
            alone |= run(engine)
        for at, prompt in enumerate(prompts):
            engine.add_request(str(at), prompt, ONE_BY_ONE)
        assert run(engine) == alone
        assert all(text.strip() for text in alone.values())
        assert engine.reset_prefix_cache() is True


@pytest.mark.slow
def test_a_killed_core_is_started_again_and_the_request_goes_on() -> None:
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    texts = []
    with LLMEngine.from_engine_args(EngineArgs()) as engine:
        for dies in (False, True):
            engine.add_request("a", "Tell me a long story.", params)
            beginning = engine.step()[0].outputs[0].text
            if dies:
                os.kill(core_pid(engine), signal.SIGKILL)
            texts.append(beginning + run(engine)["a"])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_core_that_may_not_be_started_again_is_an_engine_dead_error() -> None:
    with LLMEngine.from_engine_args(EngineArgs(max_restarts=0)) as engine:
        engine.add_request("a", "Tell me a long story.", SamplingParams(max_tokens=500, ignore_eos=True))
        engine.step()
        os.kill(core_pid(engine), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="max_restarts"):
            run(engine)
        assert engine.step() == []


def core_pid(engine: LLMEngine) -> int:
    client: Any = engine.engine_core
    return client._connection._core.supervisor.core_pid


# ------------------------------------------------------------------ connected to a daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StandInOwner]:
    with stand_in(address=f"ipc://{tmp_path}/core.sock") as owner:
        yield owner


def test_a_connected_engine_adds_steps_and_collects(daemon: StandInOwner) -> None:
    with LLMEngine.connect(daemon.address, skip_tokenizer_init=True, name="mine", weight=3.0) as engine:
        assert eventually(lambda: daemon.core.sessions)  # the core is told after the frontend
        assert (daemon.core.sessions[-1][1], daemon.core.connected[-1][1]) == ("mine", 3.0)
        assert engine.vllm_config == daemon.core.config
        engine.add_request("a", [7], SamplingParams(max_tokens=5))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].outputs[0].token_ids == [7, 8, 9, 10, 11]
    assert engine.engine_core.error is not None


def test_a_connected_engine_gets_its_tokenizer_from_the_core(
    daemon: StandInOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_files(ModelConfig(model=str(MODEL_PATH)), None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    daemon.kill()
    daemon.restart(files_digest=digest_of(files))
    asked = []

    def call(method: str, args: object, *more: object) -> object:
        asked.append(method)
        return encode_value(files)

    monkeypatch.setattr(daemon.core, "call", call)
    for _ in range(2):
        with LLMEngine.connect(daemon.address) as engine:
            assert engine.get_tokenizer().encode("hello") == load_tokenizer(MODEL_PATH).encode("hello")
            assert engine.generation_config["do_sample"] is False
    assert asked == ["tokenizer_files"], "the second time they are in the cache"


def test_connecting_takes_another_tokenizer_or_says_what_is_missing(daemon: StandInOwner) -> None:
    with LLMEngine.connect(daemon.address, tokenizer=str(MODEL_PATH)) as engine:
        assert engine.get_tokenizer().encode("hello")
    for options, words in (
        ({}, "skip_tokenizer_init=True"),
        ({"tokenizer": "/no/such/folder"}, "'/no/such/folder'"),
    ):
        with pytest.raises(ModelNotFoundError, match=words):
            LLMEngine.connect(daemon.address, **options)
    while len(daemon.core.disconnected) < 3:  # no frontend is left connected
        time.sleep(0.01)
    with pytest.raises(InvalidArgumentError, match="tokenizer_mode is 'slow'"):
        LLMEngine.connect(daemon.address, tokenizer_mode="slow")
    with pytest.raises(ConnectError, match="no daemon answers"):
        LLMEngine.connect(daemon.address + ".not", connect_timeout=0.01)
