"""Rows of `LLM`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from mainspring import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    InvalidArgumentError,
    InvalidRequestError,
    LLMEngine,
    SamplingParams,
    StructuredOutputsParams,
)
from mainspring.demo import MODEL_PATH

from .engine_rows import RABBIT, Listener
from .harness import BASE, OWN, Place, row

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@row("LLM.generate")
def generate(at: Place) -> None:
    shown: list[Any] = []

    class Bar:
        def __init__(self, **told: Any) -> None:
            shown.append(told["total"])

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: shown.append(name)

    short = SamplingParams(temperature=0.0, max_tokens=3)
    found = at.llm().generate(["Once upon a time", [5, 6, 7]], [GREEDY, short], use_tqdm=Bar)
    assert found[0].outputs[0].text.startswith(RABBIT)
    assert [len(one.outputs[0].token_ids) for one in found] == [8, 3]
    assert (shown[0], shown.count("update")) == (2, 2)
    assert len(at.llm().generate("Once upon a time", GREEDY, False, None, [3])) == 1


@row("LLM.chat")
def chat(at: Place) -> None:
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    assert at.llm().chat(ask, GREEDY, use_tqdm=False)[0].outputs[0].text.strip().startswith("Paris")
    assert len(at.llm().chat([ask, ask], GREEDY, use_tqdm=False)) == 2


@row("LLM.beam_search")
def beam_search(at: Place) -> None:
    (found,) = at.llm().beam_search("Tell me a long story.", BeamSearchParams(beam_width=3, max_tokens=10))
    assert len(found.sequences) == 3
    assert all(one.text.startswith("Tell me a long story.") for one in found.sequences)
    scores = [one.cum_logprob for one in found.sequences]
    assert scores[0] == max(scores)


BAD = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="(a"))


@row("LLM.generate, on_error", says="`raise`: the first error, if a request fails; `return`: errors in the outputs.")
def generate_on_error(at: Place) -> None:
    prompts, params = ["Once upon a time", "a"], [GREEDY, BAD]
    with pytest.raises(InvalidRequestError, match="prompt 1: regex can't be used"):
        at.llm().generate(prompts, params, use_tqdm=False)
    good, bad = at.llm().generate(prompts, params, use_tqdm=False, on_error="return")
    assert good.outputs[0].text.startswith(RABBIT)
    assert (bad.outputs[0].finish_reason, type(bad.outputs[0].error)) == ("error", InvalidRequestError)


@row("LLM.chat, on_error", says="As of `LLM.generate`.")
def chat_on_error(at: Place) -> None:
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    with pytest.raises(InvalidRequestError, match="regex can't be used"):
        at.llm().chat(ask, BAD, use_tqdm=False)
    (bad,) = at.llm().chat(ask, BAD, use_tqdm=False, on_error="return")
    assert bad.outputs[0].finish_reason == "error"


@row("LLM.beam_search, on_error", says="As of `LLM.generate`.")
def beam_search_on_error(at: Place) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    (found,) = at.llm().beam_search("Once upon a time", params, on_error="return")
    assert len(found.sequences) == 2
    with pytest.raises(InvalidArgumentError, match="on_error is 'ignore'"):
        at.llm().beam_search("Once upon a time", params, on_error="ignore")  # type: ignore[arg-type]


@row(
    "LLM.chat, chat_template_content_format", says="Contents as text, as lists of parts, or as the template reads them."
)
def chat_template_content_format(at: Place) -> None:
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    template = "{{ 'Once upon a time' if messages[0].content is string else 'What is 2 plus 3?' }}"
    found = {
        name: at.llm().chat(ask, GREEDY, False, chat_template=template, chat_template_content_format=name)[0].prompt
        for name in ("string", "openai", "auto")
    }
    assert found == {"string": "Once upon a time", "openai": "What is 2 plus 3?", "auto": "Once upon a time"}


@row("LLM.enqueue", "LLM.wait_for_completion")
def enqueue(at: Place) -> None:
    llm = at.fresh(LLM)  # a shared one would keep what is enqueued and not waited for
    ids = llm.enqueue(["Once upon a time", [5, 6, 7]], GREEDY, use_tqdm=False)
    found = llm.wait_for_completion(use_tqdm=False)
    assert [one.request_id for one in found] == ids
    assert found[0].outputs[0].text.startswith(RABBIT)
    llm.enqueue("a", BAD, use_tqdm=False, on_error="return")
    with pytest.raises(InvalidRequestError, match="regex can't be used"):
        llm.wait_for_completion(use_tqdm=False)


@row("LLM.enqueue_chat")
def enqueue_chat(at: Place) -> None:
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    llm = at.fresh(LLM)
    assert len(llm.enqueue_chat([ask, ask], GREEDY, use_tqdm=False)) == 2
    assert [one.outputs[0].text.strip()[:5] for one in llm.wait_for_completion(use_tqdm=False)] == ["Paris"] * 2


@row("LLM.preprocess_chat")
def preprocess_chat(at: Place) -> None:
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    (prompt,) = at.llm().preprocess_chat(ask)
    (found,) = at.llm().generate([prompt], GREEDY, use_tqdm=False)
    assert found.prompt_token_ids == at.llm().chat(ask, GREEDY, use_tqdm=False)[0].prompt_token_ids
    assert found.outputs[0].text.strip().startswith("Paris")


@row("LLM.set_tokenizer")
def set_tokenizer(at: Place) -> None:
    from transformers import PreTrainedTokenizerFast

    llm = at.fresh(LLM)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(MODEL_PATH / "tokenizer.json"), eos_token="z")
    theirs.chat_template = "Once upon a time"
    llm.set_tokenizer(theirs)
    assert llm.get_tokenizer().eos_token == "z"
    (found,) = llm.chat([{"role": "user", "content": "unread"}], GREEDY, use_tqdm=False)
    assert (found.prompt, found.outputs[0].finish_reason) == ("Once upon a time", "length")


@row("LLM.get_world_size")
def get_world_size(at: Place) -> None:
    assert at.llm().get_world_size() == at.llm().get_world_size(include_dp=False) == 1


@row("LLM.renderer")
def renderer(at: Place) -> None:
    assert at.llm().renderer.process_inputs("a", "Once upon a time", GREEDY).prompt == "Once upon a time"


@row("LLM.get_tokenizer")
def tokenizer(at: Place) -> None:
    one = at.llm().get_tokenizer()
    assert one.decode(one.encode("Once upon"), skip_special_tokens=True).strip() == "Once upon"


@row("LLM.get_default_sampling_params")
def default_sampling_params(at: Place) -> None:
    assert at.llm().get_default_sampling_params().temperature == 0.0, "do_sample is False in the checkpoint"


@row("LLM.get_metrics")
def get_metrics(at: Place) -> None:
    at.llm().generate("Once upon a time", GREEDY, use_tqdm=False)
    assert at.metric("generation_tokens", at.llm()) >= 8


@row("LLM.get_supported_tasks", "LLM.supported_tasks")
def tasks(at: Place) -> None:
    assert at.llm().supported_tasks == at.llm().get_supported_tasks() == ("generate",)


@row("LLM.do_log_stats")
def do_log_stats(at: Place) -> None:
    loggers = at.llm().llm_engine.stat_loggers
    loggers["mine"] = listener = Listener()
    try:
        at.llm().do_log_stats()
        assert listener.logged == 1
    finally:
        del loggers["mine"]


@row("LLM.llm_engine", says="The engine below.")
def llm_engine(at: Place) -> None:
    assert isinstance(at.llm().llm_engine, LLMEngine)
    assert at.text(engine=at.llm().llm_engine).startswith(RABBIT)


@row("LLM.chat_template", says="The template of `chat`, in place of the model's own; None: the model's.")
def chat_template(at: Place) -> None:
    llm = at.llm()
    before, llm.chat_template = llm.chat_template, "Once upon a time"
    try:
        [output] = llm.chat([{"role": "user", "content": "unread"}], GREEDY, use_tqdm=False)
    finally:
        llm.chat_template = before
    assert output.prompt == "Once upon a time"


@row("LLM.reset_prefix_cache")
def reset_prefix_cache(at: Place) -> None:
    def cached() -> int:
        return at.llm().generate("Once upon a time " * 12, GREEDY, use_tqdm=False)[0].num_cached_tokens

    cached()
    assert cached() > 0
    assert at.llm().reset_prefix_cache() is True
    assert cached() == 0


@row("LLM.start_profile", "LLM.stop_profile", says="A Chrome trace of what the core does.")
def profile(at: Place) -> None:
    try:
        at.llm().start_profile("surface")
        at.llm().generate("Once upon a time", GREEDY, use_tqdm=False)
        path = Path(at.llm().stop_profile())
        assert "traceEvents" in path.read_text()
        path.unlink()
    finally:
        with contextlib.suppress(InvalidArgumentError):
            Path(at.llm().llm_engine.engine_core.call("stop_profile")).unlink()


@row("LLM.__init__", says="A model to call: `LLM(model, …)`, or `LLM(connect=ADDRESS)`.")
def constructor(at: Place) -> None:
    made = LLM(**BASE, max_model_len=64) if at.mode == OWN else LLM(connect=at.address(max_model_len=64))
    at._fresh.append(made)
    assert made.llm_engine.get_model_config().max_model_len == 64
    assert made.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text.startswith(RABBIT)


@row("LLM.from_engine_args", modes=(OWN,), why="it starts a core")
def from_engine_args(at: Place) -> None:
    with LLM.from_engine_args(EngineArgs(**BASE, max_model_len=64)) as made:
        assert made.llm_engine.get_model_config().max_model_len == 64


@row("LLM.model_config", says="The model's part of the configuration.")
def model_config(at: Place) -> None:
    assert at.llm().model_config.max_model_len == at.llm().llm_engine.get_model_config().max_model_len


@row("LLM.shutdown", "LLM.__exit__", says="Ends the core.")
def shutdown(at: Place) -> None:
    made = at.fresh(LLM)
    made.shutdown()
    assert made.llm_engine.engine_core.error is not None
    with at.fresh(LLM) as other:
        assert other.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert other.llm_engine.engine_core.error is not None


@row("LLM.__enter__", says="`with` an `LLM`: it is shut down at the end of the block.")
def context(at: Place) -> None:
    with at.fresh(LLM) as made:
        assert isinstance(made, LLM)
