"""Rows of the outputs of a request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mainspring import BeamSearchParams, SamplingParams

from . import checkpoints
from .harness import CONNECTED, NOT_INSIDE, OWN, Place, row

STORY = "Once upon a time"


def of_request(name: str, says: str) -> Callable[[Any], Any]:
    return row(f"RequestOutput.{name}", says=says)


def of_completion(name: str, says: str) -> Callable[[Any], Any]:
    return row(f"CompletionOutput.{name}", says=says)


@of_request("request_id", "The caller's name for it.")
def request_id(at: Place) -> None:
    engine = at.engine()
    engine.add_request("mine", STORY, SamplingParams(max_tokens=2))
    assert at.outputs(engine)[-1].request_id == "mine"


@of_request("prompt", "The prompt's text, if it was text.")
def prompt(at: Place) -> None:
    assert at.run().prompt == STORY


@of_request("prompt_token_ids", "The prompt's tokens.")
def prompt_token_ids(at: Place) -> None:
    assert at.run().prompt_token_ids == at.engine().get_tokenizer().encode(STORY)


@of_request("prompt_logprobs", "Of each token of the prompt: itself and the likeliest ones; None for the first.")
def prompt_logprobs(at: Place) -> None:
    first, second, *_ = at.run(prompt_logprobs=1).prompt_logprobs
    assert (first, len(second) in (1, 2)) == (None, True)


@of_request("outputs", "The completions, in order of their index.")
def outputs(at: Place) -> None:
    assert len(at.run(n=2, temperature=1.0).outputs) == 2


@of_request("finished", "Whether this is the last output.")
def finished(at: Place) -> None:
    assert [one.finished for one in at.stream(max_tokens=3)] == [False, False, True]


@of_request("num_cached_tokens", "Prompt tokens found in the prefix cache.")
def num_cached_tokens(at: Place) -> None:
    at.run(STORY * 8)
    assert at.run(STORY * 8).num_cached_tokens >= 16


@of_request("metrics", "When things happened to the request.")
def metrics(at: Place) -> None:
    assert at.run().metrics.arrival_time > 0


@of_completion("index", "Which of the `n` it is.")
def index(at: Place) -> None:
    assert [one.index for one in at.run(n=3, temperature=1.0).outputs] == [0, 1, 2]


@of_completion("text", "What was written.")
def text(at: Place) -> None:
    found = at.run().outputs[0]
    assert found.text == at.engine().get_tokenizer().decode(found.token_ids) != ""


@of_completion("token_ids", "Every token, also the one that ended it.")
def token_ids(at: Place) -> None:
    assert len(at.run(max_tokens=5).outputs[0].token_ids) == 5


@of_completion("logprobs", "Of each token: itself, and the likeliest ones.")
def logprobs(at: Place) -> None:
    assert len(at.run(logprobs=2).outputs[0].logprobs) == 8


@of_completion("cumulative_logprob", "The sum of the tokens' log probabilities.")
def cumulative_logprob(at: Place) -> None:
    found = at.run(logprobs=0).outputs[0]
    each = (place[token].logprob for token, place in zip(found.token_ids, found.logprobs, strict=True))
    assert math.isclose(found.cumulative_logprob, sum(each), abs_tol=1e-4)


@of_completion("finish_reason", "Why it ended: `stop`, `length`, `abort` or `error`.")
def finish_reason(at: Place) -> None:
    assert at.run().outputs[0].finish_reason == "length"
    assert at.run("What is 1 plus 2?").outputs[0].finish_reason == "stop"


@of_completion("stop_reason", "The stop token or stop string that ended it; an error's text.")
def stop_reason(at: Place) -> None:
    assert at.run(stop=" clever").outputs[0].stop_reason == " clever"


@of_completion("error", "The error behind finish reason `error`.")
def error(at: Place) -> None:
    engine = at.engine(max_requests_in_flight=2)
    for _ in range(6):
        engine.add_request(at.id(), STORY, SamplingParams(max_tokens=30, ignore_eos=True))
    found = [one.outputs[0] for one in at.outputs(engine) if one.outputs[0].finish_reason == "error"]
    assert found
    assert all("max_requests_in_flight" in str(one.error) for one in found)


@of_completion("routed_experts", "Which experts computed each token, with `enable_return_routed_experts`; at the end.")
def routed_experts(at: Place) -> None:
    engine = at.engine(model=checkpoints.random_experts(at), enable_return_routed_experts=True)
    output = at.run([3, 4, 5], max_tokens=4, engine=engine)
    assert output.outputs[0].routed_experts.shape == (6, 2, 2)


@row("CompletionOutput.finished", says="Whether this completion has ended.")
def completion_finished(at: Place) -> None:
    assert [one.outputs[0].finished() for one in at.stream(max_tokens=2)] == [False, True]


@row("Logprob.logprob", says="The token's log probability, under the model's own distribution.")
def logprob(at: Place) -> None:
    places = at.run(logprobs=5).outputs[0].logprobs
    assert all(0 < sum(math.exp(one.logprob) for one in place.values()) <= 1.0001 for place in places)


@row("Logprob.rank")
def rank(at: Place) -> None:
    found = at.run(logprobs=3).outputs[0]
    assert all(place[token].rank == 1 for token, place in zip(found.token_ids, found.logprobs, strict=True))


@row("Logprob.decoded_token", says="The token's text.")
def decoded_token(at: Place) -> None:
    found = at.run(logprobs=0).outputs[0]
    assert found.text == "".join(
        place[token].decoded_token for token, place in zip(found.token_ids, found.logprobs, strict=True)
    )


# ---------------------------------------------------------------------- RequestMetrics


@row("RequestMetrics.arrival_time", says="Seconds, as the caller gave it.")
def arrival_time(at: Place) -> None:
    engine = at.engine()
    engine.add_request(at.id(), STORY, SamplingParams(max_tokens=2), 12.5)
    assert at.outputs(engine)[-1].metrics.arrival_time == 12.5


@row(
    "RequestMetrics.first_scheduled_time",
    "RequestMetrics.first_token_time",
    "RequestMetrics.last_token_time",
    "RequestMetrics.finished_time",
    says="When it happened, in seconds on the clock of `time.monotonic`.",
)
def times(at: Place) -> None:
    one = at.run().metrics
    assert one.arrival_time <= one.first_scheduled_time <= one.first_token_time
    assert one.first_token_time < one.last_token_time <= one.finished_time


@row("RequestMetrics.time_in_queue")
def time_in_queue(at: Place) -> None:
    engine = at.engine(max_num_seqs=1)
    for _ in range(2):
        engine.add_request(at.id(), STORY, SamplingParams(max_tokens=60, ignore_eos=True))
    first, second = (one.metrics for one in at.outputs(engine) if one.finished)
    assert second.time_in_queue > first.time_in_queue >= 0


@row("RequestMetrics.num_preemptions", says="How often it had to make room for others.")
def num_preemptions(at: Place) -> None:
    engine = at.engine(num_gpu_blocks_override=12, max_model_len=160)
    for at_seed in range(3):
        engine.add_request(at.id(), STORY, SamplingParams(max_tokens=120, ignore_eos=True, seed=at_seed))
    found = [one.metrics for one in at.outputs(engine) if one.finished]
    assert sum(one.num_preemptions for one in found) > 0


# ---------------------------------------------------------------------- beam search

INSIDE = {"modes": (OWN, CONNECTED), "why": "only `LLM` gives it; " + NOT_INSIDE[1]}


def _beams(at: Place) -> Any:
    return at.seen(at.llm().beam_search("Tell me a long story.", BeamSearchParams(3, 12)))[0]


@row("BeamSearchOutput.sequences", says="The best continuations of one prompt, the best one first.", **INSIDE)
def sequences(at: Place) -> None:
    assert len(_beams(at).sequences) == 3


@row("BeamSearchSequence.tokens", says="Prompt and output.", **INSIDE)
def beam_tokens(at: Place) -> None:
    start = at.llm().get_tokenizer().encode("Tell me a long story.")
    assert all(one.tokens[: len(start)] == start for one in _beams(at).sequences)


@row("BeamSearchSequence.logprobs", says="Of each token of the output: itself and the likeliest ones.", **INSIDE)
def beam_logprobs(at: Place) -> None:
    one = _beams(at).sequences[0]
    output = one.tokens[len(one.tokens) - len(one.logprobs) :]
    assert output
    assert all(token in place for token, place in zip(output, one.logprobs, strict=True))


@row("BeamSearchSequence.cum_logprob", says="The sum of the log probabilities.", **INSIDE)
def beam_cum_logprob(at: Place) -> None:
    assert all(one.cum_logprob < 0 for one in _beams(at).sequences)


@row("BeamSearchSequence.text", says="Prompt and output as text.", **INSIDE)
def beam_text(at: Place) -> None:
    assert all(one.text.startswith("Tell me a long story.") for one in _beams(at).sequences)


@row("BeamSearchSequence.finish_reason", says="Why it ended.", **INSIDE)
def beam_finish_reason(at: Place) -> None:
    assert {one.finish_reason for one in _beams(at).sequences} <= {"stop", "length"}


@row("BeamSearchSequence.stop_reason", says="An error's text; None for the end of the sequence.", **INSIDE)
def beam_stop_reason(at: Place) -> None:
    llm = at.llm(max_requests_per_frontend=1)
    (found,) = at.seen(llm.beam_search(STORY, BeamSearchParams(3, 4), on_error="return"))
    assert "max_requests_per_frontend" in found.sequences[0].stop_reason
