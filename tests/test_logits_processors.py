"""Logits processors that are classes: named by the configuration, imported and called in the core."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from daemons import PATIENCE_S, Daemon, short_folder
from kills import kill_core
from mainspring import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from mainspring.core.plan.step import NewSequence
from mainspring.core.worker.processors import ProcessedSequence, Processors, load_classes
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, RequestFailedError
from mainspring.ipc.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)
from mainspring.ipc.messages import AddRequest, Sampling
from mainspring.ipc.processor_names import MAX_EXTRA_ARGS_BYTES, names_of, packed, params_of, stay_here, unpacked

MODULE = '''
import os

from mainspring.ipc.logits_processors import AdapterLogitsProcessor

def chosen(logits, token):
    kept = logits[token].item()
    logits[:] = float("-inf")
    logits[token] = kept
    return logits

class Only(AdapterLogitsProcessor):
    """Leaves the token that the request names, or one that all tokens so far decide."""

    @classmethod
    def validate_params(cls, params):
        if (params.extra_args or {}).get("token", 0) < 0:
            raise ValueError("token is negative")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        given = params.extra_args or {}
        if given.get("chain"):
            return lambda prompt, output, logits: chosen(logits, chain(prompt, output))
        if given.get("pid"):
            return lambda output, logits: chosen(logits, os.getpid() // 300 ** len(output) % 300)
        if given.get("fail"):
            return lambda output, logits: 1 / (2 - len(output))
        token = given.get("token")
        return None if token is None else lambda output, logits: chosen(logits, token)

def chain(prompt, output):
    return (7 * sum(prompt) + 31 * sum(output) + len(output)) % 300

class Broken(Only):
    def __init__(self, vllm_config, device, is_pin_memory):
        raise OSError("no table")

class Lacking:
    def apply(self, logits):
        return logits
'''
PROMPT = [11, 12, 13]


def chained(count: int) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        output.append((7 * sum(PROMPT) + 31 * sum(output) + len(output)) % 300)
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """On this process's path, and not in the environment that cores inherit."""
    folder = tmp_path_factory.mktemp("processors")
    (folder / "my_processors.py").write_text(MODULE)
    (folder / "failing.py").write_text("1 / 0")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
    sys.modules.pop("my_processors", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.make("llama", tmp_path_factory.mktemp("model"), tokenizer=True))


def params(count: int = 4, **fields: Any) -> SamplingParams:
    args = {name: fields.pop(name) for name in ("token", "chain", "fail", "pid") if name in fields}
    return SamplingParams(max_tokens=count, ignore_eos=True, extra_args=args, **fields)


def finished(engine: LLMEngine) -> dict[str, Any]:
    found = {}
    while engine.has_unfinished_requests():
        found.update({output.request_id: output for output in engine.step()})
    return found


# ---------------------------------------------------------------------- the classes and what they see


def test_a_class_travels_as_the_name_under_which_it_is_imported(folder: Path) -> None:
    import my_processors  # type: ignore[import-not-found]

    names = names_of([my_processors.Only, "my_processors.Only", "a.b:C"])
    assert names == ["my_processors:Only", "my_processors.Only", "a.b:C"]
    assert load_classes(names[:2]) == [my_processors.Only] * 2
    assert EngineArgs(logits_processors=[my_processors.Only]).create_engine_config().model_config == (
        EngineArgs(logits_processors=["my_processors:Only"]).create_engine_config().model_config
    )
    assert not stay_here(names)
    assert stay_here([*names, "__main__:Only"])
    assert names_of(None) == []


def test_what_can_not_be_a_processor_is_refused(folder: Path) -> None:
    class Local(AdapterLogitsProcessor):
        pass

    for wrong in (int, lambda ids, logits: logits, 5):
        with pytest.raises(InvalidArgumentError, match="a class with update_state and apply"):
            names_of([wrong])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="top level"):
        names_of([Local])
    for given in ("my_processors:Only", 5):
        with pytest.raises(InvalidArgumentError, match="must be a list"):
            EngineArgs(logits_processors=given).create_engine_config()  # type: ignore[arg-type]
    for name, why in (
        ("nothing:There", "No module named 'nothing'"),
        ("my_processors:There", "no attribute 'There'"),
        ("There", "ValueError"),
        ("failing.There", "ZeroDivisionError"),
        ("__main__:There", "a class of a script"),
        ("my_processors:Lacking", "no class with update_state"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            load_classes([name])
    with pytest.raises(TypeError):
        LogitsProcessor(None, None, False)  # type: ignore[abstract]


def test_extra_args_travel_as_plain_data_of_a_limited_size() -> None:
    given = {"a": [1, 2.5, None, True], "b": {"c": "d"}}
    assert unpacked(packed(given)) == given
    assert packed({}) == packed(None) == b""
    with pytest.raises(InvalidRequestError, match="what can't go to the core"):
        packed({"a": object()})
    for wrong in (b"\x91\x01", b"\x81\x01\x02", b"\x81\xa1a", b"\x81\xa1\xff\x01", b"\x81\xa1a" + b"\x91" * 50_000):
        with pytest.raises(InvalidRequestError, match="are not a map"):
            unpacked(wrong)
    with pytest.raises(InvalidRequestError, match=f"the limit is {MAX_EXTRA_ARGS_BYTES}"):
        unpacked(packed({"a": "x" * MAX_EXTRA_ARGS_BYTES}))


def test_a_processor_sees_the_parameters_that_travel() -> None:
    sampling = Sampling(9, 5, 0.5, stop_token_ids=[2], logit_bias={4: 1.0}, logprobs=3, extra_args=packed({"a": 1}))
    found = params_of(sampling)
    assert (found.max_tokens, found.seed, found.temperature, found.n) == (9, 5, 0.5, 1)
    assert (found.stop_token_ids, found.logit_bias, found.logprobs, found.prompt_logprobs) == ([2], {4: 1.0}, 3, None)
    assert (found.extra_args, found.allowed_token_ids, found.bad_words) == ({"a": 1}, None, None)
    # any range that a client may send
    assert params_of(Sampling(1, presence_penalty=1e30)).presence_penalty == 1e30


class Recorder(LogitsProcessor):
    """Notes what it is told."""

    made = 0

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        Recorder.made += 1
        self.updates: list[BatchUpdate | None] = []
        self.output: list[int] = []
        self.outputs: list[list[int]] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        if batch_update is not None and batch_update.added:
            self.output = batch_update.added[0][3]

    def apply(self, logits: Any) -> Any:
        self.outputs.append(list(self.output))
        if 99 in self.output:
            raise ValueError("99")
        return logits + 1


def test_an_object_serves_one_request_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "made", 0)
    processors = Processors([f"{__name__}:Recorder"])
    from mainspring.ipc.config import EngineConfig

    processors.start(EngineConfig(), torch.device("cpu"))
    tokens = torch.tensor([0, 7, 8, 9]).int().numpy()
    sequence = NewSequence(3, tokens, 3, Sampling(9, extra_args=packed({"a": 1})), num_virtual=1)
    first, second = (ProcessedSequence(sequence, processors) for _ in range(2))
    assert first.apply([0, 7, 8, 9], torch.zeros(1, 4)).tolist() == [[1.0] * 4]
    first.apply([0, 7, 8, 9, 10], torch.zeros(1, 4))
    second.apply([0, 7, 8, 9], torch.zeros(1, 4))
    assert Recorder.made == 2, "one was made at the start, and two requests ran at once"
    first.release()
    again = ProcessedSequence(sequence, processors)
    again.apply([0, 7, 8], torch.zeros(1, 4))
    assert Recorder.made == 2
    [one] = again._objects or []
    assert isinstance(one, Recorder)
    added, nothing, removed, anew = one.updates
    assert nothing is None
    assert added is not None
    [(index, given, prompt, _)] = added.added
    assert (added.batch_size, index, given.extra_args, prompt) == (1, 0, {"a": 1}, [7, 8])
    assert removed == BatchUpdate(0, [0], [], [])
    assert anew is not None
    assert one.outputs == [[9], [9, 10], []], "the output with which a request came is there, and grows"
    with pytest.raises(ValueError, match="99"):
        again.apply([0, 7, 8, 99], torch.zeros(1, 4))
    again.release()
    ProcessedSequence(sequence, processors).apply([0, 7, 8], torch.zeros(1, 4))
    assert Recorder.made == 3, "an object that failed is not used again"


def test_the_state_of_a_batch_is_followed() -> None:
    states: dict[int, str] = {}
    params = [SamplingParams(max_tokens=number) for number in (1, 2, 3)]

    def state(given: SamplingParams, prompt: Any, output: list[int]) -> str | None:
        return None if given.max_tokens == 2 else f"{given.max_tokens} {prompt}"

    def update(**changes: Any) -> bool:
        return process_dict_updates(
            states, BatchUpdate(**{"batch_size": 3, "removed": [], "added": [], "moved": [], **changes}), state
        )

    assert not process_dict_updates(states, None, state)
    assert update(added=[(row, given, [row], []) for row, given in enumerate(params)])
    assert states == {0: "1 [0]", 2: "3 [2]"}
    assert update(moved=[(0, 2, MoveDirectionality.SWAP)])
    assert states == {2: "1 [0]", 0: "3 [2]"}
    assert update(moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert states == {0: "1 [0]"}
    assert update(removed=[0])
    assert not states
    assert not update(removed=[0])


# ---------------------------------------------------------------------- in the core


@pytest.fixture(scope="module")
def here(model: str, folder: Path) -> Iterator[LLMEngine]:
    args = EngineArgs(model, logits_processors=["my_processors:Only"], speculative_config={"method": "ngram"})
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        yield engine


def test_requests_of_one_batch_are_treated_apart(here: LLMEngine) -> None:
    here.add_request("five", PROMPT, params(token=5))
    here.add_request("chain", PROMPT, params(30, chain=True, temperature=0.0))
    here.add_request("two", PROMPT, params(n=2, chain=True))
    here.add_request("virtual", "text", params(token=9, logit_bias={9: -5.0}))
    here.add_request("fails", PROMPT, params(fail=True))
    found = finished(here)
    assert list(found["five"].outputs[0].token_ids) == [5] * 4
    assert list(found["chain"].outputs[0].token_ids) == chained(30)
    assert [list(one.token_ids) for one in found["two"].outputs] == [chained(4)] * 2
    assert list(found["virtual"].outputs[0].token_ids) == [9] * 4
    failed = found["fails"].outputs[0]
    assert (failed.finish_reason, len(failed.token_ids)) == ("error", 2)
    assert "a logits processor failed" in str(failed.stop_reason)


def test_a_request_that_a_class_refuses_ends_with_its_error(here: LLMEngine) -> None:
    here.add_request("refused", PROMPT, params(token=-1))
    here.add_request("odd", PROMPT, params(token="x"))
    found = finished(here)
    for name, why in (("refused", "Only refuses the parameters: token is negative"), ("odd", "not supported between")):
        assert found[name].outputs[0].finish_reason == "error"
        assert why in str(found[name].outputs[0].stop_reason)
    with pytest.raises(InvalidRequestError, match="extra_args"):
        here.add_request("object", PROMPT, params(token=object()))
    with pytest.raises(InvalidRequestError, match="extra_args"):
        here.add_request("long", PROMPT, params(token="x" * MAX_EXTRA_ARGS_BYTES))
    with pytest.raises(NotSupportedError, match="use_beam_search"):
        here.add_request("beams", PROMPT, params(use_beam_search=True, best_of=2, temperature=0.0))


def test_without_processors_extra_args_stay_with_the_frontend(model: str) -> None:
    with LLMEngine.from_engine_args(EngineArgs(model), enable_multiprocessing=False) as engine:
        request = engine.input_processor.process_inputs("a", PROMPT, params(token=object()))
        assert request.extra_args is None
        engine.add_request("a", request)
        assert len(finished(engine)["a"].outputs[0].token_ids) == 4


def test_a_class_that_is_not_there_keeps_the_core_from_starting(model: str, folder: Path) -> None:
    for name, why in (("nothing:There", "nothing"), ("my_processors:Broken", "OSError: no table")):
        args = EngineArgs(model, logits_processors=[name])
        with pytest.raises(InvalidArgumentError, match=why):
            LLMEngine.from_engine_args(args, enable_multiprocessing=False)


@pytest.mark.slow
def test_the_error_of_another_process_is_raised_here(model: str, folder: Path) -> None:
    for name, why in (("nothing:There", "No module named 'nothing'"), ("my_processors:Broken", "OSError: no table")):
        with pytest.raises(InvalidArgumentError, match=why):
            LLM(model, logits_processors=[name])


@pytest.mark.slow
def test_an_llm_lets_its_core_call_a_class(model: str, folder: Path) -> None:
    import my_processors

    free = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(model, logits_processors=[my_processors.Only]) as llm:
        assert not llm.llm_engine.engine_core.in_process
        prompts = ["One", "Two", "Three", "Four"]
        outputs = llm.generate(prompts, [params(token=5), params(token=9), free, params(4, pid=True)], use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in outputs[:2]] == [[5] * 4, [9] * 4]
        pid = sum(digit * 300**at for at, digit in enumerate(outputs[3].outputs[0].token_ids))
        supervisor = llm.llm_engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        assert pid == supervisor.core_pid != os.getpid()
        with pytest.raises(InvalidRequestError, match="prompt 1: Only refuses the parameters: token is negative"):
            llm.generate(["One", "Two"], [free, params(token=-1)], use_tqdm=False)
        with pytest.raises(RequestFailedError, match="a logits processor failed"):
            llm.generate("One", params(fail=True), use_tqdm=False)
    with LLM(model) as plain:
        expected = plain.generate("Three", free, use_tqdm=False)[0].outputs[0].token_ids
    assert outputs[2].outputs[0].token_ids == expected


@pytest.mark.slow
def test_after_a_kill_the_processors_go_on_where_they_were(model: str, folder: Path) -> None:
    args = EngineArgs(model, logits_processors=["my_processors:Only"])
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("chain", PROMPT, params(200, chain=True))
        engine.add_request("two", PROMPT, params(100, chain=True, n=2))
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        killed, found = False, {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = output
                if not killed and len(output.outputs[0].token_ids) > 20:
                    killed = True
                    kill_core(supervisor)
        assert supervisor.launch.restarts == 1
        assert list(found["chain"].outputs[0].token_ids) == chained(200)
        assert [list(one.token_ids) for one in found["two"].outputs] == [chained(100)] * 2


@pytest.mark.slow
def test_a_daemon_lets_all_its_frontends_use_its_classes(model: str, folder: Path) -> None:
    async def streamed(address: str) -> list[int]:
        engine = AsyncLLMEngine.connect(address)
        try:
            async for output in engine.generate(PROMPT, params(12, chain=True), "a"):
                last = output
        finally:
            engine.shutdown()
        return list(last.outputs[0].token_ids)

    with short_folder() as place:
        daemon = Daemon(place, "--model", model, "--logits-processors", "my_processors:Only", PYTHONPATH=str(folder))
        try:
            daemon.ready_line()
            assert asyncio.run(streamed(daemon.address)) == chained(12)
            with LLM(connect=daemon.address) as llm:
                assert llm.model_config.logits_processors == ["my_processors:Only"]
                output = llm.generate({"prompt_token_ids": PROMPT}, params(8, chain=True), use_tqdm=False)[0]
                assert list(output.outputs[0].token_ids) == chained(8)
                with pytest.raises(InvalidRequestError, match="token is negative"):
                    llm.generate("a", params(token=-1), use_tqdm=False)
            with pytest.raises(InvalidArgumentError, match="for the daemon to decide"):
                LLM(connect=daemon.address, logits_processors=["os:path"])
        finally:
            daemon.end()


@pytest.mark.slow
def test_an_async_engine_has_a_core_that_imports_the_classes(model: str, folder: Path) -> None:
    async def run() -> None:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model, logits_processors=["my_processors:Only"]))
        try:
            async for output in engine.generate(PROMPT, params(12, chain=True), "a"):
                last = output
            assert list(last.outputs[0].token_ids) == chained(12)
            with pytest.raises(InvalidRequestError, match="token is negative"):
                async for _ in engine.generate(PROMPT, params(token=-1), "b"):
                    pass
        finally:
            engine.shutdown()

    asyncio.run(run())


SCRIPT = """
import sys
from mainspring import LLM, LLMEngine, EngineArgs, SamplingParams
from my_processors import Only

class Mine(Only):
    pass

llm = LLM(sys.argv[1], logits_processors=[Mine])
assert llm.llm_engine.engine_core.in_process
output = llm.generate("One", SamplingParams(max_tokens=4, ignore_eos=True, extra_args={"token": 5}), use_tqdm=False)[0]
print(list(output.outputs[0].token_ids))
try:
    LLMEngine.from_engine_args(EngineArgs(sys.argv[1], logits_processors=[Mine]), enable_multiprocessing=True)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_class_of_a_script_without_a_main_guard_keeps_the_core_in_its_process(model: str, folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), model], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    tokens, error = done.stdout.splitlines()
    assert tokens == "[5, 5, 5, 5]"
    assert "names '__main__:Mine', which can't be imported: a class of a script needs a module of its own" in error


VLLM_MODULE = """
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

class Fifth(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        def only(output, logits):
            logits[:5] = logits[6:] = float("-inf")
            return logits

        return only
"""
VLLM_SCRIPT = """
import sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], logits_processors=["written_for_vllm:Fifth"])
print(list(llm.generate("One", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.mark.slow
def test_a_module_written_for_vllm_is_imported_where_that_name_is_known(model: str, folder: Path) -> None:
    (folder / "written_for_vllm.py").write_text(VLLM_MODULE)
    script = folder / "vllm_script.py"
    script.write_text(VLLM_SCRIPT)
    command = [sys.executable, "-P", "-m", "mainspring.compat.vllm", "--replace", str(script), model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.splitlines()[-1] == "[5, 5, 5, 5]"


def test_a_pooling_model_has_no_logits(tmp_path: Path, folder: Path) -> None:
    import pooled

    place = pooled.make("bert", tmp_path / "bert")
    args = EngineArgs(str(place), logits_processors=["my_processors:Only"], skip_tokenizer_init=True)
    with pytest.raises(InvalidArgumentError, match="a pooling model"):
        LLMEngine.from_engine_args(args, enable_multiprocessing=False)


def test_a_foreign_client_can_not_send_more(here: LLMEngine) -> None:
    check = here.input_processor._request_check
    with pytest.raises(InvalidRequestError, match="are not a map"):
        check.check(AddRequest(1, "", [5], Sampling(1, extra_args=b"\xc1")))
