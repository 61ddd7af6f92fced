"""Rows of pooling models: their parameters and outputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mainspring
from mainspring import InvalidArgumentError, OverloadedError, PoolingParams
from mainspring.ipc.pooling_params import LateChunkingParams

from . import checkpoints
from .async_rows import last
from .harness import IN, NOT_INSIDE, OWN, Place, row

STORY, SUM = "Once upon a time", "What is 1 plus 2?"
POOLING = {"runner": "pooling"}
BARE: Any = {"modes": (IN,), "why": "no core takes part"}


def pooled(at: Place, engine: Any = None, prompt: str = STORY, /, **fields: Any) -> Any:
    engine = at.engine(**POOLING) if engine is None else engine
    engine.add_request(at.id(), prompt, PoolingParams(**fields))
    return at.outputs(engine)[-1]


def vector(found: Any) -> list[float]:
    return list(map(float, np.asarray(found.outputs.data).reshape(-1)))


# ---------------------------------------------------------------------- PoolingParams


@row("PoolingParams.dimensions", says="Keep so many of the first dimensions.")
def dimensions(at: Place) -> None:
    assert len(vector(pooled(at, task="embed", dimensions=16))) == 16


@row("PoolingParams.use_activation", "PoolingParams.normalize", says="Whether vectors are normalised.")
def use_activation(at: Place) -> None:
    for name in ("use_activation", "normalize"):
        raw = vector(pooled(at, task="embed", **{name: False}))
        assert not math.isclose(sum(one * one for one in raw), 1.0, abs_tol=1e-3)


@row("PoolingParams.activate", **BARE)
def activate(at: Place) -> None:
    assert PoolingParams(normalize=False).activate is PoolingParams(use_activation=False).activate is False


@row("PoolingParams.task", says="What is asked for: `embed`, `token_embed`, `classify`, `token_classify`.")
def pooling_task(at: Place) -> None:
    found = pooled(at, task="token_embed")
    assert found.outputs.data.shape == (len(found.prompt_token_ids), 256)


@row("PoolingParams.truncate_prompt_tokens", says="Keep the first so many tokens; -1: as many as fit.")
def truncate_prompt_tokens(at: Place) -> None:
    assert pooled(at, truncate_prompt_tokens=3).prompt_token_ids == pooled(at).prompt_token_ids[:3]


@row("PoolingParams.late_chunking_params", "PoolingRequestOutput.late_chunking", says="Vectors of chunks of tokens.")
def late_chunking_params(at: Place) -> None:
    found = pooled(at, task="token_embed", late_chunking_params=LateChunkingParams(2))
    count = -(-len(found.prompt_token_ids) // 2)
    assert found.outputs.data.shape == (count, 256)
    assert len(found.late_chunking.chunks) == count


@row("EngineArgs.pooler_config", says="The default task, and how vectors are pooled.")
def pooler_config(at: Place) -> None:
    engine = at.engine(**POOLING, pooler_config={"task": "token_embed"})
    assert engine.get_supported_tasks()[0] == "token_embed"


@row("PoolingParams.clone", says="A copy.", **BARE)
def clone(at: Place) -> None:
    params = PoolingParams(task="embed", dimensions=3)
    other = params.clone()
    assert other == params
    assert other is not params


@row("PoolingParams.validate", **BARE)
def validate(at: Place) -> None:
    params = PoolingParams()
    params.dimensions = 0
    with pytest.raises(InvalidArgumentError, match="dimensions is 0"):
        params.validate()


# ---------------------------------------------------------------------- what comes back


@row("PoolingOutput.data", "PoolingRequestOutput.request_id", "PoolingRequestOutput.outputs",
     "PoolingRequestOutput.prompt_token_ids", "PoolingRequestOutput.finished", "PoolingRequestOutput.finish_reason",
     says="As `RequestOutput`'s; `outputs.data` is the vector.")  # fmt: skip
def pooling_output(at: Place) -> None:
    found = pooled(at, task="embed")
    assert found.request_id.startswith("r")
    assert found.prompt_token_ids == at.engine().get_tokenizer().encode(STORY)
    assert (found.finished, found.finish_reason, len(vector(found))) == (True, "stop", 256)


@row("PoolingRequestOutput.num_cached_tokens")
def num_cached_tokens(at: Place) -> None:
    engine = at.engine(**POOLING)
    pooled(at, engine, STORY * 8)
    assert pooled(at, engine, STORY * 8).num_cached_tokens >= 16


@row("PoolingRequestOutput.error")
def error(at: Place) -> None:
    engine = at.engine(**POOLING, max_requests_in_flight=1)
    for _ in range(6):
        engine.add_request(at.id(), STORY, PoolingParams())
    found = [one.error for one in at.outputs(engine) if one.finish_reason == "error"]
    assert found
    assert all(isinstance(one, OverloadedError) for one in found)


@row("PoolingRequestOutput.with_outputs")
def with_outputs(at: Place) -> None:
    found = pooled(at)
    made = found.with_outputs(mainspring.ScoringRequestOutput, mainspring.ScoringOutput(0.5))
    assert isinstance(made, mainspring.ScoringRequestOutput)
    assert (made.request_id, made.outputs.score) == (found.request_id, 0.5)


def embedded(at: Place) -> Any:
    return at.seen(at.llm(**POOLING).embed([STORY * 8, STORY * 8], use_tqdm=False))[1]


def classified(at: Place) -> Any:
    return at.seen(at.llm(model=checkpoints.classifier(at)).classify([STORY * 8, STORY * 8], use_tqdm=False))[1]


def scored(at: Place) -> Any:
    return at.seen(at.llm(**POOLING).score(STORY * 8, [STORY * 8, SUM], use_tqdm=False))[0]


KINDS = {"Embedding": ("embed", embedded), "Classification": ("classify", classified), "Scoring": ("score", scored)}
SAYS = {
    **{name: f"As `PoolingRequestOutput.{name}`." for name in ("request_id", "finished", "finish_reason")},
    **{name: f"As `PoolingRequestOutput.{name}`." for name in ("prompt_token_ids", "num_cached_tokens")},
    "with_outputs": "As `PoolingRequestOutput.with_outputs`.",
}


def _rows_of(kind: str, method: str, ask: Any) -> None:
    """Register a test for each attribute of one kind of output, all from one request of `LLM`."""
    only = {"modes": NOT_INSIDE[0], "why": f"only `LLM.{method}` gives it; {NOT_INSIDE[1]}"}

    def common(at: Place) -> None:
        found = ask(at)
        assert type(found).__name__ == f"{kind}RequestOutput"
        assert found.request_id.isdigit()
        ids = at.llm(**POOLING).get_tokenizer().encode(STORY * 8)
        assert method == "classify" or found.prompt_token_ids[: len(ids)] == ids
        assert len(found.prompt_token_ids) >= 16
        assert (found.finished, found.finish_reason, found.error) == (True, "stop", None)
        assert found.num_cached_tokens >= 0
        assert found.with_outputs(type(found), 3).outputs == 3

    for name, says in SAYS.items():
        row(f"{kind}RequestOutput.{name}", says=says, **only)(common)


for _kind, _asked in KINDS.items():
    _rows_of(_kind, *_asked)

EMBED, CLASSIFY, SCORE = (
    {"modes": NOT_INSIDE[0], "why": f"only `LLM.{method}` gives it; {NOT_INSIDE[1]}"} for method, _ in KINDS.values()
)


@row("EmbeddingRequestOutput.outputs", "EmbeddingOutput.embedding", "EmbeddingOutput.hidden_size",
     says="The vector, and how long it is.", **EMBED)  # fmt: skip
def embedding(at: Place) -> None:
    found = embedded(at).outputs
    assert len(found.embedding) == found.hidden_size == 256
    assert math.isclose(sum(one * one for one in found.embedding), 1.0, abs_tol=1e-3)


@row("ClassificationRequestOutput.outputs", "ClassificationOutput.probs", "ClassificationOutput.num_classes",
     says="The probability of each label, and how many there are.", **CLASSIFY)  # fmt: skip
def probabilities(at: Place) -> None:
    found = classified(at).outputs
    assert len(found.probs) == found.num_classes == 3
    assert math.isclose(sum(found.probs), 1.0, abs_tol=1e-3)


@row("ScoringRequestOutput.outputs", "ScoringOutput.score", says="How alike they are.", **SCORE)
def one_score(at: Place) -> None:
    assert math.isclose(scored(at).outputs.score, 1.0, abs_tol=1e-3), "both texts are the same"


# ---------------------------------------------------------------------- engines


@row("LLM.embed", "LLM.encode", says="Embeddings of prompts.")
def embed(at: Place) -> None:
    llm = at.llm(**POOLING)
    (found,) = llm.embed(STORY, use_tqdm=False)
    assert math.isclose(sum(one * one for one in found.outputs.embedding), 1.0, abs_tol=1e-3)
    assert len(llm.encode([STORY, STORY], use_tqdm=False)) == 2


@row("LLM.encode, on_error", says="As of `LLM.generate`.")
def encode_on_error(at: Place) -> None:
    (found,) = at.llm(**POOLING).encode(STORY, use_tqdm=False, on_error="return")
    assert found.error is None
    with pytest.raises(InvalidArgumentError, match="on_error is 'ignore'"):
        at.llm(**POOLING).encode(STORY, use_tqdm=False, on_error="ignore")


@row("LLM.classify", says="Probabilities of classes.")
def classify(at: Place) -> None:
    assert math.isclose(sum(classified(at).outputs.probs), 1.0, abs_tol=1e-3)


@row("LLM.reward", says="Scores of each token.")
def reward(at: Place) -> None:
    (found,) = at.llm(model=checkpoints.classifier(at, "Token")).reward(STORY, use_tqdm=False)
    assert len(found.outputs.data) == len(found.prompt_token_ids)


@row("LLM.score", says="How alike two texts are.")
def score(at: Place) -> None:
    same, other = at.llm(**POOLING).score(STORY, [STORY, SUM], use_tqdm=False)
    assert same.outputs.score > other.outputs.score


@row("AsyncLLMEngine.encode", says="Embeddings, as an async iterator.")
async def encode(at: Place) -> None:
    found = await last(at.aengine(**POOLING).encode(STORY, PoolingParams(task="embed"), at.id()))
    assert len(vector(found)) == 256


@row("EngineArgs.runner")
def runner(at: Place) -> None:
    engine = at.engine(**POOLING)
    assert "embed" in engine.get_supported_tasks()
    assert "generate" not in engine.get_supported_tasks()


@row("EngineArgs.task")
def task(at: Place) -> None:
    assert "embed" in at.engine(task="embed").get_supported_tasks()


# ---------------------------------------------------------------------- names


@row("mainspring.PoolingParams", "mainspring.PoolingRequestOutput", "mainspring.PoolingOutput", modes=(IN,),
     why="a name is the same everywhere")  # fmt: skip
def pooling_names(at: Place) -> None:
    engine = at.engine(**POOLING)
    engine.add_request(at.id(), STORY, mainspring.PoolingParams(task="embed"))
    found = at.outputs(engine)[-1]
    assert isinstance(found, mainspring.PoolingRequestOutput)
    assert isinstance(found.outputs, mainspring.PoolingOutput)


@row(*(f"mainspring.{kind}{what}" for kind in KINDS for what in ("Output", "RequestOutput")), modes=(OWN,),
     why="a name is the same everywhere")  # fmt: skip
def kinds(at: Place) -> None:
    for kind, (_, ask) in KINDS.items():
        found = ask(at)
        assert isinstance(found, getattr(mainspring, f"{kind}RequestOutput"))
        assert isinstance(found.outputs, getattr(mainspring, f"{kind}Output"))
