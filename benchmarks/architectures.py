"""Every causal language model class of transformers, tiny and random, through the paged path: `make architectures`.

Each is *exact* (greedy fp32 tokens equal to ``model.generate`` for several requests of mixed lengths, prefilled in
chunks side by side), *refused* at load with a reason, *not constructible* (this script found no tiny config, or the
model can't generate in transformers), or *wrong*. Writes the table of docs/models.md; exits 1 when one is wrong or
fewer than `ENOUGH` are exact.

    python -P benchmarks/architectures.py                  # all of them, about five minutes on two cores
    python -P benchmarks/architectures.py llama gemma2     # some, printed only
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from mainspring.benchmarks.report import DOCS, fill
from mainspring.core.model.load.loader import load_model
from mainspring.core.model.load.refuse import refuse_config
from mainspring.core.model.run.attention import StepAttention
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.core.parallel.twin import HEAD_DIM, HEADS, KV_HEADS, LAYERS, shrink
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.contract import ROW_MULTIPLE, LayerCache, PagedBatch, SequenceOffsets
from mainspring.kernels.reference.reference_backend import ReferenceBackend

ENOUGH = 160
CPU_LIMIT_S = 60
MEMORY_LIMIT_BYTES = 16 << 30
TIMEOUT_S = 300
WORKERS = 2
PROMPT_LENGTHS = (5, 37, 18, 9)
MAX_TOKENS = 16
TOKEN_BUDGET = 24
BLOCK_SIZE = 16


class Result(NamedTuple):
    outcome: str  # exact, refused, not constructible or wrong
    reason: str


# Judges an architecture by its name. The function is to be called once transformers has made all that is compared.
Judge = Callable[[str, Callable[[], None]], Result]


# --- The paged path, driven in process ------------------------------------------------------------


class _Request:
    def __init__(self, tokens: list[int], table: list[int], limit: int, slot: int) -> None:
        self.tokens = tokens
        self.table = table  # its blocks, anywhere in the cache
        self.slot = slot  # of its recurrent state
        self.prompt_len = len(tokens)
        self.limit = limit
        self.computed = 0


def generate_paged(model_path: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens for each prompt, from a checkpoint. Stop tokens are ignored."""
    model = load_model(ModelConfig(model=str(model_path)), LoadConfig(), torch.device("cpu"))
    return drive(model, prompts, max_tokens)


def drive(model: PagedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Serve `prompts` together, with steps of at most `TOKEN_BUDGET` tokens, one more request in each step, and
    shuffled blocks."""
    backend = ReferenceBackend()
    blocks_each = -(-(max(map(len, prompts)) + max_tokens) // BLOCK_SIZE)
    blocks = list(range(1, 1 + blocks_each * len(prompts)))
    random.Random(0).shuffle(blocks)
    requests = [
        _Request(list(prompt), blocks[i * blocks_each : (i + 1) * blocks_each], len(prompt) + max_tokens, i)
        for i, prompt in enumerate(prompts)
    ]
    if model.states is not None:
        model.states.allocate(1 + len(prompts), model.dtype, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    caches = [
        LayerCache(
            torch.zeros(len(blocks) + 1, BLOCK_SIZE, spec.num_kv_heads, spec.key_dim, dtype=model.dtype),
            torch.zeros(len(blocks) + 1, BLOCK_SIZE, spec.num_kv_heads, spec.value_dim, dtype=model.dtype),
        )
        for spec in model.layers
    ]
    index_keys = [
        torch.zeros(len(blocks) + 1, BLOCK_SIZE, 1, spec.index_dim, dtype=model.dtype) if spec.index_dim else None
        for spec in model.layers
    ]
    model.bind([caches[source] for source in model.sources], index_keys)
    waiting, running = list(requests), []
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        _step(model, backend, running)
        running = [request for request in running if len(request.tokens) < request.limit]
    return [request.tokens[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)]


def _step(model: PagedModel, backend: ReferenceBackend, running: list[_Request]) -> None:
    budget = TOKEN_BUDGET
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    last_rows: list[int] = []
    chosen: list[_Request] = []
    counts: list[int] = []
    for request in running:
        count = min(budget, len(request.tokens) - request.computed)
        if count == 0:
            continue
        span = range(request.computed, request.computed + count)
        ids += request.tokens[span.start : span.stop]
        positions += span
        blocks += [request.table[position // BLOCK_SIZE] for position in span]
        last_rows.append(len(ids) - 1)
        chosen.append(request)
        counts.append(count)
        request.computed += count
        budget -= count
    used = [-(-request.computed // BLOCK_SIZE) for request in chosen]
    batch = PagedBatch(
        qo_indptr=torch.tensor([0, *counts]).cumsum(0).int(),
        kv_indptr=torch.tensor([0, *used]).cumsum(0).int(),
        kv_indices=torch.tensor([b for r, n in zip(chosen, used, strict=True) for b in r.table[:n]]).int(),
        last_page_len=torch.tensor([(request.computed - 1) % BLOCK_SIZE + 1 for request in chosen]).int(),
        block_size=BLOCK_SIZE,
    )
    rows = [position % BLOCK_SIZE for position in positions]
    plans = {spec: backend.plan(spec, batch, model.device) for spec in set(model.layers)}
    where = _padded(blocks), _padded(rows)
    attention = [StepAttention(plans[spec], *where, backend, batch) for spec in model.layers]
    starts = [request.computed - count for request, count in zip(chosen, counts, strict=True)]
    sequences = SequenceOffsets.of(counts, [r.slot for r in chosen], starts, [r.prompt_len for r in chosen])
    logits = model.forward(_padded(ids), _padded(positions)[None], attention, sequences, _padded(last_rows))
    for row, request in enumerate(chosen):
        if request.computed == len(request.tokens):
            request.tokens.append(int(logits[row].argmax()))


def _padded(values: list[int]) -> torch.Tensor:
    return torch.tensor(values + [0] * (-len(values) % ROW_MULTIPLE))


# --- Tiny configs, from each class's own defaults -------------------------------------------------

HIDDEN = HEADS * HEAD_DIM

# If the shrunk defaults are not consistent, these are tried in turn.
_VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": HEADS},  # latent attention: as many key heads as query heads
    {"layer_types": None, "mlp_layer_types": None},  # let the class derive them
    {"num_hidden_layers": 2},
    {"hidden_size_per_layer_input": 0},
]

# Gains of embeddings and of other matrices, tried in turn until greedy tokens are diverse. Gains that suit a model with
# normalisation before its layers make a model with normalisation after them always choose the same token.
_GAINS = [(0.3, 1.5), (0.3, 3.0), (1.0, 0.8), (0.3, 0.4), (0.3, 6.0)]
DIVERSE = 12  # distinct tokens among all outputs

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": HEAD_DIM,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
}
_BLOCK_INDEX = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)}

# Values that no rule over field names can find.
_FIELDS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    # the defaults contain no layer of the model's characteristic kind
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2),
        "index_n_heads": HEADS,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "xmod": {"default_language": "en_XX"},
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "kimi_linear": {"num_key_value_heads": HEADS},
    "bailing_hybrid": {"num_key_value_heads": HEADS},
    "bamba": _MAMBA_2 | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _MAMBA_2 | _MIXED,
    "falcon_h1": _MAMBA_2 | {"mamba_d_ssm": 2 * HIDDEN},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 32},
    "zamba2": {
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "chunk_size": 32,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
        "layer_types": ["linear_attention", "hybrid"] * (LAYERS // 2),
        "hybrid_layer_ids": [1, 3],
        "attention_head_dim": 32,
        "attention_hidden_size": 2 * HIDDEN,
        "kv_channels": HEAD_DIM,
    },
    "mamba": {"state_size": 16, "time_step_rank": 8},
    "falcon_mamba": {"state_size": 16, "time_step_rank": 8},
    "jamba": {"mamba_d_state": 16, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "n_mamba_heads": 2,
        "layer_types": ["linear_attention", "hybrid"] * (LAYERS // 2),
    },
    "zaya": {"num_experts_per_tok": 1},
    "minimax": {"block_size": 16},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * (LAYERS // 2)},
    "qwen4_exp_text": _DELTA | _BLOCK_INDEX,
    "qwen4_exp": _DELTA | _BLOCK_INDEX,
}


def build(model_type: str, folder: Path, variant: dict[str, Any], gains: tuple[float, float]) -> PreTrainedModel:
    """A tiny random fp32 model of this type, saved to `folder` and read back.

    Embeddings and other matrices are drawn with these gains, so that tokens depend on the context.
    """
    config = shrink(CONFIG_MAPPING[model_type](), **_FIELDS.get(model_type, {}), **variant)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, gains[parameter not in embeddings] * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    if type(model.config) is not type(config):  # the text part of a larger checkpoint, as users have it
        config.save_pretrained(folder)
    read_back: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return read_back


# --- One architecture -----------------------------------------------------------------------------


def judge(model_type: str, built: Callable[[], None]) -> Result:
    """Build the model, generate with transformers, report that, generate through the paged path, compare."""
    torch.set_num_threads(1)
    reason = ""
    for variant in _VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                prompts, expected = _diverse(model_type, Path(folder), variant)
            except Exception as error:
                reason = one_line(error)
                continue
            built()
            return _compare(Path(folder), prompts, expected)
    return _refused_unbuilt(model_type) or Result("not constructible", reason)


def _diverse(model_type: str, folder: Path, variant: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Build with the first gains that make the greedy tokens diverse enough to show an error; → prompts, tokens."""
    most, best = -1, _GAINS[0]
    for gains in [*_GAINS, None]:  # at last, the most diverse again
        model = build(model_type, folder, variant, gains or best)
        vocab = model.config.get_text_config().vocab_size
        prompts = [torch.randint(2, vocab, (length,)).tolist() for length in PROMPT_LENGTHS]
        expected = [_generate_alone(model, prompt) for prompt in prompts]
        distinct = len({token for text in expected for token in text})
        if distinct >= DIVERSE:
            return prompts, expected
        if distinct > most:
            most, best = distinct, gains or best
    return prompts, expected


def _compare(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> Result:
    try:
        tokens = generate_paged(folder, prompts, MAX_TOKENS)
    except UnsupportedModelError as error:
        return Result("refused", str(error).replace(str(folder), "the checkpoint"))
    except Exception as error:
        return Result("wrong", "raised " + one_line(error))
    return compared(tokens, expected, f"{len({t for text in tokens for t in text})} distinct tokens")


def compared(tokens: Sequence[list[int]], expected: Sequence[list[int]], note: str) -> Result:
    bad = [i for i, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)) if ours != theirs]
    return Result("wrong", f"other tokens than generate in requests {bad}") if bad else Result("exact", note)


def _refused_unbuilt(model_type: str) -> Result | None:
    """Loading refuses some models by class or config alone, before they are built."""
    config_class = CONFIG_MAPPING[model_type]
    try:
        refuse_config(config_class(), "the checkpoint")
    except UnsupportedModelError as error:
        return Result("refused", str(error))
    except Exception:
        return None
    return None


def _generate_alone(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None  # would end every output with this token
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, min_new_tokens=None, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def one_line(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


# --- All of them ----------------------------------------------------------------------------------


def be_quiet() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def _child(name: str, judge: Judge, cpu_seconds: int, sender: multiprocessing.connection.Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    # The defaults of some configs need hundreds of GB, despite the sizes set here.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    be_quiet()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            sender.send(judge(name, lambda: sender.send(None)))
        except BaseException as error:
            sender.send(Result("wrong", one_line(error)))


def sweep(names: Iterable[str], judge: Judge, cpu_seconds: int, seconds: int) -> dict[str, Result]:
    """Judge each in a separate forked process, so that a crash or hang does not stop the sweep."""
    context = multiprocessing.get_context("fork")
    pending, results = list(names), {}
    running: dict[Any, tuple[str, Any, float]] = {}
    built: set[str] = set()  # names of models that were built; a later failure counts as wrong
    while pending or running:
        while pending and len(running) < WORKERS:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(pending[0], judge, cpu_seconds, sender))
            process.start()
            sender.close()
            running[receiver] = pending.pop(0), process, time.monotonic() + seconds
        ready = multiprocessing.connection.wait(list(running), timeout=1)
        for receiver, (name, process, deadline) in list(running.items()):
            if receiver not in ready and time.monotonic() < deadline:
                continue
            try:
                result = receiver.recv() if receiver in ready else Result("wrong", f"not done in {seconds} s")
            except EOFError:
                process.join()
                result = Result("wrong", f"the process died with exit code {process.exitcode}")
            if result is None:
                built.add(name)
                continue
            process.kill()
            process.join()
            del running[receiver]
            if result.outcome == "wrong" and name not in built:
                result = Result("not constructible", result.reason)
            results[name] = result
            print(f"{name:28} {result.outcome:18} {result.reason}", flush=True)
    return results


def write_table(section: str, results: dict[str, Result], classes: Mapping[str, Any]) -> None:
    """Write the counts and a row for each architecture to docs/models.md."""
    counts = Counter(result.outcome for result in results.values())
    totals = ", ".join(f"{name}: {counts[name]}" for name in ("exact", "refused", "not constructible", "wrong"))
    lines = [f"**transformers {transformers.__version__}: {totals}**", ""]
    lines += ["| model type | class | result | reason |", "| --- | --- | --- | --- |"]
    for model_type, (outcome, reason) in sorted(results.items()):
        reason = reason.replace("|", "\\|")
        lines.append(f"| {model_type} | {classes[model_type]} | {outcome} | {reason} |")
    fill(DOCS / "models.md", section, "\n".join(lines))


def main(names: list[str]) -> int:
    started = time.monotonic()
    results = sweep(names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, judge, CPU_LIMIT_S, TIMEOUT_S)
    counts = Counter(result.outcome for result in results.values())
    print(
        ", ".join(f"{outcome}: {count}" for outcome, count in counts.items()), f"({time.monotonic() - started:.0f} s)"
    )
    if not names:
        shown = {name: r._replace(reason="") if r.outcome == "exact" else r for name, r in results.items()}
        write_table("architectures", shown, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return int(counts["wrong"] > 0 or (not names and counts["exact"] < ENOUGH))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
