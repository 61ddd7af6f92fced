"""Errors of batches: what is known from the requests is raised before anything is computed, the rest at the end."""

from __future__ import annotations

import json
import pickle
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny
from mainspring import LLM, BeamSearchParams, LoRARequest, PromptAdapterRequest, SamplingParams, StructuredOutputsParams
from mainspring.core.loop import EngineCore
from mainspring.engine import llm_engine
from mainspring.engine.args import EngineArgs
from mainspring.ipc import codec
from mainspring.ipc.errors import (
    BY_NAME,
    InvalidArgumentError,
    InvalidRequestError,
    MainspringError,
    RequestFailedError,
    UnknownArgumentError,
    from_wire,
)
from mainspring.ipc.inproc_client import InprocClient
from mainspring.ipc.messages import Adapter, AddRequest, Finished, ModelFacts, Outputs, Pooled, Sampling
from mainspring.ipc.structured import MAX_SPEC_BYTES
from peft_folders import make_lora

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def formed(**form: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=4, structured_outputs=StructuredOutputsParams(**form))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as made:
        yield made


def computed(llm: LLM) -> int:
    return int(llm.llm_engine.engine_core.call("stats")[6])  # num_steps


BAD_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "(a"}, "regex can't be used"),
    ({"json": {"type": "array", "uniqueItems": True}}, "keys that are not supported: uniqueItems"),
    ({"json": {"type": "nothing"}}, "json can't be used"),
    ({"grammar": "start: missing"}, "unknown name"),
    ({"grammar": 'start: "' + "a" * (64 << 10) + '"'}, "the limit is 65536"),
    ({"structural_tag": json.dumps({"structures": [], "triggers": ["<"]})}, "structures"),
]


@pytest.mark.parametrize(("form", "why"), BAD_FORMS)
def test_a_form_that_can_not_be_is_raised_before_anything_is_computed(llm: LLM, form: dict[str, Any], why: str) -> None:
    before = computed(llm)
    params = [GREEDY, formed(choice=["a", "b"]), formed(**form), formed(**form)]
    with pytest.raises(InvalidRequestError, match=f"prompt 2: .*{re.escape(why)}") as raised:
        llm.generate(["a", "b", "c", "d"], params, use_tqdm=False)
    assert raised.value.outputs is None
    ask = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequestError, match=f"prompt 1: .*{re.escape(why)}"):
        llm.chat([ask, ask], [GREEDY, formed(**form)], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^(?!prompt)"):
        llm.generate("a", formed(**form), use_tqdm=False)
    assert computed(llm) == before


def test_on_error_return_gives_the_errors_in_the_outputs(llm: LLM) -> None:
    prompts, params = ["a", "b", "c"], [formed(choice=["x"]), formed(regex="(a"), GREEDY]
    good, bad, plain = llm.generate(prompts, params, use_tqdm=False, on_error="return")
    assert (good.outputs[0].text, len(plain.outputs[0].token_ids)) == ("x", 4)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].text) == ("error", "")
    assert isinstance(bad.outputs[0].error, InvalidRequestError)
    ask = [{"role": "user", "content": "a"}]
    (bad,) = llm.chat(ask, formed(regex="(a"), use_tqdm=False, on_error="return")
    assert bad.outputs[0].finish_reason == "error"
    for call in (llm.generate, llm.encode):
        with pytest.raises(InvalidArgumentError, match="on_error is 'ignore'; it must be 'raise' or 'return'"):
            call("a", use_tqdm=False, on_error="ignore")  # type: ignore[operator]


def test_whatever_a_prompt_lacks_names_its_index(llm: LLM) -> None:
    bad = SamplingParams(max_tokens=4)
    bad.temperature = -1.0
    with pytest.raises(InvalidArgumentError, match="prompt 1: temperature"):
        llm.generate(["a", "b"], [GREEDY, bad], use_tqdm=False)
    with pytest.raises(UnknownArgumentError, match="prompt 0: "):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, tokenization_kwargs={"paddin": 1})
    good, image = ({"role": "user", "content": content} for content in ("a", [{"type": "image_url"}]))
    with pytest.raises(MainspringError, match="prompt 1: message 0 has a part of type 'image_url'"):
        llm.chat([[good], [image]], GREEDY, use_tqdm=False)


def test_a_schema_as_long_as_may_be_is_checked_too(llm: LLM) -> None:
    text = {"type": "string", "enum": ["x"], "title": "t" * 8000}
    schema = {"anyOf": [text] * (MAX_SPEC_BYTES // 8100)}
    assert len(json.dumps(schema)) > 200_000
    (output,) = llm.generate("a", formed(json=schema), use_tqdm=False)
    assert output.outputs[0].text == '"x"'


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Path]]:
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny.make("llama", folder / "model")
    make_lora(model, folder / "good", 1, r=4, target_modules=["q_proj"])
    tiny.make_tokenizer(model)
    with LLM(str(model), enable_lora=True, enable_prompt_adapter=True, num_gpu_blocks_override=99) as made:
        yield made, folder


def test_an_adapter_that_can_not_be_read_is_raised_before_anything_is_computed(adapted: tuple[LLM, Path]) -> None:
    llm, folder = adapted
    good, bad = LoRARequest("good", 1, str(folder / "good")), LoRARequest("bad", 2, str(folder / "nowhere"))
    virtual = PromptAdapterRequest("bad", 3, str(folder / "nowhere"), 5)
    prompts, before = [[5, 6], [7, 8], [9]], computed(llm)
    with pytest.raises(InvalidRequestError, match=r"prompt 1: .*nowhere"):
        llm.generate(prompts, GREEDY, False, [good, bad, None])
    with pytest.raises(InvalidRequestError, match=r"prompt 1: .*nowhere"):
        llm.beam_search(prompts, BeamSearchParams(2, 4), [good, bad, None])
    with pytest.raises(InvalidRequestError, match=r"prompt 0: .*nowhere"):
        llm.generate(prompts, GREEDY, False, prompt_adapter_request=virtual)
    assert computed(llm) == before
    assert llm.list_loras() == {1}
    found = llm.generate(prompts, GREEDY, False, [good, bad, None], on_error="return")
    assert [output.outputs[0].finish_reason for output in found] == ["length", "error", "length"]
    (failed,) = llm.beam_search([[5, 6]], BeamSearchParams(2, 4), bad, on_error="return")
    assert failed.sequences[0].finish_reason == "error"


class FailingClient:
    """A client of a core that answers each prompt with a token or a vector, except those that begin with 13."""

    in_process = False

    def __init__(self, config: Any, tasks: list[str]) -> None:
        self.config = config
        self.model = ModelFacts(1024, 4, 64, "float32", tasks=tasks)
        self.running: deque[AddRequest] = deque()
        self.reason = "error"

    def add_request(self, request: AddRequest, tensors: Sequence[Any] = ()) -> None:
        self.running.append(request)

    def abort(self, handles: Sequence[int]) -> None:
        pass

    def call(self, method: str, *args: Any) -> None:
        assert method == "check_request"

    def get_outputs(self, timeout: float | None = None) -> Outputs:
        request = self.running.popleft()
        handle, first = request.handle, request.prompt_token_ids[0]
        if first == 13:
            error = ("RequestFailedError", "the core died") if self.reason == "error" else ("", "")
            return Outputs([], [], finished=[Finished(handle, self.reason, None, 0, *error)])  # type: ignore[arg-type]
        if request.pooling:
            vector = Pooled(handle, [1], b"\0\0\0\0")
            return Outputs([], [], finished=[Finished(handle, "stop")], pooled=[vector])
        return Outputs([handle], [first], finished=[Finished(handle, "length")])

    def close(self) -> None:
        pass


def failing_llm(monkeypatch: pytest.MonkeyPatch, *tasks: str) -> LLM:
    monkeypatch.setattr(llm_engine, "make_client", lambda config, multiprocess: FailingClient(config, list(tasks)))
    return LLM(skip_tokenizer_init=True)


def test_what_fails_while_running_is_raised_at_the_end_with_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = failing_llm(monkeypatch)
    prompts = [[5], [13], [7], [13], [9]]
    with pytest.raises(RequestFailedError) as raised:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert str(raised.value) == "prompt 1: the core died (2 of 5 prompts failed)"
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert (type(error), str(error)) == (RequestFailedError, str(raised.value))
        assert [output.outputs[0].token_ids for output in error.outputs] == [[5], [], [7], [], [9]]
        assert [output.outputs[0].finish_reason == "error" for output in error.outputs] == [
            token == [13] for token in prompts
        ]
        assert isinstance(error.outputs[1].outputs[0].error, RequestFailedError)
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(RequestFailedError, match=r"^the core died$"):
        llm.generate([13], SamplingParams(n=2), use_tqdm=False)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 0, 1, 0, 1]
    llm.llm_engine.engine_core.reason = "abort"  # type: ignore[attr-defined]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "abort", "length", "abort", "length"]


@pytest.mark.parametrize(("reason", "why"), [("error", "the core died"), ("abort", "it was ended .abort. before")])
def test_vectors_that_fail_are_raised_with_all_outputs(monkeypatch: pytest.MonkeyPatch, reason: str, why: str) -> None:
    llm = failing_llm(monkeypatch, "embed", "classify", "score")
    llm.llm_engine.engine_core.reason = reason  # type: ignore[attr-defined]
    prompts = [[5], [13]]
    for call in (llm.encode, llm.embed, llm.classify):
        with pytest.raises(RequestFailedError, match=f"prompt 1: {why}") as raised:
            call(prompts, use_tqdm=False)
        assert raised.value.outputs is not None
        assert [one.outputs.data.size for one in raised.value.outputs] == [1, 0]
    outputs = llm.encode(prompts, use_tqdm=False, on_error="return")
    assert [(one.outputs.data.size, one.finish_reason) for one in outputs] == [(1, "stop"), (0, reason)]
    llm = failing_llm(monkeypatch, "embed", "score")
    llm.llm_engine.engine_core.reason = reason  # type: ignore[attr-defined]
    with pytest.raises(RequestFailedError, match=f"prompt 2: {why}"):
        llm.score([5], [[6], [13]], use_tqdm=False)  # type: ignore[list-item]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_error_keeps_its_type_text_and_outputs_when_pickled(name: str) -> None:
    error = from_wire(name, "why")
    assert error.outputs is None
    error.outputs = [1, 2]
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), copied.outputs) == (BY_NAME[name], "why", [1, 2])


def test_the_core_keeps_nothing_of_a_checked_request() -> None:
    core = EngineCore(EngineArgs(device="cpu", num_gpu_blocks_override=300).create_engine_config())
    client = InprocClient(core)
    message = AddRequest(0, "", [0], Sampling(1, grammar=["regex", "[ab]+"]))
    assert client.call("check_request", message) is None
    assert not core.worker._registry.matchers  # type: ignore[attr-defined]
    assert core.frontends()[0].num_waiting == core.stats().num_steps == 0
    with pytest.raises(InvalidRequestError, match="a request is given wrongly"):
        client.call("check_request", [1, 2, 3])
    with pytest.raises(InvalidRequestError, match="kinds are"):
        client.call("check_request", AddRequest(0, "", [0], Sampling(1, grammar=["verse", "a"])))
    with pytest.raises(MainspringError, match="enable_lora=True"):
        client.call("check_request", AddRequest(0, "", [0], Sampling(1), lora=Adapter(1, "a", "/nowhere")))
    slow = AddRequest(0, "", [0], Sampling(1, grammar=["regex", "[abc]+"]))
    core.connect(1)
    core.call("check_request", codec.encode_value([slow]), 1)
    core.disconnect(1)  # while it compiles
    for _ in range(50):
        core.step()
    assert not core.worker._registry.matchers  # type: ignore[attr-defined]
    assert client.call("check_request", slow) is None
