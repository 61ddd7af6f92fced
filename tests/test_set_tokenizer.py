"""`LLM.set_tokenizer`: prompts, stop strings and the text of outputs follow the new tokenizer; grammars do or are
refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from mainspring import LLM, SamplingParams, StructuredOutputsParams
from mainspring.demo import MODEL_PATH
from mainspring.engine.text.tokenizer import SlowTokenizer, as_tokenizer, load_tokenizer
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
STORY = "Once upon a time"
CHOICE = StructuredOutputsParams(choice=["yes", "no"])
WORDS = [f"w{number}" for number in range(1000)]


def words(eos: str = "w900") -> PreTrainedTokenizerFast:
    """A tokenizer of words that has the ids of the model's, and other texts for all of them."""
    rust = RustTokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="w0"))
    rust.normalizer, rust.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=eos, chat_template=template)


@pytest.fixture(scope="module")
def made() -> Iterator[LLM]:
    with LLM() as made:
        yield made


@pytest.fixture
def llm(made: LLM) -> Iterator[LLM]:
    own = made.get_tokenizer()
    yield made
    made.set_tokenizer(own)


def test_everything_follows_the_new_tokenizer(llm: LLM) -> None:
    own = llm.get_tokenizer()
    before = llm.generate(STORY, SamplingParams(temperature=0.0, max_tokens=6, logprobs=0), use_tqdm=False)[0]
    theirs = words()
    llm.set_tokenizer(theirs)
    prompt = " ".join(WORDS[token] for token in before.prompt_token_ids or ())
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    after = llm.generate(prompt, params, use_tqdm=False)[0]
    assert after.prompt_token_ids == before.prompt_token_ids, "encoding"
    ids = list(before.outputs[0].token_ids)
    assert after.outputs[0].token_ids == ids
    assert after.outputs[0].text.split() == [WORDS[token] for token in ids], "decoding"
    pieces = [entry[token].decoded_token for entry, token in zip(after.outputs[0].logprobs or [], ids, strict=True)]
    assert pieces == [WORDS[token] for token in ids], "also of log probabilities that were shown before"

    stopping = SamplingParams(temperature=0.0, max_tokens=6, stop=WORDS[ids[2]])
    stopped = llm.generate(prompt, stopping, use_tqdm=False)[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", WORDS[ids[2]])
    assert stopped.text.split() == [WORDS[token] for token in ids[:2]]

    bad = SamplingParams(temperature=0.0, max_tokens=6, bad_words=[WORDS[ids[0]]])
    assert llm.generate(prompt, bad, use_tqdm=False)[0].outputs[0].token_ids[0] != ids[0]

    chat = llm.preprocess_chat([{"role": "user", "content": prompt}])
    assert chat == [{"prompt_token_ids": before.prompt_token_ids, "prompt": prompt + " "}]

    assert llm.get_tokenizer().eos_token == "w900"
    llm.set_tokenizer(words(eos=WORDS[ids[1]]))
    ended = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason) == (ids[:2], "stop")

    llm.set_tokenizer(own)
    again = llm.generate(STORY, params, use_tqdm=False)[0]
    assert (again.outputs[0].text, again.outputs[0].token_ids) == (before.outputs[0].text, ids)


def test_structured_outputs_are_refused_unless_the_vocabulary_is_the_models(llm: LLM) -> None:
    form = SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=CHOICE)
    (expected,) = llm.generate(STORY, form, use_tqdm=False)
    llm.set_tokenizer(words())
    with pytest.raises(NotSupportedError, match="the model's own vocabulary"):
        llm.generate([5, 6], form, use_tqdm=False)
    ids = expected.prompt_token_ids
    traced = SamplingParams(trace_decode_token_ids=[7, 8])
    assert llm.generate(ids, traced, use_tqdm=False)[0].outputs[0].token_ids == [7, 8], "it names tokens, not text"
    same = PreTrainedTokenizerFast(tokenizer_file=str(Path(MODEL_PATH) / "tokenizer.json"))
    llm.set_tokenizer(same)
    (found,) = llm.generate(STORY, form, use_tqdm=False)
    assert found.outputs[0].text == expected.outputs[0].text in ("yes", "no")


def test_settings_of_the_users_tokenizer_do_not_reach_the_engine(llm: LLM) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(Path(MODEL_PATH) / "tokenizer.json"), pad_token="<|pad|>")
    llm.set_tokenizer(theirs)
    ids = llm.get_tokenizer().encode(STORY)
    assert theirs([STORY], truncation=True, max_length=2, padding="max_length")["input_ids"][0] != ids
    assert llm.generate(STORY, GREEDY, use_tqdm=False)[0].prompt_token_ids == ids


def test_it_is_set_between_requests_only(llm: LLM) -> None:
    (before,) = llm.generate(STORY, GREEDY, use_tqdm=False)
    llm.enqueue(STORY, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="1 requests are unfinished"):
        llm.set_tokenizer(words())
    assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].text == before.outputs[0].text
    for wrong in (None, "gpt2", RustTokenizer(models.BPE())):
        with pytest.raises(InvalidArgumentError, match="it must be a tokenizer of transformers"):
            llm.set_tokenizer(wrong)


def test_tokenizers_without_a_rust_part_that_can_be_copied_are_used_as_they_are() -> None:
    slow = as_tokenizer(ByT5Tokenizer())
    assert isinstance(slow, SlowTokenizer)
    assert slow.decode(slow.encode("né"), skip_special_tokens=True) == "né"

    class Spaces:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            return [" ".join(tokens)]

    theirs = words()
    theirs.backend_tokenizer.decoder = decoders.Decoder.custom(Spaces())
    custom = as_tokenizer(theirs)
    assert isinstance(custom, SlowTokenizer)
    assert custom.decode(custom.encode("w1 w2")) == "w1 w2"


@pytest.mark.slow
def test_an_engine_that_had_none_gets_one() -> None:
    with LLM(skip_tokenizer_init=True) as llm:
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.generate(STORY, GREEDY, use_tqdm=False)
        tokenizer: Any = load_tokenizer(Path(MODEL_PATH))
        llm.set_tokenizer(tokenizer)
        assert llm.get_tokenizer() is tokenizer
        (found,) = llm.generate(STORY, GREEDY, use_tqdm=False)
        assert found.outputs[0].text == tokenizer.decode(found.outputs[0].token_ids)
        with pytest.raises(NotSupportedError, match="the model's own vocabulary"):
            llm.generate(STORY, SamplingParams(structured_outputs=CHOICE), use_tqdm=False)
