"""User code in the core: methods by name with every core, functions only with a core in the same process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mainspring import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, MainspringError, NotSupportedError
from tiers import fast_only

EXTENSION = '''
import time

class Extension:
    """Lent to the worker."""

    def count(self, *, prefix=""):
        named = lambda model: [p for name, p in model.named_parameters() if name.startswith(prefix)]
        return self.apply_model(lambda model: sum(p.numel() for p in named(model)))

    def echo(self, *args, **kwargs):
        return [self.rank, list(args), kwargs]

    def scale(self, name, factor):
        def change(model):
            model.get_parameter(name).data.mul_(factor)
        self.apply_model(change)

    def fail(self):
        raise ZeroDivisionError("by design")

    def handle(self):
        return object()

    def nap(self, seconds):
        time.sleep(seconds)

class Twice:
    def apply_model(self):
        pass

number = 7
'''


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("extension")
    (folder / "my_extension.py").write_text(EXTENSION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(str(folder))
        yield "my_extension.Extension"
    sys.modules.pop("my_extension", None)


@pytest.fixture(scope="module", params=fast_only([False], [False, True]), ids=["in-process", "multi-process"])
def engine(request: pytest.FixtureRequest, extension: str) -> Iterator[LLMEngine]:
    args = EngineArgs(worker_extension_cls=extension)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=request.param) as engine:
        yield engine


def text(engine: LLMEngine) -> str:
    engine.add_request("r", "The capital of France", SamplingParams(temperature=0.0, max_tokens=12))
    found = ""
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = output.outputs[0].text
    return found


def test_a_method_of_the_extension_runs_in_the_core(engine: LLMEngine) -> None:
    assert engine.collective_rpc("echo", args=(1, "two"), kwargs={"three": [3.0]}) == [
        [0, [1, "two"], {"three": [3.0]}]
    ]


def test_the_model_has_all_its_parameters_there(engine: LLMEngine) -> None:
    [count] = engine.collective_rpc("count")
    [norm] = engine.collective_rpc("count", kwargs={"prefix": "model.norm"})
    assert count > 100_000
    assert 0 < norm < count


def test_changes_of_a_method_to_the_model_are_kept(engine: LLMEngine) -> None:
    before = text(engine)
    engine.collective_rpc("scale", args=("model.layers.0.input_layernorm.weight", -3.0))
    engine.reset_prefix_cache()
    assert text(engine) != before
    engine.collective_rpc("scale", args=("model.layers.0.input_layernorm.weight", -1 / 3))
    engine.reset_prefix_cache()
    assert text(engine) == before


@pytest.mark.parametrize("method", ["missing", "_private", "__init__", "rank", ""])
def test_names_of_no_method_are_refused(engine: LLMEngine, method: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"the worker has no method .*; it has apply_model, count, echo"):
        engine.collective_rpc(method)


def test_an_exception_is_returned_and_the_core_goes_on(engine: LLMEngine) -> None:
    with pytest.raises((ZeroDivisionError, MainspringError), match="by design"):
        engine.collective_rpc("fail")
    assert text(engine)


@pytest.mark.slow
def test_without_an_extension_there_is_the_worker_alone() -> None:
    with LLM() as llm, pytest.raises(InvalidRequestError, match="no method 'echo'"):
        llm.collective_rpc("echo")


@pytest.mark.slow
def test_functions_and_objects_stay_in_the_process(extension: str) -> None:
    args = EngineArgs(worker_extension_cls=extension)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        assert engine.collective_rpc(lambda worker, x: (worker.rank, x), args=(object,)) == [(0, object)]
        [names] = engine.apply_model(lambda model: [name for name, p in model.named_parameters() if not p.numel()])
        assert names == [], "parameters are in their places, packed or not"
        before = text(engine)
        engine.apply_model(lambda model: model.get_parameter("model.layers.0.self_attn.o_proj.weight").data.neg_())
        engine.reset_prefix_cache()
        assert text(engine) != before
    with LLMEngine.from_engine_args(args) as engine:
        both = r"enable_multiprocessing=False.* worker_extension_cls"
        for call in (engine.apply_model, engine.collective_rpc):
            with pytest.raises(NotSupportedError, match=both):
                call(print)
        with pytest.raises(InvalidRequestError, match="collective_rpc hold what can't go to another process"):
            engine.collective_rpc("echo", args=(object(),))
        with pytest.raises(InvalidRequestError, match="the result of collective_rpc can't travel"):
            engine.collective_rpc("handle")
        with pytest.raises(TimeoutError, match="did not answer 'collective_rpc' within"):
            engine.collective_rpc("nap", timeout=0.05, args=(1.0,))
        assert text(engine)


OWN_PROCESS = ("nowhere.Class", "plain")  # the latter is a module that this process can import


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.Class", "not there"),
        ("my_extension.Missing", "not there"),
        ("my_extension.number", "must be a class"),
        ("my_extension.Twice", "'apply_model', which the worker has too"),
        ("plain", "not there"),
    ],
)
def test_an_extension_that_can_not_be_lent_is_refused_at_start(extension: str, name: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"worker_extension_cls.*{reason}"):
        LLMEngine.from_engine_args(EngineArgs(worker_extension_cls=name), enable_multiprocessing=name in OWN_PROCESS)


@pytest.mark.slow
def test_the_async_engine_calls_by_name(extension: str) -> None:
    async def run() -> None:
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs(worker_extension_cls=extension)) as engine:
            assert await engine.collective_rpc("echo", args=(1,)) == [[0, [1], {}]]
            function: Any = print
            with pytest.raises(NotSupportedError, match="worker_extension_cls"):
                await engine.collective_rpc(function)
            with pytest.raises(NotSupportedError, match="worker_extension_cls"):
                await engine.apply_model(function)

    asyncio.run(run())


@pytest.mark.slow
def test_a_folder_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="worker_extension_cls"):
        LLMEngine.from_engine_args(EngineArgs(worker_extension_cls=str(tmp_path)), enable_multiprocessing=False)
