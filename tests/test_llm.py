"""LLM with the embedded model and a core in a separate process: prompts in, completions out."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stand_in_core
from mainspring import LLM, RequestOutput, SamplingParams
from mainspring.demo import MODEL_PATH
from mainspring.engine import llm_engine, request_queue
from mainspring.ipc.config import EngineConfig, ModelConfig
from mainspring.ipc.errors import (
    InvalidArgumentError,
    InvalidRequestError,
    ModelNotFoundError,
    NotSupportedError,
    OverloadedError,
    UnknownArgumentError,
)
from mainspring.ipc.messages import AddRequest, Finished, ModelFacts, Outputs
from stand_in_core import StandInOwner
from wire import eventually

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as made:
        yield made


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    prompts = [f"Count up from {at} to {at + 2 + at % 7}:" for at in range(20)]
    lengths = [1 + 5 * (at % 4) for at in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished for output in outputs)


def test_one_prompt_of_each_form_is_one_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("What is 2 plus 3?")
    forms: list[Any] = ["What is 2 plus 3?", {"prompt": "What is 2 plus 3?"}, ids, {"prompt_token_ids": ids}]
    together = texts(llm.generate(forms, GREEDY, use_tqdm=False))
    assert len(set(together)) == 1
    assert [texts(llm.generate(form, GREEDY, use_tqdm=False)) for form in forms] == [[text] for text in together]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_a_chat_goes_through_the_models_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "What is two plus three?"}], GREEDY, use_tqdm=False)
    assert output.prompt == "<|begin|><|user|>What is two plus three?<|assistant|>"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    completion = output.outputs[0]
    assert completion.text.strip()
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] == llm.get_tokenizer().eos_token_id


def test_several_conversations_and_a_reply_to_continue(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Count up from 3 to 9."}, {"role": "assistant", "content": "3, 4, 5,"}]
    several = llm.chat([conversation[:1], conversation[:1]], GREEDY, use_tqdm=False)
    assert len(several) == 2
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert str(output.prompt).endswith("<|assistant|>3, 4, 5,")
    with pytest.raises(InvalidRequestError, match="both"):
        llm.chat(conversation, GREEDY, continue_final_message=True)
    (output,) = llm.chat(conversation[:1], GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}{{ more }}",
                         chat_template_kwargs={"more": "!"})  # fmt: skip
    assert output.prompt == "Count up from 3 to 9.!"


def test_default_parameters_come_from_the_checkpoint(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert defaults.temperature == 0.0, "the embedded model's generation config says do_sample: false"
    greedy = texts(llm.generate("What is 2 plus 3?", SamplingParams(temperature=0.0), use_tqdm=False))
    assert texts(llm.generate("What is 2 plus 3?", use_tqdm=False)) == greedy


def test_a_seed_repeats_and_completions_of_one_prompt_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=7, max_tokens=24, ignore_eos=True)
    story = "Tell me a long story about a fox."
    (first,), (second,) = (llm.generate(story, params, use_tqdm=False) for _ in range(2))
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 4
    unseeded = [llm.generate(story, SamplingParams(temperature=1.5, max_tokens=24), use_tqdm=False) for _ in range(2)]
    assert texts(unseeded[0]) != texts(unseeded[1])


def test_text_is_what_the_tokens_decode_to(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompts = [f"Tell me a short story about a {animal}." for animal in ("cat", "dog", "fox")]
    params = SamplingParams(temperature=3.0, max_tokens=60, seed=1, skip_special_tokens=False, ignore_eos=True)
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_stop(llm: LLM, include: bool) -> None:
    prompt = "Tell me a long story about an owl."
    whole = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)[0].outputs[0]
    stop = whole.text[20:26]
    params = SamplingParams(temperature=0.0, max_tokens=60, stop=[stop], include_stop_str_in_output=include)
    completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert completion.text == whole.text[: whole.text.index(stop) + (len(stop) if include else 0)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(whole.token_ids)
    assert not llm.llm_engine.has_unfinished_requests()


def test_max_tokens_none_goes_on_to_the_end_of_sequence_or_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    assert llm.generate("What is 2 plus 3?", params, use_tqdm=False)[0].outputs[0].finish_reason == "stop"


def test_metrics_and_prefix_cache_hits_are_told(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = "Spell each of these words: " + "morning, garden, window, " * 8
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens or 0) == 0
    assert (second.num_cached_tokens or 0) >= 16
    metrics = second.metrics
    assert metrics is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert all(earlier <= later for earlier, later in itertools.pairwise(times))  # type: ignore[operator]


def test_a_bad_prompt_in_a_batch_is_named_and_nothing_is_sent(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt 1: the prompt is empty"):
        llm.generate(["hello", "", "hello"], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"prompt 1: .*max_model_len is 4096"):
        llm.generate(["hello", [5] * 5000], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1])
    with pytest.raises(NotSupportedError, match="lora_request"):
        llm.generate("a", GREEDY, lora_request=object())  # type: ignore[arg-type]
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate("hello", GREEDY, use_tqdm=False)) == 1


def test_the_progress_bar_can_be_ones_own(llm: LLM) -> None:
    class Bar:
        made: list[Bar] = []  # noqa: RUF012

        def __init__(self, total: int, **options: Any) -> None:
            self.total, self.done, self.text, self.closed = total, 0, "", False
            self.made.append(self)

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.text = text

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.closed = True

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.total, bar.done, bar.closed) == (3, 3, True)
    assert "tokens/s" in bar.text


def test_threads_take_turns_and_each_gets_its_own(llm: LLM) -> None:
    found: dict[int, list[str]] = {}

    def ask(at: int) -> None:
        outputs = llm.generate([f"What is {at} plus {other}?" for other in range(4)], GREEDY, use_tqdm=False)
        found[at] = [str(output.prompt) for output in outputs]

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {at: [f"What is {at} plus {other}?" for other in range(4)] for at in range(4)}


def test_an_unknown_argument_or_model_is_said_before_a_core_is_started() -> None:
    with pytest.raises(UnknownArgumentError, match="did you mean 'max_num_seqs'"):
        LLM(max_num_seq=4)
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        LLM("/no/such/model")


# ------------------------------------------------------------------ a daemon, and its limits


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInOwner]:
    config = EngineConfig(model_config=ModelConfig(model=str(MODEL_PATH)))
    monkeypatch.setattr(stand_in_core, "EngineConfig", lambda: config)
    with stand_in_core.stand_in(address=f"ipc://{tmp_path}/core.sock") as owner:
        yield owner


def test_an_llm_on_a_daemon_generates(daemon: StandInOwner) -> None:
    for model in (None, str(MODEL_PATH), os.path.relpath(MODEL_PATH)):
        with LLM(model, connect=daemon.address, skip_tokenizer_init=True, name="mine") as llm:
            outputs = llm.generate([[3], [9]], SamplingParams(max_tokens=3), use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [[3, 4, 5], [9, 10, 11]]
            assert eventually(lambda: daemon.core.sessions)  # the core is told after the frontend
            assert daemon.core.sessions[-1][1] == "mine"


def test_options_of_the_daemon_are_refused_by_name(daemon: StandInOwner) -> None:
    with pytest.raises(InvalidArgumentError, match="max_num_seqs is given beside connect"):
        LLM(connect=daemon.address, max_num_seqs=4)
    with pytest.raises(UnknownArgumentError, match="did you mean 'server_key'"):
        LLM(connect=daemon.address, server_kye="x")
    with pytest.raises(InvalidArgumentError, match=f"model mismatch: model is 'other', .* serves '{MODEL_PATH}'"):
        LLM("other", connect=daemon.address, skip_tokenizer_init=True)


class BusyClient:
    """A client of a core with limits: each call of `get_outputs` ends requests, the oldest first."""

    def __init__(self, config: Any, limit: float = math.inf, token_limit: float = math.inf) -> None:
        self.config = config
        self.model = ModelFacts(vocab_size=1024, hidden_size=4, max_model_len=64, dtype="float32")
        self.limit, self.token_limit = limit, token_limit
        self.running: deque[AddRequest] = deque()
        self.refused: deque[AddRequest] = deque()
        self.most = self.most_tokens = self.refusals = 0

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = ()) -> None:
        tokens = sum(len(one.prompt_token_ids) + one.sampling.max_tokens for one in (*self.running, request))
        if len(self.running) >= self.limit or tokens > self.token_limit:
            self.refusals += 1
            self.refused.append(request)
            return
        self.running.append(request)
        self.most, self.most_tokens = max(self.most, len(self.running)), max(self.most_tokens, tokens)

    def abort(self, handles: Sequence[int]) -> None:
        raise AssertionError("nothing here is to be aborted")

    def get_outputs(self, timeout: float | None = None) -> Outputs:
        refused = [Finished(one.handle, "error", error="OverloadedError", error_text="busy") for one in self.refused]
        self.refused.clear()
        if refused:
            return Outputs([], [], finished=refused)
        request = self.running.popleft()
        return Outputs([request.handle], [request.prompt_token_ids[0]], finished=[Finished(request.handle, "length")])

    def close(self) -> None:
        pass


def busy_llm(monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], **core: float) -> tuple[LLM, BusyClient]:
    monkeypatch.setattr(llm_engine, "make_client", lambda config, multiprocess: BusyClient(config, **core))
    llm = LLM(skip_tokenizer_init=True, **limits)
    client: Any = llm.llm_engine.engine_core
    return llm, client


@pytest.mark.parametrize(
    ("limits", "core"),
    [
        ({"max_requests_per_frontend": 6}, {"limit": 6}),
        ({"max_tokens_per_frontend": 100}, {"token_limit": 100}),
        ({"max_requests_per_frontend": 4, "max_tokens_per_frontend": 90}, {"limit": 4, "token_limit": 90}),
    ],
)
def test_a_batch_fills_a_frontends_limits_and_never_passes_them(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], core: dict[str, float]
) -> None:
    llm, client = busy_llm(monkeypatch, limits, **core)
    params = [SamplingParams(n=1 + at % 3, max_tokens=10 + at % 5) for at in range(40)]
    outputs = llm.generate([[at] for at in range(40)], params, use_tqdm=False)
    assert [[c.token_ids for c in output.outputs] for output in outputs] == [[[at]] * (1 + at % 3) for at in range(40)]
    assert client.refusals == 0
    assert client.most > client.limit - 3 or client.most_tokens > client.token_limit - 3 * 15


def test_requests_that_a_busy_core_refuses_are_sent_again_until_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "FIRST_PAUSE_S", 0.001)
    llm, client = busy_llm(monkeypatch, {}, limit=3)  # a limit unknown to the client
    outputs = llm.generate([[at] for at in range(30)], SamplingParams(max_tokens=5), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[at] for at in range(30)]
    assert client.refusals > 0


def test_patience_with_a_busy_core_ends_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(request_queue, "PATIENCE_S", 0.2)
    llm, client = busy_llm(monkeypatch, {}, limit=0)
    with pytest.raises(OverloadedError, match="busy") as raised:
        llm.generate([[5]], use_tqdm=False)
    assert raised.value.outputs is not None
    (output,) = raised.value.outputs
    assert output.outputs[0].finish_reason == "error"
    assert isinstance(output.outputs[0].error, OverloadedError)
    assert 1 < client.refusals < 20, "with growing pauses"


def test_a_request_above_a_limit_by_itself_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, client = busy_llm(monkeypatch, {"max_requests_per_frontend": 2}, limit=2)
    monkeypatch.setattr(client, "abort", lambda handles: None)
    (output,) = llm.generate([[5]], SamplingParams(n=3), use_tqdm=False, on_error="return")
    assert [type(completion.error) for completion in output.outputs] == [type(None), type(None), OverloadedError]
    assert client.refusals == 1


def test_a_small_batch_does_not_wait_for_the_large_one_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, client = busy_llm(monkeypatch, {})
    ended: list[int] = []

    def ask(token: int) -> None:
        llm.generate([[token]], use_tqdm=False)
        ended.append(token)

    small, idle, end_one = threading.Thread(target=ask, args=(9,)), iter(range(10_000)), client.get_outputs

    def get_outputs(timeout: float | None = None) -> Outputs:
        if small.ident is None:
            small.start()
        if len(client.running) == 2:
            client.running.rotate(1)  # so that the small one ends
        elif small.is_alive() and next(idle, None) is not None:
            time.sleep(0.001)
            return Outputs([], [])
        return end_one()

    monkeypatch.setattr(client, "get_outputs", get_outputs)
    ask(5)
    small.join()
    assert ended == [9, 5]


def test_a_request_that_can_not_be_sent_fails_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, client = busy_llm(monkeypatch, {"max_requests_per_frontend": 2})
    send, end_one = client.add_request, client.get_outputs

    def add_request(request: AddRequest, tensors: Sequence[np.ndarray] = ()) -> None:
        if request.prompt_token_ids == [9]:
            raise OverflowError("too long for a message")
        send(request, tensors)

    def get_outputs(timeout: float | None = None) -> Outputs:
        if client.running[0].prompt_token_ids == [5]:
            llm.enqueue([[9]], use_tqdm=False)  # which has to wait
        return end_one()

    monkeypatch.setattr(client, "add_request", add_request)
    monkeypatch.setattr(client, "get_outputs", get_outputs)
    monkeypatch.setattr(client, "abort", lambda handles: None)
    outputs = llm.generate([[5], [6], [7]], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[5], [6], [7]]
    with pytest.raises(OverflowError, match="too long"):
        llm.wait_for_completion(use_tqdm=False)
    with pytest.raises(OverflowError, match="too long"):
        llm.enqueue([[9]], use_tqdm=False)
    assert len(llm.generate([[8]], use_tqdm=False)) == 1
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_functions_on_logits_are_refused_before_anything_is_sent(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(max_tokens=2, logits_processors=[lambda ids, logits: logits])]
    with pytest.raises(NotSupportedError, match=r"prompt 1.*logits_processors are functions"):
        llm.generate(["a", "b"], params, use_tqdm=False)


INTERRUPTED = """
import sys
from mainspring import LLM, SamplingParams
llm = LLM(max_num_seqs=4)
print("ready", flush=True)
try:
    llm.generate(["Tell me a long story."] * 400, SamplingParams(max_tokens=3000, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", llm.llm_engine.has_unfinished_requests(), flush=True)
print(llm.generate("What is two plus three?", use_tqdm=False)[0].outputs[0].finish_reason)
"""


@pytest.mark.slow
def test_ctrl_c_aborts_the_batch_and_leaves_the_engine_usable() -> None:
    script = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    threading.Timer(1.0, lambda: script.send_signal(signal.SIGINT)).start()
    rest, _ = script.communicate(timeout=60)
    assert rest.splitlines() == ["interrupted False", "stop"]
    assert script.returncode == 0


@pytest.mark.slow
def test_a_frontend_generates_with_torch_and_transformers_out_of_reach() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from mainspring import LLM\n"
        "llm = LLM()\n"
        "print(llm.generate('What is two plus three?', use_tqdm=False)[0].outputs[0].finish_reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "stop\n", done.stderr
