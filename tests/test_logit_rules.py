"""Rules that change logits before sampling: each equals transformers' processor or a formula, for single rows and
through the engine, independent of batch, cache and preemption. Also the parameters: ranges, encoding, hostile values.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

import tiny
from harness import make_core, message, run_core
from mainspring import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from mainspring.core.loop import EngineCore
from mainspring.core.plan.step import NewSequence
from mainspring.core.worker.device import Device
from mainspring.core.worker.logit_rules import Choosing, LogitRules
from mainspring.core.worker.registry import Registry
from mainspring.demo import MODEL_PATH
from mainspring.engine import llm_engine
from mainspring.engine.request.input_processor import InputProcessor, core_messages
from mainspring.engine.text.tokenizer import load_tokenizer
from mainspring.ipc import codec
from mainspring.ipc.config import CacheConfig, EngineConfig, LoadConfig, ModelConfig, SchedulerConfig
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, MainspringError, NotSupportedError
from mainspring.ipc.messages import AddRequest, Finished, Logprobs, ModelFacts, Outputs, Sampling, Tensor
from mainspring.ipc.request_check import RequestCheck
from plain import Job, Plain, collect, make_engine, run, run_all
from test_flood import work

VOCAB = 40
SLOTS = 12


# ------------------------------------------------------------------ each rule, row by row


def expected(sampling: Sampling, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Transformers' processors in the order that logit_rules.py names; fp32 ``[vocab]``."""
    scores = logits.float()[None].clone()
    whole = torch.tensor([[*prompt, *output]])
    own = torch.tensor([[-1, *output]])  # bad words match only the output; no token equals -1
    if sampling.logit_bias:
        scores = SequenceBiasLogitsProcessor({(t,): b for t, b in sampling.logit_bias.items()})(own, scores)
    if sampling.allowed_token_ids:
        allowed = torch.zeros(scores.shape[1], dtype=torch.bool)
        allowed[sampling.allowed_token_ids] = True
        scores = scores.masked_fill(~allowed, -math.inf)
    if sampling.bad_words:
        scores = NoBadWordsLogitsProcessor(sampling.bad_words)(own, scores)
    if sampling.min_tokens and sampling.stop_token_ids:
        until = MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_tokens, sampling.stop_token_ids)
        scores = until(whole, scores)
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(whole, scores)
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=scores.shape[1]).float()
    return (scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0))[0]


def random_sampling(r: random.Random, vocab: int = VOCAB) -> Sampling:
    """Some of the rules, each with probability one half."""

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if r.random() < 0.4 else otherwise

    tokens = range(vocab)
    return Sampling(
        50,
        min_tokens=maybe(r.randint(1, 12), 0),
        stop_token_ids=r.sample(tokens, r.randint(0, 3)),
        presence_penalty=maybe(r.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(r.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(r.choice([0.5, 1.1, 1.7]), 1.0),
        logit_bias=maybe({t: r.uniform(-5, 5) for t in r.sample(tokens, 4)}, {}),
        allowed_token_ids=maybe(r.sample(tokens, r.randint(1, vocab // 2)), []),
        bad_words=maybe([r.choices(range(6), k=r.randint(1, 3)) for _ in range(6)], []),
    )


def seated(sampling: Sampling, prompt: list[int], output: list[int], slot: int) -> NewSequence:
    return NewSequence(slot, np.array([*prompt, *output], np.int32), len(prompt), sampling)


def make_rules() -> LogitRules:
    return LogitRules(VOCAB, Device(torch.device("cpu")), Registry())


def applied(rules: LogitRules, logits: torch.Tensor, step: Choosing) -> torch.Tensor:
    """What the draw chooses from, before temperature and limits."""
    return rules.in_draw(step).amend(rules.apply(logits, step))


def choosing(
    slots: np.ndarray, positions: np.ndarray, sequences: list[NewSequence], outputs: dict[int, list[int]]
) -> Choosing:
    """The arguments that the sampler gives to the rules."""
    tokens = {
        s.slot: [*s.tokens[: s.prompt_len].tolist(), *outputs[s.slot]] for s in sequences if s.sampling.looks_back
    }
    return Choosing(slots, positions, tokens, {}, set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_rules_of_random_rows_are_transformers_own(seed: int, dtype: torch.dtype) -> None:
    """Slots are reused, requests start with or without output, and outputs grow with the counts kept on the device."""
    r, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    rules = make_rules()
    running: dict[int, NewSequence] = {}
    outputs: dict[int, list[int]] = {}
    changed = 0
    for _ in range(40):
        for slot in r.sample(range(SLOTS), r.choice([0, 0, 1, 3])):
            sampling = Sampling(50, stop_token_ids=[3]) if r.random() < 0.3 else random_sampling(r)
            output = r.choices(range(6), k=r.choice([0, 0, 5]))
            running[slot] = seated(sampling, r.choices(range(VOCAB), k=r.randint(1, 9)), output, slot)
            outputs[slot] = output.copy()
            rules.release(slot)
            rules.admit(running[slot])
        rows = r.sample(sorted(running), r.randint(0, len(running)))
        if not rows:
            continue
        slots = np.array(rows, np.int64)
        logits = (3 * torch.randn(len(rows), VOCAB, generator=numbers)).to(dtype)
        positions = np.array([running[s].prompt_len + len(outputs[s]) for s in rows], np.int64)
        given = logits.clone()
        found = applied(rules, logits, choosing(slots, positions, [running[s] for s in rows], outputs))
        assert torch.equal(logits, given), "log probabilities are computed from them later"
        for row, slot in enumerate(rows):
            request = running[slot]
            prompt = request.tokens[: request.prompt_len].tolist()
            wanted = expected(request.sampling, prompt, outputs[slot], given[row])
            torch.testing.assert_close(found[row].float(), wanted, rtol=1e-6, atol=1e-6)
            if request.sampling in (Sampling(50), Sampling(50, stop_token_ids=[3])):
                assert torch.equal(found[row].to(dtype), given[row])
            changed += not torch.equal(found[row].float(), given[row].float())
        tokens = r.choices(range(6), k=len(rows))  # few different tokens, so that words occur
        rules.chosen(torch.tensor(tokens), slots)
        for slot, token in zip(rows, tokens, strict=True):
            outputs[slot].append(token)
    assert changed > 50


ONE_RULE = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {2: 4.0, 7: -100.0}},
    "allowed": {"allowed_token_ids": [1, 2, 3, 30]},
    "word": {"bad_words": [[2]]},
    "words": {"bad_words": [[1, 2, 3], [2, 9]]},
    "minimum": {"min_tokens": 4, "stop_token_ids": [2, 5]},
}


@pytest.mark.parametrize("name", ONE_RULE)
def test_each_rule_alone_changes_something_and_is_transformers_own(name: str) -> None:
    sampling = Sampling(50, **ONE_RULE[name])  # type: ignore[arg-type]
    prompt, output = [2, 5, 2, 8], [4, 1, 2]
    rules = make_rules()
    request = seated(sampling, prompt, output, 1)
    rules.admit(request)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    given = logits.clone()
    found = applied(rules, logits, choosing(np.array([1]), np.array([7]), [request], {1: output}))
    torch.testing.assert_close(found[0], expected(sampling, prompt, output, given[0]), rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, given)


def test_words_that_are_not_about_to_end_cost_nothing() -> None:
    def cost(count: int) -> int:
        words = [[9, n % 20, n % 30] for n in range(count)]
        request = seated(Sampling(50, bad_words=words), [1], [9, 30], 1)
        rules, logits = make_rules(), torch.zeros(1, VOCAB)
        rules.admit(request)
        return work(lambda: rules.apply(logits, choosing(np.array([1]), np.array([3]), [request], {1: [9, 30]})))

    cost(1)
    assert cost(4000) == cost(10)


def test_rows_without_rules_are_handed_back_as_they_are() -> None:
    rules = make_rules()
    rules.admit(seated(Sampling(5, stop_token_ids=[1]), [1], [], 2))
    logits = torch.randn(2, VOCAB).bfloat16()
    assert applied(rules, logits, choosing(np.array([2, 3]), np.array([1, 1]), [], {})) is logits


# ------------------------------------------------------------------ through the engine, greedy


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"), tokenizer=True)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[LLMEngine]:
    with make_engine(path) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(path: Path) -> Plain:
    return Plain(path)


PROMPT = list(range(40, 60))
LENGTH = 24
LETTERS = [81, 82, 83, 90, 92, 76]  # o p q x z j
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "presence": {"presence_penalty": 2.0, "allowed_token_ids": list(range(40, 80))},
    "frequency": {"frequency_penalty": 0.9, "allowed_token_ids": list(range(40, 80))},
    "repetition": {"repetition_penalty": 1.5, "allowed_token_ids": list(range(40, 80))},
    "few": {"allowed_token_ids": list(range(40, 80))},
    "negative": {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.6},
    "bias": {"logit_bias": {5: 4.0, 77: 3.5, 118: -100.0}},
    "allowed": {"allowed_token_ids": [*LETTERS, 5]},
    "words": {"allowed_token_ids": LETTERS, "bad_words": ["qx", "z", "xj", "jjq", "pp", "qz"]},
    "all": {
        "allowed_token_ids": LETTERS,
        "bad_words": ["qx", "zp", "xxq"],
        "logit_bias": {90: 1.0},
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "minimum": {"min_tokens": LENGTH, "stop_token_ids": list(range(0, 384, 2))},
}


def rules_of(
    params: SamplingParams, bad_words: list[list[int]], prompt: list[int]
) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    sampling = Sampling(
        params.max_tokens or 0,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids or [],
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=params.allowed_token_ids or [],
        bad_words=bad_words,
    )
    return lambda output, logits: expected(sampling, prompt, output, logits)


def jobs() -> dict[str, Job]:
    return {name: (PROMPT, SamplingParams(**{**GREEDY, **fields})) for name, fields in RULES.items()}


def test_greedy_under_rules_is_a_plain_loop_over_transformers(engine: LLMEngine, plain: Plain) -> None:
    found = {name: output.outputs[0].token_ids for name, output in run(engine, jobs()).items()}
    tokenizer = engine.get_tokenizer()
    for name, (_, params) in jobs().items():
        words = [tokenizer.encode(word, add_special_tokens=False) for word in params.bad_words or []]
        assert found[name] == plain.greedy(PROMPT, LENGTH, rules_of(params, words, PROMPT)), name
    assert len({tuple(tokens) for tokens in found.values()}) == len(RULES), "a rule without effect shows nothing"
    for name in ("words", "all"):
        text = tokenizer.decode(found[name])
        assert len(set(text)) > 1
        assert not any(word in text for word in RULES[name]["bad_words"]), text
    assert set(found["none"]) & set(range(0, 384, 2)), "min_tokens holds something back"


def test_a_bad_word_is_also_banned_after_a_space_where_that_is_another_token(engine: LLMEngine) -> None:
    """As in vLLM: " twelve" and "twelve" begin with different tokens and have the same number of tokens."""
    tokenizer = engine.get_tokenizer()
    words = ["tw", "  tw", "qx", "the"]
    sent = engine.input_processor.process_inputs("r", [5], SamplingParams(bad_words=words)).bad_words
    for word in words:
        assert tokenizer.encode(word.lstrip(), add_special_tokens=False) in sent
    spaced = tokenizer.encode(" tw", add_special_tokens=False)
    assert (spaced in sent) == (len(spaced) == len(tokenizer.encode("tw", add_special_tokens=False)))
    assert tokenizer.encode(" qx", add_special_tokens=False) not in sent, (
        "it has a token more, and ends with a bad word anyway"
    )


def test_in_a_prompt_of_embeddings_only_the_output_is_penalised(engine: LLMEngine) -> None:
    embeds = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    prompt = {"prompt_embeds": embeds}
    few = {**GREEDY, "allowed_token_ids": [0, 5, 6], "max_tokens": 12}
    found = run(
        engine,
        {
            "none": (prompt, SamplingParams(**few)),
            "twice": (prompt, SamplingParams(repetition_penalty=1e30, **few)),
        },
    )
    first = found["none"].outputs[0].token_ids[0]
    assert found["twice"].outputs[0].token_ids[0] == first, "the zeros that stand for its tokens are not in it"


# ------------------------------------------------------------------ processors of the user


def favour(token: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[token + len(output)] = 1e4
        return logits

    return process


def copying(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A rule that copies the prompt, independent of the model's logits, as a new tensor."""
    wanted = torch.full_like(logits, -50.0)
    wanted[prompt[len(output)]] = 50.0
    return wanted


def test_logits_processors_get_tokens_and_logits_and_decide(engine: LLMEngine, plain: Plain) -> None:
    def no_repeats(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor(output, dtype=torch.int64), -math.inf)

    few = {**GREEDY, "max_tokens": 12}
    found = run(
        engine,
        {
            "in place": (PROMPT, SamplingParams(logits_processors=[favour(100)], **few)),
            "prompt": (PROMPT, SamplingParams(logits_processors=[copying], **few)),
            "returned": (PROMPT, SamplingParams(logits_processors=[no_repeats], **few)),
            "both": (PROMPT, SamplingParams(logits_processors=[favour(100), copying], **few)),
            "n": (PROMPT, SamplingParams(n=2, logits_processors=[favour(100)], **{**few, "temperature": 1.0})),
            "none": (PROMPT, SamplingParams(**few)),
        },
    )
    tokens = {name: [one.token_ids for one in output.outputs] for name, output in found.items()}
    assert tokens["in place"] == [list(range(100, 112))]
    assert tokens["n"] == [list(range(100, 112))] * 2
    assert tokens["prompt"] == tokens["both"] == [PROMPT[:12]]
    assert tokens["returned"] == [plain.greedy(PROMPT, 12, no_repeats)]
    assert tokens["none"] == [plain.greedy(PROMPT, 12, lambda output, logits: logits)]


def test_processors_come_before_the_other_rules_and_do_not_show_in_log_probabilities(engine: LLMEngine) -> None:
    fields = {**GREEDY, "max_tokens": 3, "logprobs": 0}
    job = SamplingParams(logits_processors=[favour(100)], bad_words=None, logit_bias={100: -2e4}, **fields)
    completion = run(engine, {"a": (PROMPT, job)})["a"].outputs[0]
    assert completion.token_ids[0] != 100
    assert completion.token_ids[1] == 101
    assert completion.logprobs is not None
    assert completion.logprobs[1][101].logprob < -0.01


def test_a_processor_that_leaves_no_token_ends_its_request(engine: LLMEngine) -> None:
    def forbid_all(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits if len(output) < 2 else torch.full_like(logits, -math.inf)

    job = SamplingParams(logits_processors=[forbid_all], **{**GREEDY, "max_tokens": 3})
    completion = run(engine, {"a": (PROMPT, job)})["a"].outputs[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("error", 2)
    assert "no token is left" in str(completion.error)


def test_a_processor_that_is_an_object_is_called_itself_not_a_copy(engine: LLMEngine) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
            self.seen.append(list(output))
            return logits

        def method(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            return self(output, logits)

    called, bound = Recorder(), Recorder()
    params = SamplingParams(logits_processors=[called, bound.method], **{**GREEDY, "max_tokens": 3})
    tokens = run(engine, {"a": (PROMPT, params)})["a"].outputs[0].token_ids
    assert called.seen == bound.seen == [tokens[:count] for count in range(3)]


def test_processors_can_not_go_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        """The members of a client that an engine uses before it refuses a request."""

        in_process, model = False, ModelFacts(1024, 4, 64, "float32", [2])

        def __init__(self, config: EngineConfig, multiprocess: bool) -> None:
            self.config = config

        def close(self) -> None:
            pass

    monkeypatch.setattr(llm_engine, "make_client", Elsewhere)
    with LLMEngine.from_engine_args(EngineArgs()) as engine:
        with pytest.raises(NotSupportedError, match="logits_processors"):
            engine.add_request("a", "x", SamplingParams(logits_processors=[favour(1)]))
        assert not engine.has_unfinished_requests()


# ------------------------------------------------------------------ what is cut, and how often it is told


def test_truncation_keeps_the_end_of_the_prompt(engine: LLMEngine) -> None:
    limit = engine.get_model_config().max_model_len
    assert limit == 256
    long = [3 + i % 300 for i in range(400)]
    params = {"temperature": 0.0, "max_tokens": 1}
    for keep, prompt, left in (
        (5, PROMPT, PROMPT[-5:]),
        (1, PROMPT, PROMPT[-1:]),
        (len(PROMPT), PROMPT, PROMPT),
        (1000, PROMPT, PROMPT),
        (10**30, PROMPT, PROMPT),
        (-1, PROMPT, PROMPT),
        (-1, long, long[-255:]),
        (200, long, long[-200:]),
    ):
        job = (prompt, SamplingParams(truncate_prompt_tokens=keep, **params))
        cut = (left, SamplingParams(**params))
        found = run(engine, {"cut": job, "short": cut})
        assert found["cut"].prompt_token_ids == left
        assert found["cut"].outputs[0].token_ids == found["short"].outputs[0].token_ids
    text = engine.input_processor.process_inputs("r", "one two three", SamplingParams(truncate_prompt_tokens=2))
    assert text.prompt_token_ids == engine.get_tokenizer().encode("one two three")[-2:]


@pytest.mark.parametrize("keep", [None, 300])
def test_a_prompt_that_is_still_too_long_is_refused(engine: LLMEngine, keep: int | None) -> None:
    with pytest.raises(InvalidRequestError, match="max_model_len is 256"):
        engine.add_request("a", [5] * 400, SamplingParams(truncate_prompt_tokens=keep))


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
@pytest.mark.parametrize("whose", ["request", "engine", "both"])
def test_outputs_come_with_the_first_token_then_every_so_many_and_at_the_end(
    path: Path, engine: LLMEngine, kind: RequestOutputKind, whose: str
) -> None:
    fields = {**GREEDY, "max_tokens": 12, "output_kind": kind, "logprobs": 1}
    if whose != "engine":
        fields["stream_interval"] = 4
    if whose == "request":
        outputs = run_all(engine, {"a": (PROMPT, SamplingParams(**fields))})["a"]
    else:
        with make_engine(path, stream_interval=4 if whose == "engine" else 7) as other:
            outputs = run_all(other, {"a": (PROMPT, SamplingParams(**fields))})["a"]
    whole = run(engine, {"a": (PROMPT, SamplingParams(**GREEDY, logprobs=1))})["a"].outputs[0].token_ids[:12]
    counts = [1, 5, 9, 12]
    starts = [0, *counts[:-1]] if kind == RequestOutputKind.DELTA else [0] * 4
    assert [output.outputs[0].token_ids for output in outputs] == [
        whole[start:end] for start, end in zip(starts, counts, strict=True)
    ]
    assert [len(output.outputs[0].logprobs or ()) for output in outputs] == [
        end - start for start, end in zip(starts, counts, strict=True)
    ]
    assert [output.finished for output in outputs] == [False] * 3 + [True]


def test_an_end_between_two_outputs_is_told_at_once(engine: LLMEngine) -> None:
    whole = run(engine, {"a": (PROMPT, SamplingParams(**GREEDY))})["a"].outputs[0].token_ids
    at = next(i for i in range(2, 8) if whole[i] not in whole[:i])
    params = SamplingParams(stop_token_ids=[whole[at]], stream_interval=100, **GREEDY)
    outputs = run_all(engine, {"a": (PROMPT, params)})["a"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, at + 1]
    assert outputs[-1].outputs[0].stop_reason == whole[at]


def test_an_interval_beyond_the_end_tells_the_first_token_and_the_end(engine: LLMEngine) -> None:
    for n, interval in ((1, 10**30), (2, 50)):
        params = SamplingParams(n=n, stream_interval=interval, seed=3, **{**GREEDY, "temperature": 1.0})
        outputs = run_all(engine, {"a": (PROMPT, params)})["a"]
        assert outputs[-1].finished
        assert [len(one.token_ids) for one in outputs[0].outputs if one.token_ids] == [1] * n
        assert len(outputs) == 2


# ------------------------------------------------------------------ ranges

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("presence_penalty", ["1", None, NAN, INF, -INF, -2.1, 2.1, 1e300, True, [1.0]]),
        ("frequency_penalty", ["1", None, NAN, INF, -INF, -2.1, 2.1, 1e300, True, [1.0]]),
        ("repetition_penalty", ["1", None, NAN, INF, -INF, -1.0, 0.0, True]),
        ("logprobs", ["1", 1.5, NAN, INF, -2, [1]]),
        ("prompt_logprobs", ["1", 1.5, NAN, INF, -2, [1]]),
        ("best_of", ["1", 1.5, NAN, -1, 0, 10**30, True]),
        ("truncate_prompt_tokens", ["1", 1.5, NAN, INF, -2, 0, True]),
        ("stream_interval", ["1", 1.5, NAN, INF, -1, 0, True]),
        (
            "logit_bias",
            [[1], "ab", {"-5": 1.0}, {1.5: 1.0}, {-1: 1.0}, {True: 1.0}, {1: "a"}, {1: NAN}, {1: INF}, {1: -INF},
             {1: 1e300}, {1: None}, {1: True}, {None: 1.0}],
        ),
        ("allowed_token_ids", [[], 5, "5", [-1], [1.5], ["5"], [NAN], [None], {5}, [True]]),
        ("bad_words", ["word", 5, [""], [" "], [5], [None], [["a"]], {"a"}]),
        ("logits_processors", [favour(1), ["f"], [None], [5], "f"]),
        ("extra_args", [5, [1], "a"]),
        ("use_beam_search", [1, "yes", None]),
        ("length_penalty", ["1", None, NAN, INF, -INF, 1e300, True]),
        ("early_stopping", ["always", None, 2, NAN, 1, 0, []]),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_and_the_message_names_the_field(field: str, values: list[Any]) -> None:
    for value in values:
        if value is None and field in ("best_of",):
            continue
        with pytest.raises(InvalidArgumentError, match=field):
            SamplingParams(**{field: value})
        params = SamplingParams()
        setattr(params, field, value)
        with pytest.raises(InvalidArgumentError, match=field):
            params.validate()


@pytest.mark.parametrize("field", ["allowed_token_ids", "logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [384, 2**31, 2**63, 10**30])
def test_a_token_outside_the_vocabulary_is_refused_by_name(engine: LLMEngine, field: str, token: int) -> None:
    value = {token: 1.0} if field == "logit_bias" else [token]
    with pytest.raises(InvalidRequestError, match=f"{field} holds {token}"):
        engine.add_request("a", PROMPT, SamplingParams(**{field: value}))
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 10**30},
        {"logprobs": 2**63},
        {"prompt_logprobs": 10**30},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {5: 1e30, 6: -1e30}, "repetition_penalty": 1e30},
    ],
    ids=str,
)
def test_a_huge_value_is_refused_by_name_or_does_what_it_says(path: Path, fields: dict[str, Any]) -> None:
    few = {**GREEDY, "max_tokens": 3}
    with make_engine(path) as engine:
        good = run(engine, {"good": (PROMPT, SamplingParams(**few))})["good"].outputs[0].token_ids
        try:
            engine.add_request("huge", PROMPT, SamplingParams(**few, **fields))
        except MainspringError as error:
            assert any(name in str(error) for name in fields)  # noqa: PT017
            return
        request = engine.input_processor.process_inputs("r", PROMPT, SamplingParams(**few, **fields))
        for asked in core_messages(request, iter(range(9))):
            assert codec.decode(codec.encode(asked, b"instance", 1)).message == asked
        engine.add_request("good", PROMPT, SamplingParams(**few))
        found = collect(engine)
    assert found["good"][-1].outputs[0].token_ids == good
    completion = found["huge"][-1].outputs[0]
    assert completion.finish_reason == "length"
    for entries in (completion.logprobs or [], (found["huge"][-1].prompt_logprobs or [])[1:]):
        for entry in entries:
            assert entry is not None
            assert len(entry) == 384


def test_bad_words_need_a_tokenizer(path: Path) -> None:
    facts = ModelFacts(384, 64, 64, "float32")
    with pytest.raises(InvalidRequestError, match="bad_words need a tokenizer"):
        InputProcessor(None, RequestCheck(facts), []).process_inputs("r", [5], SamplingParams(bad_words=["x"]))


# ------------------------------------------------------------------ the wire

EVERYTHING = AddRequest(
    2**63 - 1,
    "r",
    [1, 2, 3],
    Sampling(
        7, -(2**63), 0.5, 0.9, 5, 0.1, 2, [1, 2], -1.5, 1.25, 1.125, 5, 2**31 - 1, {3: -0.5, 383: 1e30}, [0, 9],
        [[5], [6, 7]], extra_args=b"\x81\xa1a\x01",
    ),
    -3,
    [4, 5],
    "salt",
    Tensor(0, "float32", [3, 4]),
    1.5,
    True,
    patient=True,
)  # fmt: skip


def test_a_request_with_all_its_fields_survives_the_wire() -> None:
    for struct in (EVERYTHING, EVERYTHING.sampling):
        defaults = dict(zip(struct.__struct_fields__[::-1], struct.__struct_defaults__[::-1], strict=False))
        given = [name for name, value in defaults.items() if getattr(struct, name) != value]
        assert {*given, "pooling", "lora", "prompt_adapter"} == {*defaults, "pooling", "lora", "prompt_adapter"}
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    envelope = codec.decode(codec.encode(EVERYTHING, b"instance", 1, [array]))
    assert envelope.message == EVERYTHING


def test_outputs_with_log_probabilities_survive_the_wire() -> None:
    ids, values, ranks = np.arange(6, dtype="<i4"), np.linspace(-3, 0, 6, dtype="<f4"), np.array([1, 9], "<i4")
    scores = Logprobs(3, ids.tobytes(), values.tobytes(), ranks.tobytes(), [0, 2])
    prompt = Logprobs(3, ids.tobytes(), values.tobytes(), ranks.tobytes(), [], 5, 64)
    outputs = Outputs([5, 6, 5], [1, 2, 3], [], [Finished(5, "length")], None, [scores, prompt])
    received = codec.decode(codec.encode(outputs, b"instance", 1)).message
    assert received == outputs
    assert np.frombuffer(received.logprobs[0].logprobs, "<f4").tolist() == values.tolist()


def test_parameters_reach_the_core_in_every_completion() -> None:
    check = RequestCheck(ModelFacts(1024, 4, 64, "float32"), EngineConfig(model_config=ModelConfig(max_logprobs=-1)))
    processor = InputProcessor(load_tokenizer(MODEL_PATH), check, [2])
    params = SamplingParams(
        n=2,
        seed=4,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logprobs=3,
        prompt_logprobs=-1,
        logit_bias={7: 1.5},
        allowed_token_ids=[7, 8],
        bad_words=["four"],
    )
    request = processor.process_inputs("r", [5], params)
    first, second = (m.sampling for m in core_messages(request, iter(range(9))))
    assert first.prompt_logprobs == 2**31 - 1
    assert second.prompt_logprobs == -1, "once is enough"
    for sampling in (first, second):
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
        assert (sampling.logprobs, sampling.logit_bias, sampling.allowed_token_ids) == (3, {7: 1.5}, [7, 8])
        assert sampling.bad_words == request.bad_words != []
    assert dataclasses.asdict(request.params)["logit_bias"] == {7: 1.5}


# ------------------------------------------------------------------ hostile frontends

HOSTILE: dict[str, dict[str, Any]] = {
    "presence nan": {"presence_penalty": NAN},
    "presence inf": {"presence_penalty": INF},
    "presence huge": {"presence_penalty": 1e300},
    "frequency nan": {"frequency_penalty": NAN},
    "frequency huge": {"frequency_penalty": -1e300},
    "repetition nan": {"repetition_penalty": NAN},
    "repetition zero": {"repetition_penalty": 0.0},
    "repetition negative": {"repetition_penalty": -1.0},
    "repetition inf": {"repetition_penalty": INF},
    "repetition huge": {"repetition_penalty": 1e300},
    "repetition tiny": {"repetition_penalty": 1e-300},
    "bias nan": {"logit_bias": {5: NAN}},
    "bias inf": {"logit_bias": {5: INF}},
    "bias huge": {"logit_bias": {5: 1e300}, "allowed_token_ids": [6]},
    "bias token": {"logit_bias": {384: 1.0}},
    "bias negative token": {"logit_bias": {-1: 1.0}},
    "bias large token": {"logit_bias": {2**63: 1.0}},
    "allowed token": {"allowed_token_ids": [384]},
    "allowed negative token": {"allowed_token_ids": [-1]},
    "bad word token": {"bad_words": [[5, 384]]},
    "bad word negative token": {"bad_words": [[5], [5, -1]]},
    "bad word large token": {"bad_words": [[2**63]]},
}
HARMLESS: dict[str, dict[str, Any]] = {  # accepted and converted
    "empty bad word": {"bad_words": [[], [5]]},
    "long bad word": {"bad_words": [[5] * 100_000]},
    "logprobs negative": {"logprobs": -(2**63)},
    "logprobs huge": {"logprobs": 2**63 - 1},
    "logprobs larger": {"logprobs": 2**64 - 1},
    "prompt_logprobs negative": {"prompt_logprobs": -(2**63)},
    "prompt_logprobs huge": {"prompt_logprobs": 2**63 - 1},
    "prompt_logprobs larger": {"prompt_logprobs": 2**64 - 1},
    "nothing allowed": {"allowed_token_ids": [5], "bad_words": [[5]]},
    "nothing allowed, sampled": {
        "allowed_token_ids": [5], "bad_words": [[5]], "temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
    },
    "nothing before the minimum": {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3},
}  # fmt: skip


@pytest.fixture
def core(path: Path) -> EngineCore:
    core = EngineCore(
        EngineConfig(
            model_config=ModelConfig(model=str(path), max_model_len=64),
            cache_config=CacheConfig(num_gpu_blocks_override=64),
            scheduler_config=SchedulerConfig(max_num_seqs=4),
            load_config=LoadConfig(),
        )
    )
    core.connect(0)
    return core


def with_neighbours(core: EngineCore, sampling: dict[str, Any], handle: int) -> tuple[Any, list[Any]]:
    """The end of a request, and the ends of two others that run with it."""
    fine = AddRequest(handle + 1, "", [1, 2, 3], Sampling(4, repetition_penalty=1.2))
    core.add_request(0, fine)
    core.add_request(0, AddRequest(handle, "", [1, 2, 3], Sampling(**{"max_tokens": 4, **sampling})))
    core.add_request(0, msgspec.structs.replace(fine, handle=handle + 2))
    ended = run_core(core)
    return ended[0, handle], [ended[0, handle + 1], ended[0, handle + 2]]


@pytest.mark.parametrize("name", [*HOSTILE, *HARMLESS])
def test_a_hostile_value_affects_no_other_request(core: EngineCore, name: str) -> None:
    handles = 10 * (1 + [*HOSTILE, *HARMLESS].index(name))
    fine = with_neighbours(core, {}, 10_000 + handles)[1][0]
    (tokens, ended), others = with_neighbours(core, HOSTILE.get(name) or HARMLESS[name], handles)
    assert [(t, e.reason) for t, e in others] == [(fine[0], "length")] * 2
    if name in HOSTILE:
        assert (tokens, ended.reason, ended.error) == ([], "error", "InvalidRequestError"), ended
    else:
        assert ended.reason in ("length", "stop", "error")
    assert core.stats().num_running == core.stats().num_waiting == 0


def test_embeddings_have_no_log_probabilities_of_tokens() -> None:
    core = make_core()
    core.connect(0)
    request = message(1, [0, 0], prompt_embeds=Tensor(0, "float32", [2, 8]))
    request = msgspec.structs.replace(request, sampling=Sampling(2, prompt_logprobs=0))
    core.add_request(0, request, [np.zeros((2, 8), np.float32).data.cast("B")])
    assert run_core(core)[0, 1][1].reason == "error"
