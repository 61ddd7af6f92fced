"""Rows of the parameters of a request: `SamplingParams`, `BeamSearchParams`, `StructuredOutputsParams`."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from mainspring import (
    BeamSearchParams,
    GuidedDecodingParams,
    InvalidArgumentError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from . import checkpoints
from .harness import IN, Place, row

STORY = "Once upon a time"
RABBIT = " there was a clever rabbit named Eric."
DRAWN = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}


def field(name: str, modes: tuple[str, ...] = (), why: str = "", says: str = "") -> Callable[[Any], Any]:
    return row(f"SamplingParams.{name}", modes=modes, why=why, says=says)


@field("n", says="How many completions are given back.")
def n(at: Place) -> None:
    found = at.run(n=3, seed=5, **DRAWN)
    assert [one.index for one in found.outputs] == [0, 1, 2]
    assert len({one.text for one in found.outputs}) == 3


@field("best_of")
def best_of(at: Place) -> None:
    every = at.run(n=4, seed=5, logprobs=0, **DRAWN).outputs
    (best,) = at.run(n=1, best_of=4, seed=5, logprobs=0, **DRAWN).outputs
    assert best.cumulative_logprob == max(one.cumulative_logprob for one in every)
    assert min(one.cumulative_logprob for one in every) < best.cumulative_logprob


@field("presence_penalty", says="Subtracted from the logit of every token that the output has.")
def presence_penalty(at: Place) -> None:
    plain = at.ids(max_tokens=40, ignore_eos=True)
    fewer = at.ids(max_tokens=40, ignore_eos=True, presence_penalty=2.0)
    assert len({*fewer}) > len({*plain})


@field("frequency_penalty", says="Subtracted for every time that the output has the token.")
def frequency_penalty(at: Place) -> None:
    few = {"max_tokens": 30, "allowed_token_ids": [70, 71, 72]}
    plain, even = at.ids(**few), at.ids(frequency_penalty=2.0, **few)
    assert max(map(even.count, even)) < max(map(plain.count, plain))


@field("repetition_penalty", says="Divides the logits of tokens that prompt or output have; above 1: fewer of them.")
def repetition_penalty(at: Place) -> None:
    ids = at.ids(max_tokens=40, ignore_eos=True, repetition_penalty=50.0)
    assert len({*ids}) == 40, "none comes twice"


@field("temperature", says="0: the likeliest token; larger: more even chances.")
def temperature(at: Place) -> None:
    assert len({tuple(at.ids(temperature=0.0, seed=seed)) for seed in range(3)}) == 1
    hot, cool = (at.run(seed=3, logprobs=0, max_tokens=24, ignore_eos=True, temperature=t) for t in (3.0, 0.2))
    assert hot.outputs[0].cumulative_logprob < cool.outputs[0].cumulative_logprob - 10


def _likeliest_though_hot(at: Place, **limits: Any) -> None:
    """Each token is one of the likeliest: in bfloat16 several may be."""
    out = at.run(temperature=5.0, seed=1, max_tokens=12, logprobs=0, **limits).outputs[0]
    assert [at_one[token].rank for token, at_one in zip(out.token_ids, out.logprobs, strict=True)] == [1] * 12


@field("top_p", says="Only the likeliest tokens that together have this probability.")
def top_p(at: Place) -> None:
    _likeliest_though_hot(at, top_p=1e-6)


@field("top_k")
def top_k(at: Place) -> None:
    _likeliest_though_hot(at, top_k=1)


@field("min_p", says="Only tokens at least so probable, as a share of the likeliest one's probability.")
def min_p(at: Place) -> None:
    _likeliest_though_hot(at, min_p=1.0)


@field("seed")
def seed(at: Place) -> None:
    def draw(seed: int) -> list[int]:
        return at.ids(seed=seed, **{**DRAWN, "temperature": 3.0})

    assert draw(5) == draw(5) != draw(6)


@field("stop", says="Strings that end the output.")
def stop(at: Place) -> None:
    found = at.run(max_tokens=20, stop=[" rabbit"]).outputs[0]
    assert (found.text, found.finish_reason, found.stop_reason) == (" there was a clever", "stop", " rabbit")


@field("stop_token_ids", says="Tokens that end the output.")
def stop_token_ids(at: Place) -> None:
    third = at.ids()[2]
    found = at.run(stop_token_ids=[third]).outputs[0]
    assert (len(found.token_ids), found.finish_reason, found.stop_reason) == (3, "stop", third)


@field("bad_words")
def bad_words(at: Place) -> None:
    assert "clever" in at.text()
    assert "clever" not in at.text(bad_words=["clever"])


@field("include_stop_str_in_output", says="Leave the stop string in the text.")
def include_stop(at: Place) -> None:
    assert at.text(max_tokens=20, stop=" rabbit", include_stop_str_in_output=True) == " there was a clever rabbit"


@field("ignore_eos", says="Go on past the end of the sequence.")
def ignore_eos(at: Place) -> None:
    found = at.run("What is 1 plus 2?", max_tokens=12, ignore_eos=True).outputs[0]
    assert (len(found.token_ids), found.finish_reason) == (12, "length")


@field("max_tokens")
def max_tokens(at: Place) -> None:
    found = at.run(max_tokens=5).outputs[0]
    assert (len(found.token_ids), found.finish_reason) == (5, "length")


@field("min_tokens", says="The output does not end before so many.")
def min_tokens(at: Place) -> None:
    assert len(at.ids("What is 1 plus 2?", max_tokens=12)) == 3
    assert len(at.ids("What is 1 plus 2?", max_tokens=12, min_tokens=6)) >= 6


@field("logprobs")
def logprobs(at: Place) -> None:
    found = at.run(logprobs=3).outputs[0]
    assert [len(place) for place in found.logprobs] == [3] * 8
    assert all(token in place for token, place in zip(found.token_ids, found.logprobs, strict=True))
    assert math.isclose(
        sum(place[token].logprob for token, place in zip(found.token_ids, found.logprobs, strict=True)),
        found.cumulative_logprob,
        abs_tol=1e-4,
    )


@field("prompt_logprobs")
def prompt_logprobs(at: Place) -> None:
    found = at.run(prompt_logprobs=2)
    first, *others = found.prompt_logprobs
    assert first is None
    assert len(others) == len(found.prompt_token_ids) - 1
    assert all(token in place for token, place in zip(found.prompt_token_ids[1:], others, strict=True))


@field("detokenize", says="Give text, not token ids alone.")
def detokenize(at: Place) -> None:
    found = at.run(detokenize=False).outputs[0]
    assert (found.text, len(found.token_ids)) == ("", 8)


@field("skip_special_tokens", says="Leave special tokens out of the text.")
def skip_special_tokens(at: Place) -> None:
    limits = {"max_tokens": 12, "ignore_eos": True}
    marker = at.engine().get_tokenizer().decode([at.ids("What is 1 plus 2?", **limits)[2]])
    assert marker in at.text("What is 1 plus 2?", skip_special_tokens=False, **limits)
    assert marker not in at.text("What is 1 plus 2?", **limits)


@field("spaces_between_special_tokens", says="A space between special tokens, where they are shown.")
def spaces_between_special_tokens(at: Place) -> None:
    engine = at.engine(tokenizer=checkpoints.no_decoder(at))
    pair = {"allowed_token_ids": [4, 5], "max_tokens": 6, "ignore_eos": True, "skip_special_tokens": False}
    spaced, joined = (at.text(engine=engine, spaces_between_special_tokens=on, **pair)[1:] for on in (True, False))
    assert (" " in spaced, " " in joined) == (True, False)


@field("truncate_prompt_tokens")
def truncate_prompt_tokens(at: Place) -> None:
    every = at.run().prompt_token_ids
    assert at.run(truncate_prompt_tokens=3).prompt_token_ids == every[-3:]


@field("output_kind", says="Whether outputs repeat everything, hold what is new, or come at the end.")
def output_kind(at: Place) -> None:
    whole = at.text()
    deltas = at.stream(output_kind=RequestOutputKind.DELTA)
    assert "".join(one.outputs[0].text for one in deltas) == whole
    assert len(at.stream(output_kind=RequestOutputKind.FINAL_ONLY)) == 1


@field("stream_interval")
def stream_interval(at: Place) -> None:
    assert [len(one.outputs[0].token_ids) for one in at.stream(stream_interval=3)] == [1, 4, 7, 8]


@field("logit_bias")
def logit_bias(at: Place) -> None:
    assert at.ids(logit_bias={77: 1e6}) == [77] * 8


@field("allowed_token_ids")
def allowed_token_ids(at: Place) -> None:
    assert {*at.ids(allowed_token_ids=[70, 71])} <= {70, 71}


@field("trace_decode_token_ids")
def trace_decode_token_ids(at: Place) -> None:
    assert at.ids(trace_decode_token_ids=[70, 71, 70]) == [70, 71, 70]


@field("structured_outputs")
def structured_outputs(at: Place) -> None:
    assert at.text(structured_outputs=StructuredOutputsParams(choice=["Peru", "Chad"])) in ("Peru", "Chad")


@field("guided_decoding")
def guided_decoding(at: Place) -> None:
    assert at.text(guided_decoding=GuidedDecodingParams(regex=r"\d{5}")).isdigit()


@field("logits_processors", modes=(IN,), why="functions can't go to another process", says="Functions of the logits.")
def logits_processors(at: Place) -> None:
    def only(_: Any, logits: Any) -> Any:
        logits[:] = -1e9
        logits[88] = 0.0
        return logits

    assert at.ids(logits_processors=[only]) == [88] * 8


@field("cache_salt")
def cache_salt(at: Place) -> None:
    prompt = f"{time.monotonic_ns()} " * 4
    assert at.run(prompt, cache_salt="mine").num_cached_tokens == 0
    assert at.run(prompt).num_cached_tokens == 0, "others don't share it"
    assert at.run(prompt, cache_salt="mine").num_cached_tokens > 0


def _beams(at: Place, prompt: str = "Tell me a long story.", **more: Any) -> Any:
    return at.run(prompt, use_beam_search=True, logprobs=0, **{"n": 4, "max_tokens": 10, **more}).outputs


@field("use_beam_search")
def use_beam_search(at: Place) -> None:
    found = _beams(at, length_penalty=0.0)
    assert len({tuple(one.token_ids) for one in found}) == 4
    scores = [one.cumulative_logprob for one in found]
    assert scores == sorted(scores, reverse=True)


@field("length_penalty")
def length_penalty(at: Place) -> None:
    short, long = (_beams(at, max_tokens=16, length_penalty=penalty)[0] for penalty in (-5.0, 5.0))
    assert len(short.token_ids) < len(long.token_ids)
    assert len(_beams(at, max_tokens=16)[0].token_ids) < len(long.token_ids)


@field("early_stopping")
def early_stopping(at: Place) -> None:
    early, late = (_beams(at, n=2, max_tokens=40, length_penalty=2.0, early_stopping=e) for e in (True, False))
    assert [one.token_ids for one in early] != [one.token_ids for one in late]


@row("SamplingParams.clone")
def clone(at: Place) -> None:
    mine = SamplingParams(temperature=0.0, stop=["x"], max_tokens=4)
    other = mine.clone()
    assert other == mine
    other.stop.append("y")
    assert mine.stop == ["x"]
    assert at.outputs(at.engine(), at.engine().add_request(at.id(), STORY, other))


@row("SamplingParams.update_from_generation_config")
def update_from_generation_config(at: Place) -> None:
    second = at.ids()[1]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    params.update_from_generation_config({"eos_token_id": [2, second]}, 2)
    engine = at.engine()
    found = at.outputs(engine, engine.add_request(at.id(), STORY, params))[-1].outputs[0]
    assert (len(found.token_ids), found.finish_reason, found.stop_reason) == (2, "stop", second)


@row("SamplingParams.from_optional")
def from_optional(at: Place) -> None:
    params = SamplingParams.from_optional(top_p=None, max_tokens=None, temperature=0.0, logit_bias={"3": 500.0})
    assert (params.top_p, params.max_tokens, params.logit_bias) == (1.0, None, {3: 100.0})


@row("SamplingParams.validate")
def validate(at: Place) -> None:
    params = SamplingParams()
    params.top_p = 3.0
    with pytest.raises(InvalidArgumentError, match="top_p is 3"):
        params.validate()


@row("SamplingParams.width")
def width(at: Place) -> None:
    assert (SamplingParams(n=2).width, SamplingParams(best_of=5).width) == (2, 5)


# ---------------------------------------------------------------------- BeamSearchParams


def _search(at: Place, prompt: str = "Tell me a long story.", **fields: Any) -> list[Any]:
    params = BeamSearchParams(**{"beam_width": 3, "max_tokens": 8, **fields}).sampling_params()
    engine = at.engine()
    return at.outputs(engine, engine.add_request(at.id(), prompt, params))[-1].outputs


@row("BeamSearchParams.beam_width", says="How many continuations are looked at and given back.")
def beam_width(at: Place) -> None:
    assert len(_search(at)) == 3


@row("BeamSearchParams.max_tokens", says="Most tokens of a continuation.")
def beam_max_tokens(at: Place) -> None:
    assert max(len(one.token_ids) for one in _search(at)) > 3


@row("BeamSearchParams.ignore_eos", says="Go on past the end of the sequence.")
def beam_ignore_eos(at: Place) -> None:
    assert {len(one.token_ids) for one in _search(at, ignore_eos=True, max_tokens=12)} == {12}


@row("BeamSearchParams.length_penalty", says="The sum of log probabilities is divided by the length to this power.")
def beam_length_penalty(at: Place) -> None:
    short, long = (_search(at, max_tokens=16, length_penalty=penalty)[0] for penalty in (1.0, 5.0))
    assert len(long.token_ids) > len(short.token_ids)


@row("BeamSearchParams.temperature")
def beam_temperature(at: Place) -> None:
    with pytest.raises(InvalidArgumentError, match="temperature"):
        _search(at, temperature=0.5)


@row("BeamSearchParams.include_stop_str_in_output", says="As in `SamplingParams`.")
def beam_include_stop(at: Place) -> None:
    assert BeamSearchParams(2, 4, include_stop_str_in_output=True).sampling_params().include_stop_str_in_output


@row("BeamSearchParams.sampling_params", says="The same as `SamplingParams`.")
def beam_sampling_params(at: Place) -> None:
    params = BeamSearchParams(3, 8).sampling_params()
    assert (params.n, params.max_tokens, params.use_beam_search) == (3, 8, True)


# ---------------------------------------------------------------------- StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["a"]}


def _form(at: Place, prompt: str = STORY, /, max_tokens: int = 60, **fields: Any) -> str:
    return at.text(prompt, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**fields))


def form(name: str, says: str) -> Callable[[Any], Any]:
    return row(f"StructuredOutputsParams.{name}", says=says)


@form("json", "A JSON schema, as text, dict or pydantic model class.")
def json_schema(at: Place) -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert 1 <= json.loads(_form(at, json=schema, disable_additional_properties=True))["a"] <= 9


@form("regex", "What the whole answer matches.")
def regex(at: Place) -> None:
    assert re.fullmatch(r"\+\d\d \d{3}", _form(at, regex=r"\+\d\d \d{3}"))


@form("choice", "Strings, one of which is the answer.")
def choice(at: Place) -> None:
    assert _form(at, choice=["yes", "no"]) in ("yes", "no")


@form("grammar", "A context-free grammar, in Lark's or GBNF's notation.")
def grammar(at: Place) -> None:
    assert re.fullmatch("[ab]{3}", _form(at, grammar='root ::= x x x\nx ::= "a" | "b"'))


@form("json_object", "Any JSON object.")
def json_object(at: Place) -> None:
    bias = {"max_tokens": 40, "temperature": 0.0}
    found = at.run(structured_outputs=StructuredOutputsParams(json_object=True), **bias).outputs[0].text
    assert found.lstrip().startswith("{")


@form("structural_tag", "JSON with `structures` and `triggers`: free text with tagged parts that have a form.")
def structural_tag(at: Place) -> None:
    tag = {
        "structures": [{"begin": " there", "schema": {"enum": [77]}, "end": "!"}],
        "triggers": [" there"],
    }
    assert _form(at, structural_tag=json.dumps(tag), max_tokens=12).lstrip().startswith("there77!")


@form("disable_any_whitespace", "JSON without any whitespace between its parts.")
def disable_any_whitespace(at: Place) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "minItems": 3, "maxItems": 3}
    assert " " not in _form(at, json=schema, disable_any_whitespace=True)
    assert re.search(r"\s", _form(at, json=schema))


@form("disable_additional_properties", "Objects have no others than the schema lists.")
def disable_additional_properties(at: Place) -> None:
    spec = StructuredOutputsParams(json=SCHEMA, disable_additional_properties=True).spec()[1]
    assert json.loads(spec)["additionalProperties"] is False
    assert json.loads(_form(at, json=SCHEMA, disable_additional_properties=True)).keys() == {"a"}


@form("whitespace_pattern", "A regular expression of what may stand between the parts of JSON.")
def whitespace_pattern(at: Place) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}
    assert re.fullmatch(r"\[\t*1\t*,\t*1\t*\]", _form(at, json=schema, whitespace_pattern=r"\t{2}"))
    assert "\t\t" in _form(at, json=schema, whitespace_pattern=r"\t{2}")


@row("StructuredOutputsParams.validate")
def form_validate(at: Place) -> None:
    params = StructuredOutputsParams(choice=["a"])
    params.regex = "b"
    with pytest.raises(InvalidArgumentError, match="exactly one"):
        params.validate()


@row("StructuredOutputsParams.spec")
def form_spec(at: Place) -> None:
    assert StructuredOutputsParams(choice=["a", "b"]).spec() == ("choice", '["a", "b"]')
