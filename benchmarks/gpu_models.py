"""Correctness for gpu_check.py, with checkpoints generated at run time.

Tiny checkpoints have random weights with a large variance (see tests/tiny.py), so that outputs depend on the whole
context and an error in the cache is detected. docs/gpu.md describes the comparisons.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from demo_questions import ANIMALS, GIRLS, Question, heldout_other, heldout_sums, is_right, long_story
from mainspring import LLM, EngineArgs, SamplingParams
from mainspring.core.model.load.loader import load_model
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.core.worker.kv_layout import plan_layout
from mainspring.core.worker.runner import ModelRunner
from mainspring.demo import MODEL_PATH
from mainspring.engine.llm_engine import make_client
from mainspring.ipc.client import CoreClient
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.messages import AddRequest, Sampling, Stats
from mainspring.kernels.contract import Backend
from mainspring.kernels.flashinfer.flashinfer_backend import FlashInferBackend
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from report import ROOT

sys.path.append(str(ROOT / "tests"))
import tiny

T = TypeVar("T")
Request = tuple[list[int], Sampling]
BLOCK_SIZE = 16
FP8 = torch.float8_e4m3fn

# Random models of some families: they differ in window, soft cap, norms of queries and keys, sinks, experts, latents,
# recurrent state. docs/gpu.md lists the kernels to build for them.
VOCAB = 1024
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 128, "sliding_window": 24, "query_pre_attn_scalar": 128},
    "mistral": {"head_dim": 64, "sliding_window": 24},
    "gpt_oss": {"head_dim": 64, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 2,
    },
    "qwen3_next": {
        "head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mlp_only_layers": [0, 1],
    },
}
IN_GRAPHS = ("llama", "qwen3_moe", "deepseek_v3", "qwen3_next")
# In half precision rounding alone may send a token to another expert, and then the rest of the text differs.
ONE_EXPERT = {
    "gpt_oss": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts": 1, "num_experts_per_tok": 1},
}
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 4096}
WIDE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 16_384}

# Real shapes, for speed; dummy weights fill them.
_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128, "vocab_size": 151_936, "eos_token_id": 151_645}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 40_960,
    },
}
_TOY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
_TOY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
_TOY["eos_token_id"] = None
_TOY_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


class Bar(NamedTuple):
    """One measured value, with a limit or without."""

    name: str
    limit: str = ""  # empty: no limit, for information only


class Say(Protocol):
    """Called with the measured value of a bar."""

    def __call__(self, name: str, measured: str, passed: bool | None = None) -> None: ...


class Setup(NamedTuple):
    """Where and how a part runs."""

    device: torch.device
    kernels_dir: str | None
    folder: Path  # folder for generated checkpoints
    rehearse: bool  # on a CPU with tiny models; the numbers mean nothing

    def pick(self, real: T, toy: T) -> T:
        return toy if self.rehearse else real

    def judge(self, passed: bool) -> bool | None:
        """`passed`, or None in a rehearsal, whose speeds and shares mean nothing."""
        return None if self.rehearse else passed

    def backend(self) -> Backend:
        if self.rehearse:
            return ReferenceBackend()
        return FlashInferBackend(self.device, False, self.kernels_dir)

    def options(self) -> dict[str, Any]:
        """Options of every engine. An engine that would fall back to other kernels must not be measured."""
        backend = self.pick("flashinfer", "reference")
        return {"device": self.device.type, "kernels_dir": self.kernels_dir, "attention_backend": backend}

    def shape(self, name: str) -> dict[str, Any]:
        shape = SHAPES[name]
        moe = _TOY_MOE if "num_experts" in shape else {}
        return self.pick(shape, {**shape, **_TOY, **moe})

    def config_only(self, name: str) -> Path:
        """A checkpoint's folder with only a config.json, for `load_format=dummy`."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **self.shape(name)}))
        return folder

    def random_model(self, family: str, dtype: torch.dtype, **fields: Any) -> Path:
        """A checkpoint with random weights of a large variance."""
        config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **fields})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            tiny.widen(model)
        folder = self.folder / f"{family}-{len(list(self.folder.iterdir()))}"
        model.to(dtype).save_pretrained(folder)
        return folder


def quiet() -> None:
    """Silence transformers' progress bars and warnings."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


# ------------------------------------------------------------------ engines

_handles = itertools.count(1)


def with_client(
    setup: Setup, model: Path, use: Callable[[CoreClient], T], multiprocess: bool = False, **settings: Any
) -> T:
    """The result of `use` with the core of an engine, whose memory is freed afterwards."""
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, **{**setup.options(), **settings})
    client = make_client(args.create_engine_config(), multiprocess)
    try:
        return use(client)
    finally:
        client.close()
        del client
        release(setup)


def release(setup: Setup) -> None:
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()


def send(client: CoreClient, prompt: list[int], sampling: Sampling) -> int:
    handle = next(_handles)
    client.add_request(AddRequest(handle, str(handle), prompt, sampling))
    return handle


def complete(
    client: CoreClient, requests: Sequence[Request], seen: Callable[[int], None] = lambda _: None
) -> list[list[int]]:
    """The tokens of each request, all sent at once. `seen` is called with the number of tokens of each message."""
    tokens: dict[int, list[int]] = {send(client, *request): [] for request in requests}
    left = set(tokens)
    while left:
        outputs = client.get_outputs()
        if outputs is None:
            continue
        for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
            tokens[handle].append(token)
        for finished in outputs.finished:
            if finished.error:
                raise RuntimeError(finished.error_text)
            left.discard(finished.handle)
        seen(len(outputs.handles))
    return list(tokens.values())


def stats_of(client: CoreClient) -> Stats:
    return msgspec.convert(client.call("stats"), Stats)


# ------------------------------------------------------------------ the embedded model

LEAST_RIGHT = 0.95


def check_embedded(setup: Setup, say: Say) -> None:
    """Answers through the default client, and the loss of accuracy with an fp8 cache."""
    sums, others = heldout_sums(setup.pick(500, 8)), heldout_other(setup.pick(200, 4))
    options = {**setup.options(), "dtype": "bfloat16"}
    shares = {}
    for kind in ("auto", "fp8"):
        with LLM(kv_cache_dtype=kind, gpu_memory_utilization=0.5, **options) as llm:
            shares[kind] = [_right(llm, sums), _right(llm, others)]
    for number, (name, count) in enumerate((("sums", len(sums)), ("other questions", len(others)))):
        plain, fp8 = shares["auto"][number], shares["fp8"][number]
        enough, as_good = setup.judge(plain >= LEAST_RIGHT), setup.judge(fp8 >= plain - 0.01)
        say(f"embedded model, {name} right", f"{plain:.1%} of {count}", enough)
        say(f"embedded model, {name} right with an fp8 KV cache", f"{fp8:.1%} of {count}", as_good)

    backend, tokenizer = setup.backend(), AutoTokenizer.from_pretrained(MODEL_PATH)
    rng = random.Random(0)
    texts = [f"{q.prompt} {q.answer}" for q in sums[: setup.pick(60, 4)] + others[: setup.pick(60, 4)]]
    texts += [long_story(rng, rng.choice(GIRLS), rng.choice(ANIMALS)) for _ in range(setup.pick(20, 1))]
    sequences = [torch.tensor(tokenizer.encode(text)[:512]) for text in texts]
    model = paged(setup, MODEL_PATH, backend)
    base, fp8_cache = (logits_of(model, sequences, backend, kv_dtype) for kv_dtype in (None, FP8))
    error = (fp8_cache - base).abs() / base.std()
    agree = _share(fp8_cache.argmax(-1) == base.argmax(-1))
    say(
        "embedded model, logits with an fp8 KV cache",
        f"off by {error.mean():.4f} σ, at most {error.max():.2f} σ; the same largest on {agree:.2%}",
    )
    agree = _share(base.argmax(-1) == _own_logits(setup, MODEL_PATH, torch.bfloat16, sequences).argmax(-1))
    say("embedded model, largest logit as in transformers", f"{agree:.2%} of {len(base):,}", agree >= 0.99)
    _check_sleep(setup, say)


def _check_sleep(setup: Setup, say: Say) -> None:
    """Whether tokens are the same after a sleep, and graphs exist again."""
    requests = _mixed_requests(4, VOCAB, 40, 12)

    def around_sleep(client: CoreClient) -> tuple[list[list[list[int]]], list[list[int]]]:
        core: Any = client.core  # type: ignore[attr-defined]  # in this process
        tokens, sizes = [complete(client, requests)], [core.worker.runner.graph_sizes]
        for level in (1, 2):
            client.call("sleep", level)
            client.call("wake_up")
            tokens.append(complete(client, requests))
            sizes.append(core.worker.runner.graph_sizes)
        return tokens, sizes

    tokens, sizes = with_client(setup, MODEL_PATH, around_sleep, dtype="bfloat16")
    same = tokens == tokens[:1] * 3
    graphs = setup.rehearse or (sizes[0] != [] and sizes == sizes[:1] * 3)
    told = f"{'the same' if same else 'other'} tokens, {', '.join(str(len(size)) for size in sizes)} graphs"
    say("embedded model, tokens and graphs after sleep", told, same and graphs)


def _right(llm: LLM, questions: list[Question]) -> float:
    params = SamplingParams(temperature=0, max_tokens=96, stop=["\n"])
    outputs = llm.generate([question.prompt for question in questions], params, use_tqdm=False)
    return sum(is_right(q, o.outputs[0].text) for q, o in zip(questions, outputs, strict=True)) / len(questions)


# ------------------------------------------------------------------ exact in fp32


def check_exact(setup: Setup, say: Say) -> None:
    """fp32 on the reference kernels of this device equals `generate`, token for token."""
    for family in FAMILIES:
        folder = setup.random_model(family, torch.float32)
        requests = _mixed_requests(setup.pick(12, 3), VOCAB, setup.pick(80, 30), setup.pick(20, 5))
        got = with_client(
            setup,
            folder,
            lambda client: complete(client, requests),  # noqa: B023  # called before the next round
            attention_backend="reference",
            dtype="float32",
            max_model_len=128,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=64 << 20,
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(setup.device).eval()
        model.generation_config.eos_token_id = None
        wrong = []
        for (prompt, sampling), ours in zip(requests, got, strict=True):
            ids = torch.tensor([prompt], device=setup.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            if out != ours:
                wrong.append(_first_difference(model, prompt, out, ours))
        detail = f"; {wrong[0]}" if wrong else ""
        say(f"exact in fp32: {family}", f"{len(got) - len(wrong)} of {len(got)} requests{detail}", not wrong)
        del model
        release(setup)


def _mixed_requests(count: int, vocab: int, longest: int, output: int) -> list[Request]:
    """Greedy requests with prompts of many lengths, a third of them with a common prefix."""
    r = random.Random(1)
    prefix = [r.randrange(2, vocab) for _ in range(longest // 2)]
    prompts = [[r.randrange(2, vocab) for _ in range(r.randint(1, longest))] for _ in range(count)]
    prompts[::3] = [(prefix + prompt)[:longest] for prompt in prompts[::3]]
    return [(prompt, Sampling(r.randint(output // 2, output))) for prompt in prompts]


def _first_difference(model: Any, prompt: list[int], theirs: list[int], ours: list[int]) -> str:
    """The position of the first difference, and how close the two largest logits were, because rounding may decide a
    tie."""
    at = next(i for i, pair in enumerate(itertools.zip_longest(theirs, ours)) if pair[0] != pair[1])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + theirs[:at]], device=model.device)).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return (
        f"one differs at its token {at}, where the two largest logits are {(first - second) / logits.std():.1e} σ apart"
    )


# ------------------------------------------------------------------ half precision

ERROR_RATIO = 1.25
AGREE = 0.99
DECIDED = 6.0
"""An answer is decided where the two largest logits are so many times bf16's rms error apart: three standard deviations
of the difference between two such differences. Random weights leave about a third of all positions undecided."""


def check_half(setup: Setup, say: Say) -> None:
    """FlashInfer in bf16 compared with an fp32 reference; the error of transformers in bf16 sets the limit."""
    backend = setup.backend()
    for family in FAMILIES:
        folder = setup.random_model(family, torch.bfloat16, **ONE_EXPERT.get(family, {}))
        generator = torch.Generator().manual_seed(1)
        lengths = [setup.pick(150, 20) + 10 * i for i in range(setup.pick(8, 3))]
        sequences = [torch.randint(2, VOCAB, (length,), generator=generator) for length in lengths]
        exact = _own_logits(setup, folder, torch.float32, sequences)
        theirs = _own_logits(setup, folder, torch.bfloat16, sequences)
        model = paged(setup, folder, backend)
        ours = logits_of(model, sequences, backend)
        error, their_error = rms(ours, exact), rms(theirs, exact)
        say(
            f"bf16 against fp32: {family}",
            f"off by {error:.4f} σ (transformers in bf16: {their_error:.4f} σ)",
            error <= ERROR_RATIO * their_error,
        )
        top = exact.topk(2, -1).values
        decided = (top[:, 0] - top[:, 1]) / exact.std() > DECIDED * their_error
        same = ours.argmax(-1) == theirs.argmax(-1)
        say(
            f"largest logit as in transformers' bf16: {family}",
            f"{_share(same[decided]):.2%} of the {_share(decided):.0%} decided positions; {_share(same):.1%} of all, "
            f"transformers in bf16 and fp32 {_share(theirs.argmax(-1) == exact.argmax(-1)):.1%}",
            _share(same[decided]) >= AGREE,
        )
        if family in IN_GRAPHS:
            replayed = None if setup.rehearse else logits_of(model, sequences, backend, graphs=True)
            backend.forget_graphs()  # the next model has other arrays
            apart = 0.0 if replayed is None else rms(replayed, ours)
            say(
                f"graphs on and off, logits: {family}",
                "no graphs on a CPU" if replayed is None else f"{apart:.4f} σ apart (bf16 itself: {error:.4f} σ)",
                setup.judge(apart <= error),
            )
        del model
        release(setup)
    _check_streamed(setup, say, backend)


def _check_streamed(setup: Setup, say: Say, backend: Backend) -> None:
    """Layers whose weights are copied from host memory, also in graphs. They are not fused, so that their bits differ
    from those of layers on the device."""
    name = "weights in host memory: bf16 against fp32"
    if setup.rehearse:
        return say(name, "a CPU streams no weights")
    folder = setup.random_model("llama", torch.bfloat16, num_hidden_layers=6)
    sequences = [torch.randint(2, VOCAB, (60 + 10 * i,), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    exact = _own_logits(setup, folder, torch.float32, sequences)
    their_error = rms(_own_logits(setup, folder, torch.bfloat16, sequences), exact)
    error = 0.0
    for graphs in (False, True):
        streamed = logits_of(paged(setup, folder, backend, offload=1 << 30), sequences, backend, graphs=graphs)
        error = max(error, rms(streamed, exact))
        backend.forget_graphs()
    told = f"off by {error:.4f} σ, with graphs and without (transformers in bf16: {their_error:.4f} σ)"
    say(name, told, error <= ERROR_RATIO * their_error)
    release(setup)


def _own_logits(setup: Setup, folder: Path, dtype: torch.dtype, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits of transformers, one sequence after another: fp32 ``[all positions, vocab]``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(setup.device).eval()
    with torch.inference_mode():
        return torch.cat([model(input_ids=ids[None].to(setup.device)).logits[0].float() for ids in sequences])


def paged(setup: Setup, folder: Path, backend: Backend, offload: int = 0) -> PagedModel:
    config = ModelConfig(model=str(folder), dtype="bfloat16")
    return load_model(config, LoadConfig(use_tqdm_on_load=False), setup.device, backend=backend, offload=offload)


def logits_of(
    model: PagedModel,
    sequences: Sequence[torch.Tensor],
    backend: Backend,
    kv_dtype: torch.dtype | None = None,
    graphs: bool = False,
) -> torch.Tensor:
    """Logits of every position through the runner: fp32 ``[all positions, vocab]``. Each sequence comes in two chunks
    and then token by token, some later than others, so that steps of both kinds and mixed ones occur."""
    count, longest = len(sequences), max(map(len, sequences))
    layout = plan_layout(model.layers, model.sources, BLOCK_SIZE, kv_dtype or model.dtype, backend.cache_dims)
    for spec in model.layers:
        if reason := backend.refuses(spec, model.dtype, layout.dtype):
            raise RuntimeError(f"{backend.name} refuses attention with {reason}")
    groups, columns = len(layout.groups), -(-longest // BLOCK_SIZE)
    limit, steps = max(longest, model.max_position or 4096), list(_steps([len(ids) for ids in sequences]))
    most = max(sum(end - start for _, start, end in step) for step in steps)
    runner = ModelRunner(model, layout, backend, 1 + groups * count * columns, count, limit, most)
    if graphs:
        runner.warm_up([count])
        if not runner.graph_sizes:
            raise RuntimeError("no graph was captured")
    places = torch.arange(groups * count * columns).view(columns, count, groups).permute(2, 1, 0)
    runner.tables[:, :, :columns] = 1 + places.numpy()
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        which, starts, ends = np.array(step).T
        ids = torch.cat([sequences[number][start:end] for number, start, end in step]).numpy()
        out = runner.forward(which, starts, ends - starts, ids, np.arange(len(ids)))
        out = out.to(torch.float32, copy=True)  # a replay writes to the same place again
        for number, part in zip(which, out.split((ends - starts).tolist()), strict=True):
            parts[number].append(part)
    return torch.cat([torch.cat(part) for part in parts])


def _steps(lengths: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Generate steps, each a list of (sequence, start, end)."""
    pieces = []
    for number, length in enumerate(lengths):
        singles = min(16, length // 4)
        first = (length - singles) // 2
        counts = [first, length - singles - first, *[1] * singles]
        ends = list(itertools.accumulate(counts))
        spans = [(number, end - count, end) for count, end in zip(counts, ends, strict=True)]
        pieces.append([None] * (number % 3) + spans)
    for column in itertools.zip_longest(*pieces):
        if step := [span for span in column if span is not None]:
            yield step


def rms(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Root of the mean squared difference, in standard deviations of the reference."""
    return float((logits - reference).square().mean().sqrt() / reference.std())


def _share(mask: torch.Tensor) -> float:
    return float(mask.double().mean())


# ------------------------------------------------------------------ deterministic

CHECKED, BATCH = 32, 64
LONG = 8170  # so that the output passes 8,192 tokens, where keys begin to be split and graphs end


def check_deterministic(setup: Setup, say: Say) -> None:
    """A request gives the same tokens beside any other requests."""
    folder = setup.random_model("qwen3", torch.bfloat16, **setup.pick(WIDE, {}))
    checked, batch, tokens = setup.pick((CHECKED, BATCH, 48), (4, 8, 12))
    vocab, most, long = setup.pick((WIDE["vocab_size"], 200, LONG), (VOCAB, 40, 90))
    requests = _sampled_requests(batch, vocab, most, tokens, long)
    longest = long + 64
    seats: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": longest, "max_num_batched_tokens": 512}
    seats["cudagraph_capture_sizes"] = [1, 16, 64]
    plain: dict[str, Any] = {**seats, "deterministic": True, "kv_cache_memory_bytes": 1 << setup.pick(31, 24)}

    def alone_and_together(client: CoreClient) -> tuple[list[list[int]], list[list[int]], list[list[int]], int]:
        alone = []
        for request in requests[:checked]:
            alone += complete(client, [request])
            client.call("reset_prefix_cache")
        together = complete(client, requests)
        before = stats_of(client).prefix_hits
        again = complete(client, requests)
        return alone, together, again, stats_of(client).prefix_hits - before

    def once(client: CoreClient) -> tuple[list[list[int]], int]:
        return complete(client, requests), stats_of(client).num_preemptions

    alone, together, again, hits = with_client(setup, folder, alone_and_together, **plain)

    def compare(name: str, outputs: list[list[int]], detail: str = "", happened: bool = True) -> None:
        others = [i for i, pair in enumerate(zip(alone, outputs[:checked], strict=True)) if pair[0] != pair[1]]
        detail += f"; not {others}" if others else ""
        say(f"deterministic: {name}", f"{checked - len(others)} of {checked}{detail}", not others and happened)

    compare(f"alone and in a batch of {BATCH}", together)
    compare("after a cache hit", again, f", {hits:,} tokens from the cache", hits > 0)
    blocks = sum(-(-(len(prompt) + tokens) // BLOCK_SIZE) for prompt, _ in requests)
    blocks = max(blocks // 2, 2 + longest // BLOCK_SIZE)
    outputs, preemptions = with_client(setup, folder, once, **seats, deterministic=True, num_gpu_blocks_override=blocks)
    compare("after preemption", outputs, f", {preemptions} preemptions", preemptions > 0)
    compare("graphs off", with_client(setup, folder, once, **plain, enforce_eager=True)[0])
    compare("async_scheduling off", with_client(setup, folder, once, **plain, async_scheduling=False)[0])
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    mixture = setup.random_model("qwen3_moe", torch.bfloat16, **setup.pick({**WIDE, **experts}, {}))
    alone, together, _, _ = with_client(setup, mixture, alone_and_together, **plain)
    compare(f"a mixture of experts, alone and in a batch of {BATCH}", together)
    others = with_client(setup, folder, alone_and_together, **{**plain, "deterministic": False})
    same = sum(a == b for a, b in zip(others[0], others[1], strict=False))
    say("not deterministic: alone and in that batch, for comparison", f"{same} of {checked}")
    _say_cost(setup, say, batch)


def _sampled_requests(count: int, vocab: int, longest: int, tokens: int, long: int) -> list[Request]:
    """Half of them greedy, some with top-p; half with a common prefix. Two are `long`."""
    r = random.Random(5)
    prefix = [r.randrange(2, vocab) for _ in range(48)]
    requests = []
    for i in range(count):
        prompt = prefix * (i % 2) + [r.randrange(2, vocab) for _ in range(r.randint(1, longest))]
        if i in (1, 2):
            prompt += [r.randrange(2, vocab) for _ in range(long - len(prompt))]
        how = Sampling(tokens, seed=i, temperature=0.8 * (i % 4 > 1), top_p=0.9 if i % 8 == 7 else 1.0)
        requests.append((prompt, how))
    return requests


def _say_cost(setup: Setup, say: Say, batch: int) -> None:
    """Tokens a second of both modes, on a real shape."""
    folder, tokens = setup.config_only("qwen3-0.6b"), setup.pick(128, 8)
    r, vocab = random.Random(3), setup.shape("qwen3-0.6b")["vocab_size"]
    requests = [([r.randrange(vocab) for _ in range(setup.pick(128, 20))], Sampling(tokens)) for _ in range(batch)]

    def speed(client: CoreClient) -> float:
        times = []
        for _ in range(4):
            began = time.perf_counter()
            complete(client, requests)
            times.append(time.perf_counter() - began)
            client.call("reset_prefix_cache")
        return batch * tokens / min(times[1:])  # in the first, kernels are compiled

    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_seqs": batch,
        "max_model_len": 512,
        "cudagraph_capture_sizes": [batch],
    }
    options |= {"kv_cache_memory_bytes": 1 << setup.pick(33, 24)}
    slow, fast = (with_client(setup, folder, speed, deterministic=d, **options) for d in (True, False))
    say(
        f"deterministic: cost at batch {BATCH}, Qwen3-0.6B",
        f"{slow:,.0f} tokens/s, without {fast:,.0f}: {slow / fast:.0%}",
    )


# ------------------------------------------------------------------ kills

KILLED_STREAMS, KILLED_TOKENS, KILLS = 48, 400, (0.1, 0.5)  # kills: after so large a part of all tokens


def check_kills(setup: Setup, say: Say) -> None:
    """Streams of a core that is killed twice, beside those of an undisturbed one."""
    folder = setup.random_model("qwen3", torch.bfloat16, **setup.pick(WIDE, {}))
    count, tokens = setup.pick((KILLED_STREAMS, KILLED_TOKENS), (6, 20))
    vocab, r = setup.pick(WIDE["vocab_size"], VOCAB), random.Random(4)
    requests = []
    for i in range(count):
        prompt = [r.randrange(2, vocab) for _ in range(r.randint(5, setup.pick(300, 30)))]
        requests.append((prompt, Sampling(tokens, seed=i, temperature=0.8 * (i % 2))))
    options: dict[str, Any] = {"deterministic": True, "multiprocess": True, "max_num_seqs": count}
    options |= {"max_model_len": setup.pick(2048, 128), "kv_cache_memory_bytes": 1 << setup.pick(31, 24)}
    killer = _Killer(count * tokens)
    undisturbed = with_client(setup, folder, lambda client: complete(client, requests), **options)
    streams = with_client(setup, folder, lambda client: complete(client, requests, killer.of(client)), **options)
    same = sum(pair[0] == pair[1] for pair in zip(streams, undisturbed, strict=True))
    kills = len(killer.pauses)
    say(
        f"kills: the same tokens as undisturbed, {KILLED_STREAMS} streams",
        f"{same} of {count}, {kills} kills",
        setup.judge(same == count and kills == len(KILLS)),
    )
    say("kills: time to the next token", " and ".join(f"{pause:.1f} s" for pause in killer.pauses))


class _Killer:
    """Kills a core in another process each time its requests have so large a part of all their tokens."""

    def __init__(self, tokens: int) -> None:
        self.pauses: list[float] = []  # seconds from each kill to the next token
        self._due, self._made, self._killed = [int(part * tokens) for part in KILLS], 0, 0.0

    def of(self, client: CoreClient) -> Callable[[int], None]:
        supervisor = client._connection._core.supervisor  # type: ignore[attr-defined]

        def seen(tokens: int) -> None:
            self._made += tokens
            if self._killed and tokens:
                self.pauses.append(time.monotonic() - self._killed)
                self._killed = 0.0
            if not self._killed and self._due and self._made >= self._due[0]:
                del self._due[0]
                os.kill(supervisor.core_pid, signal.SIGKILL)
                self._killed = time.monotonic()

        return seen


_DECIDED = "≥ 99% where the answer is decided"
BARS: dict[str, list[Bar]] = {
    "embedded": [
        Bar("embedded model, sums right", "≥ 95%"),
        Bar("embedded model, sums right with an fp8 KV cache", "at most 1 point less"),
        Bar("embedded model, other questions right", "≥ 95%"),
        Bar("embedded model, other questions right with an fp8 KV cache", "at most 1 point less"),
        Bar("embedded model, logits with an fp8 KV cache"),
        Bar("embedded model, largest logit as in transformers", "≥ 99% of positions"),
        Bar("embedded model, tokens and graphs after sleep", "as before, after each level"),
    ],
    "exact": [Bar(f"exact in fp32: {family}", "all requests") for family in FAMILIES],
    "half": [
        *(Bar(f"bf16 against fp32: {family}", f"≤ {ERROR_RATIO} × transformers' own") for family in FAMILIES),
        *(Bar(f"largest logit as in transformers' bf16: {family}", _DECIDED) for family in FAMILIES),
        *(Bar(f"graphs on and off, logits: {family}", "≤ what bf16 itself is off") for family in IN_GRAPHS),
        Bar("weights in host memory: bf16 against fp32", f"≤ {ERROR_RATIO} × transformers' own"),
    ],
    "deterministic": [
        Bar(f"deterministic: alone and in a batch of {BATCH}", "32 of 32"),
        Bar("deterministic: after a cache hit", "32 of 32"),
        Bar("deterministic: after preemption", "32 of 32"),
        Bar("deterministic: graphs off", "32 of 32"),
        Bar("deterministic: async_scheduling off", "32 of 32"),
        Bar(f"deterministic: a mixture of experts, alone and in a batch of {BATCH}", "32 of 32"),
        Bar("not deterministic: alone and in that batch, for comparison"),
        Bar(f"deterministic: cost at batch {BATCH}, Qwen3-0.6B"),
    ],
    "kills": [
        Bar(f"kills: the same tokens as undisturbed, {KILLED_STREAMS} streams", "all streams"),
        Bar("kills: time to the next token"),
    ],
}
PARTS: dict[str, Callable[[Setup, Say], None]] = {
    "embedded": check_embedded,
    "exact": check_exact,
    "half": check_half,
    "deterministic": check_deterministic,
    "kills": check_kills,
}
