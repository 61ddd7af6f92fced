"""From columns of tokens to RequestOutputs: kinds of output, several completions, stop strings, ends and metrics."""

from __future__ import annotations

import itertools
import logging
import random
from typing import Any, NamedTuple, cast

import pytest

from mainspring import RequestOutput, RequestOutputKind, SamplingParams
from mainspring.demo import MODEL_PATH
from mainspring.engine.request import request_state
from mainspring.engine.request.input_processor import InputProcessor, core_messages
from mainspring.engine.request.output_processor import OutputProcessor, Processed, send_round
from mainspring.engine.text.tokenizer import load_tokenizer
from mainspring.ipc.errors import OutOfMemoryError, OverloadedError, RequestFailedError
from mainspring.ipc.messages import AddRequest, Finished, FinishReason, ModelFacts, Outputs, Started
from mainspring.ipc.request_check import RequestCheck
from mainspring.ipc.routing import check_rank

TOKENIZER = load_tokenizer(MODEL_PATH)
FACTS = ModelFacts(vocab_size=1024, hidden_size=4, max_model_len=512, dtype="float32")
EOS = 2
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Shown(NamedTuple):
    outputs: list[RequestOutput]
    aborts: list[int]


def shown(processed: Processed) -> Shown:
    """All outputs that are ready."""
    return Shown([state.output() for state in processed.changed], processed.aborts)


class Frontend:
    """An output processor with requests, and methods that act as the core."""

    def __init__(self, tokenizer: Any = TOKENIZER) -> None:
        self.input = InputProcessor(tokenizer, RequestCheck(FACTS), [EOS])
        self.handles = itertools.count(1)
        self.output = OutputProcessor(tokenizer, self.handles)
        self.now = 100.0

    def add(self, request_id: str = "r", prompt: Any = "Q:", **params: Any) -> list[int]:
        request = self.input.process_inputs(request_id, prompt, SamplingParams(max_tokens=500, **params), 99.0)
        handles = [message.handle for message in core_messages(request, self.handles)]
        self.output.add(request, handles, self.now)
        return handles

    def step(
        self,
        tokens: list[tuple[int, int]],
        finished: list[Finished] | None = None,
        started: list[Started] | None = None,
    ) -> Shown:
        return shown(self.take_in(tokens, finished, started))

    def take_in(
        self,
        tokens: list[tuple[int, int]],
        finished: list[Finished] | None = None,
        started: list[Started] | None = None,
    ) -> Processed:
        self.now += 1
        handles, token_ids = [handle for handle, _ in tokens], [token for _, token in tokens]
        return self.output.process(Outputs(handles, token_ids, started or [], finished or []), self.now)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def play(frontend: Frontend, handle: int, tokens: list[int], reason: str = "length") -> list[RequestOutput]:
    """All outputs of a request that gets one token in each step and ends with the last."""
    outputs: list[RequestOutput] = []
    for at, token in enumerate(tokens):
        stop_token = token if reason == "stop" else None
        ended = [Finished(handle, reason, stop_token)] if at == len(tokens) - 1 else []  # type: ignore[arg-type]
        outputs += frontend.step([(handle, token)], ended).outputs
    return outputs


TEXT = "seven, eight, naïve 東京 nine"


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_what_each_kind_of_output_repeats(kind: RequestOutputKind) -> None:
    frontend = Frontend()
    (handle,) = frontend.add(output_kind=kind)
    tokens = ids(TEXT)
    outputs = play(frontend, handle, tokens)
    texts = [output.outputs[0].text for output in outputs]
    token_ids = [output.outputs[0].token_ids for output in outputs]
    if kind == FINAL_ONLY:
        assert (texts, token_ids) == ([TEXT], [tokens])
    elif kind == DELTA:
        assert "".join(texts) == TEXT
        assert token_ids == [[token] for token in tokens]
    else:
        assert texts[-1] == TEXT
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert token_ids == [tokens[:count] for count in range(1, len(tokens) + 1)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert len(frontend.output) == 0
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_an_output_that_is_made_late_holds_all_that_came_until_then(kind: RequestOutputKind) -> None:
    frontend = Frontend()
    (handle,) = frontend.add(output_kind=kind)
    tokens = ids(TEXT)
    (state,) = frontend.take_in([(handle, tokens[0])]).changed
    first = state.output().outputs[0]
    for token in tokens[1:-1]:
        assert frontend.take_in([(handle, token)]).changed == [state]
    assert frontend.take_in([(handle, tokens[-1])], [Finished(handle, "length")]).changed == [state]
    late = state.output()
    assert late.finished
    assert late.outputs[0].finish_reason == "length"
    if kind == DELTA:
        assert (first.text + late.outputs[0].text, first.token_ids + late.outputs[0].token_ids) == (TEXT, tokens)
    else:
        assert (late.outputs[0].text, late.outputs[0].token_ids) == (TEXT, tokens)
    assert late.metrics is not None
    assert late.metrics.finished_time == frontend.now, "when it ended, not when it was looked at"


def test_an_output_once_given_never_changes() -> None:
    frontend = Frontend()
    (handle,) = frontend.add()
    (first,) = frontend.step([(handle, ids("a")[0])]).outputs
    kept = first.outputs[0].token_ids.copy()
    frontend.step([(handle, ids("b")[0])])
    assert first.outputs[0].token_ids == kept


def test_prompt_and_ids_are_repeated_in_outputs() -> None:
    frontend = Frontend()
    (handle,) = frontend.add(prompt="hello")
    (output,) = play(frontend, handle, [50])
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "hello", TOKENIZER.encode("hello"))


def test_a_prompt_that_a_caller_changes_in_an_output_is_not_what_is_sent_again() -> None:
    frontend = Frontend()
    request = frontend.input.process_inputs("r", [5, 6, 7], SamplingParams(max_tokens=4), own_params=True)
    (message,) = core_messages(request, frontend.handles)
    frontend.output.add(request, [message.handle], frontend.now)
    (output,) = frontend.step([(message.handle, 9)]).outputs
    assert output.prompt_token_ids == [5, 6, 7]
    output.prompt_token_ids += output.outputs[0].token_ids
    assert message.prompt_token_ids == [5, 6, 7]


def test_several_tokens_of_one_request_in_one_step_keep_their_order() -> None:
    frontend = Frontend()
    (a,), (b,) = frontend.add("a"), frontend.add("b")
    tokens = ids("one two three")
    outputs = frontend.step([(a, tokens[0]), (b, 70), (a, tokens[1]), (a, tokens[2])]).outputs
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert outputs[0].outputs[0].token_ids == tokens[:3]


def test_tokens_of_requests_no_longer_known_are_dropped() -> None:
    frontend = Frontend()
    assert frontend.step([(99, 5)], [Finished(99, "abort")], [Started(99, 0, 0, 0)]) == ([], [])


# ------------------------------------------------------------------ ends


def test_the_end_of_sequence_token_is_counted_but_not_shown() -> None:
    frontend = Frontend()
    (handle,) = frontend.add(skip_special_tokens=False)
    completion = play(frontend, handle, [*ids("yes"), EOS], "stop")[-1].outputs[0]
    assert (completion.text, completion.token_ids) == ("yes", [*ids("yes"), EOS])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_stop_token_is_the_stop_reason_and_shown_only_if_asked_for() -> None:
    stop = ids("!")[0]
    for include, text in ((False, "yes"), (True, "yes!")):
        frontend = Frontend()
        (handle,) = frontend.add(stop_token_ids=[stop], include_stop_str_in_output=include)
        frontend.step([(handle, token) for token in ids("yes")])
        (output,) = frontend.step([(handle, stop)], [Finished(handle, "stop", stop_token=stop)]).outputs
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == (text, stop)
        assert output.outputs[0].token_ids[-1] == stop


@pytest.mark.parametrize("include", [False, True])
def test_an_end_of_sequence_token_is_the_stop_reason_unless_it_is_the_tokenizers(include: bool) -> None:
    other = ids("!")[0]
    for named, last, expected in (([], other, other), ([], EOS, None), ([other], other, other), ([EOS], EOS, None)):
        frontend = Frontend()
        frontend.input = InputProcessor(TOKENIZER, RequestCheck(FACTS), [EOS, other])
        (handle,) = frontend.add(stop_token_ids=named, include_stop_str_in_output=include, skip_special_tokens=False)
        completion = play(frontend, handle, [*ids("yes"), last], "stop")[-1].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", expected)
        assert completion.text == "yes" + TOKENIZER.decode([last]) * include
        assert completion.token_ids[-1] == last


@pytest.mark.parametrize("reason", ["abort", "stop"])  # "stop": the grammar allows no further token
@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_an_end_without_a_token_keeps_what_came_before(kind: RequestOutputKind, reason: FinishReason) -> None:
    frontend = Frontend()
    (handle,) = frontend.add(output_kind=kind)
    outputs = frontend.step([(handle, token) for token in ids("yes")]).outputs
    outputs += frontend.step([], [Finished(handle, reason)]).outputs
    assert "".join(output.outputs[0].text for output in outputs) == "yes"
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == reason


def test_an_unfinished_character_is_shown_as_such_at_the_end_only() -> None:
    frontend = Frontend()
    (handle,) = frontend.add(output_kind=DELTA)
    outputs = play(frontend, handle, ids("é")[:1])
    assert len(ids("é")) == 2, "the vocabulary cuts this character in two"
    assert [output.outputs[0].text for output in outputs] == ["\ufffd"]


def test_an_error_of_the_core_is_a_finish_reason_with_its_text(caplog: pytest.LogCaptureFixture) -> None:
    frontend = Frontend()
    (handle,) = frontend.add()
    with caplog.at_level(logging.WARNING):
        (output,) = frontend.step(
            [], [Finished(handle, "error", error="OutOfMemoryError", error_text="too long")]
        ).outputs
    assert output.finished
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("error", "OutOfMemoryError: too long")
    assert type(completion.error) is OutOfMemoryError
    assert str(completion.error) == "too long"
    assert "too long" in caplog.text


def test_a_normal_end_has_no_error_and_a_refusal_under_load_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    frontend = Frontend()
    (a,), (b,) = frontend.add("a"), frontend.add("b")
    ends = [Finished(a, "length"), Finished(b, "error", error="OverloadedError", error_text="too many")]
    errors = [output.outputs[0].error for output in frontend.step([], ends).outputs]
    assert errors[0] is None
    assert isinstance(errors[1], OverloadedError)
    assert caplog.text == ""


class BrokenStream:
    """A detokenizer that fails at token 99."""

    def push(self, token: int) -> str:
        return {50: "a", 51: "b"}[token]

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("at_end", [False, True])
def test_a_text_that_can_not_be_made_fails_its_own_completion_alone(
    at_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_state, "text_stream", lambda *_: BrokenStream())
    frontend = Frontend()
    (bad,), (good,) = frontend.add("bad"), frontend.add("good")
    ends = [Finished(bad, "length")] if at_end else []
    (first, second), aborts = frontend.step([(bad, 99), (good, 50)], ends)
    assert (first.request_id, first.finished, first.outputs[0].finish_reason) == ("bad", True, "error")
    assert isinstance(first.outputs[0].error, RequestFailedError)
    assert "its text could not be made (KeyError: 99)" in str(first.outputs[0].error)
    assert aborts == ([] if at_end else [bad]), "the core is told, unless it said the end itself"
    assert (second.outputs[0].text, second.finished) == ("a", False)
    assert [output.request_id for output in frontend.step([(bad, 50), (good, 51)]).outputs] == ["good"]


def test_without_detokenizing_there_are_ids_alone() -> None:
    for frontend, params in ((Frontend(), {"detokenize": False}), (Frontend(None), {})):
        (handle,) = frontend.add(prompt=[5, 6], **params)
        completion = play(frontend, handle, [50, 51, EOS], "stop")[-1].outputs[0]
        assert (completion.text, completion.token_ids) == ("", [50, 51, EOS])


# ------------------------------------------------------------------ stop strings


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_request_here_and_aborts_it_in_the_core(kind: RequestOutputKind, include: bool) -> None:
    frontend = Frontend()
    (handle,) = frontend.add(output_kind=kind, stop=["t, n", "never"], include_stop_str_in_output=include)
    tokens = ids("seven, eight, nine, ten")
    outputs, aborts = [], []
    for token in tokens:
        processed = frontend.step([(handle, token)])
        outputs += processed.outputs
        aborts += processed.aborts
    completion = outputs[-1].outputs[0]
    text = "".join(o.outputs[0].text for o in outputs) if kind == DELTA else completion.text
    assert text == ("seven, eight, n" if include else "seven, eigh")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "t, n")
    assert outputs[-1].finished
    assert aborts == [handle]
    all_ids = [t for o in outputs for t in o.outputs[0].token_ids] if kind == DELTA else completion.token_ids
    needed = next(n for n in range(len(tokens)) if "t, n" in TOKENIZER.decode(tokens[:n]))
    assert all_ids == tokens[:needed], "up to and including the token that completed it"
    assert len(frontend.output) == 0


def test_tokens_after_the_stop_string_in_the_same_step_are_dropped() -> None:
    frontend = Frontend()
    (handle,) = frontend.add(stop="b")
    a, b, c = ids("a")[0], ids("b")[0], ids("c")[0]
    (output,) = frontend.step([(handle, a), (handle, b), (handle, c)], [Finished(handle, "length")]).outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("a", [a, b])
    assert output.outputs[0].finish_reason == "stop"
    frontend = Frontend()
    (handle,) = frontend.add(stop="b")
    (output,) = frontend.step([(handle, b), (handle, EOS)], [Finished(handle, "stop", EOS)]).outputs
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ([b], "b")


def test_held_back_text_is_shown_when_the_request_ends_otherwise() -> None:
    frontend = Frontend()
    (handle,) = frontend.add(stop="bcd", output_kind=DELTA)
    tokens = [ids(letter)[0] for letter in "abc"]
    outputs = play(frontend, handle, tokens)
    assert [output.outputs[0].text for output in outputs] == ["a", "", "bc"]


def test_min_tokens_holds_for_stop_strings_too() -> None:
    frontend = Frontend()
    (handle,) = frontend.add(stop="a", min_tokens=2, output_kind=DELTA)
    a = ids("a")[0]
    texts = [frontend.step([(handle, a)]).outputs[0].outputs[0] for _ in range(3)]
    assert [text.text for text in texts] == ["a", "a", ""]
    assert texts[-1].finish_reason == "stop"


# ------------------------------------------------------------------ several completions


def test_completions_of_one_request_come_together_in_order_of_their_index() -> None:
    frontend = Frontend()
    handles = frontend.add(n=3)
    order = handles[::-1]
    (output,) = frontend.step([(handle, 40 + handle) for handle in order]).outputs
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [completion.token_ids for completion in output.outputs] == [[40 + handle] for handle in handles]
    (output,) = frontend.step([(handles[1], 60)], [Finished(handles[1], "length")]).outputs
    assert not output.finished
    assert [completion.finish_reason for completion in output.outputs] == [None, "length", None]
    ends = [Finished(handles[0], "stop", EOS), Finished(handles[2], "length")]
    (output,) = frontend.step([(handles[0], EOS), (handles[2], 61)], ends).outputs
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["stop", "length", "length"]


def test_a_delta_of_several_completions_holds_what_is_new_and_each_end_once() -> None:
    frontend = Frontend()
    first, second = frontend.add(n=2, output_kind=DELTA)
    (output,) = frontend.step([(second, 50)]).outputs
    assert [completion.index for completion in output.outputs] == [1]
    (output,) = frontend.step([(first, 51)], [Finished(second, "abort")]).outputs
    assert [(c.index, c.token_ids, c.finish_reason) for c in output.outputs] == [(0, [51], None), (1, [], "abort")]
    (output,) = frontend.step([(first, 52)], [Finished(first, "length")]).outputs
    assert output.finished
    assert [(c.index, c.token_ids, c.finish_reason) for c in output.outputs] == [(0, [52], "length")]


def test_the_only_output_of_several_completions_comes_when_the_last_has_ended() -> None:
    frontend = Frontend()
    first, second = frontend.add(n=2, output_kind=FINAL_ONLY)
    assert frontend.step([(second, 50)], [Finished(second, "length")]).outputs == []
    (output,) = frontend.step([(first, 51)], [Finished(first, "length")]).outputs
    assert [completion.token_ids for completion in output.outputs] == [[51], [50]]


# ------------------------------------------------------------------ abort, metrics


def test_an_abort_gives_one_last_output_and_the_handles_still_running() -> None:
    frontend = Frontend()
    first, second = frontend.add(n=2)
    (other,) = frontend.add("other")
    frontend.step([(first, 50), (second, 51)], [Finished(first, "length")])
    processed = shown(frontend.output.abort(["r", "unknown", "r"], 5.0))
    assert processed.aborts == [second]
    (output,) = processed.outputs
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["length", "abort"]
    assert frontend.step([(second, 52)], [Finished(second, "abort")]) == ([], [])
    assert frontend.output.abort(["r"], 6.0) == ([], [], [])
    assert len(frontend.output) == 1
    assert len(frontend.step([(other, 50)]).outputs) == 1


def test_metrics_tell_when_things_happened() -> None:
    frontend = Frontend()  # added at 100, with arrival time 99
    (handle,) = frontend.add()
    frontend.step([(handle, 50)], started=[Started(handle, queued_s=0.25, first_token_s=0.5, num_cached_tokens=16)])
    (output,) = frontend.step([(handle, 51)], [Finished(handle, "length", num_preemptions=2)]).outputs
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.time_in_queue) == (99.0, 0.25)
    assert (metrics.first_scheduled_time, metrics.first_token_time) == (100.25, 100.75)
    assert (metrics.last_token_time, metrics.finished_time) == (102.0, 102.0)
    assert (metrics.num_preemptions, output.num_cached_tokens) == (2, 16)


def test_any_order_of_tokens_gives_each_request_its_own_text() -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    rng = random.Random(seed)
    frontend = Frontend()
    texts = {f"r{at}": " ".join(rng.choices(["one", "two,", "é", "東京", "🙂", "\n"], k=8)) for at in range(20)}
    left = {frontend.add(name, output_kind=DELTA)[0]: (name, ids(text)) for name, text in texts.items()}
    found = dict.fromkeys(texts, "")
    while left:
        tokens, ends = [], []
        for handle in rng.sample(sorted(left), rng.randint(1, len(left))):
            _, waiting = left[handle]
            count = rng.randint(1, 3)
            tokens += [(handle, token) for token in waiting[:count]]
            del waiting[:count]
            if not waiting:
                del left[handle]
                ends.append(Finished(handle, "length"))
        for output in frontend.step(tokens, ends).outputs:
            found[output.request_id] += output.outputs[0].text
    assert found == texts


def test_a_round_goes_to_another_core_when_its_own_has_left() -> None:
    sent: list[int | None] = []

    def send(message: AddRequest, rank: int | None = None) -> None:
        check_rank(rank, [0, 2])
        sent.append(rank)

    for rank in (None, 2, 1):
        send_round(send, cast(Any, None), rank)
    assert sent == [None, 2, None]


def test_a_row_of_the_vocabulary_that_is_no_token_has_no_text() -> None:
    """Some tokenizers raise for it; their requests go on."""

    class Strict:
        def decode(self, token: int) -> str:
            return ["a", "b"][token]

    processor = OutputProcessor(cast(Any, Strict()), iter(()))
    assert [processor._piece(token) for token in (1, 2, 0, 2)] == ["b", "", "a", ""]
