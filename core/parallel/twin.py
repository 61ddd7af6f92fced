"""A tiny twin of a checkpoint's class, which shows whether a plan for several ranks is right.

Verification at load compares a shard with itself, so a wrong cut would pass it. The twin has the checkpoint's config
with small sizes and random weights. Each rank computes its logits whole, cuts it by the plan, and computes them again
together with the other ranks.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from math import gcd
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from ...ipc.errors import UnsupportedModelError
from ...kernels.reference.reference_backend import ReferenceBackend
from ..model.learn.fuse_match import LOGITS_TOLERANCE, deviations
from .cuts import Plan, count_in, sharding_of
from .parallel_backend import ParallelBackend
from .plans import plans_of
from .sharded_model import cut_parameters, install, route

logger = logging.getLogger(__name__)

HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, WINDOW = 4, 2, 16, 4, 320, 20
TOKENS = 24  # of the text that is computed whole and cut
SEED = 20240229
GAINS = (0.3, 1.5)  # of embeddings and of other matrices, so that logits depend on the context

# The first pattern that matches a field's name gives its small value. The patterns are for field names, not for models.
_SMALL: list[tuple[str, Any]] = [
    (r"(vocab_size.*|.*_vocab)", VOCAB),
    (
        r"(hidden_size|hidden_size_global|d_model|n_embd|embedding_size|word_embed_proj_dim|input_dim|embed_dim|"
        r"output_channels|adapter_(in_dim|out_dim|input_size))",
        "hidden",
    ),
    (r"(.*intermediate_size.*|.*ffn_dim|n_inner|d_ff|ffn_hidden_size|mlp_dim|.*_ffn_size)", "inner"),
    (r"(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_decoder_layers|depth)", "layers"),
    (
        r"(num_attention_heads|n_heads?|num_heads|decoder_attention_heads|encoder_attention_heads|.*_num_heads)",
        "heads",
    ),
    (r"(num_key_value_heads|n_head_kv|num_kv_heads|.*num_key_value_heads|.*num_kv_heads)", "kv_heads"),
    (
        r"(head_dim|v_head_dim|qk_nope_head_dim|global_head_dim|.*_v_head_dim|swa_head_dim|attention_head_dim)",
        HEAD_DIM,
    ),
    (r"qk_rope_head_dim", HEAD_DIM),
    (r"(rotary_dim|hidden_size_per_layer_input)", 8),
    (r"(qk_head_dim|index_head_dim)", 2 * HEAD_DIM),
    (r"index_topk", 8),
    (r"index_n_heads", 8),
    (r"(kv_lora_rank|q_lora_rank|o_lora_rank)", 32),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)", "experts"),
    (r"(num_experts_per_tok|moe_k|moe_topk|num_experts_per_token|top_k_experts|moe_top_k|moe_router_topk)", 2),
    (r"(n_group|topk_group|num_expert_group|n_shared_experts)", 1),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length)", 512),
    (r"(sliding_window|sliding_window_size|window_size|attention_window)", WINDOW),
    (r"(first_k_dense_replace|num_dense_layers)", 1),
    (r"(num_kv_shared_layers)", 2),
    (r".*(dropout|pdrop|layerdrop).*", 0.0),
]
# These get a value even if the config's is None.
_ALSO_UNSET = r"(num_key_value_heads|head_dim|n_routed_experts|n_shared_experts|num_experts_per_tok|n_group|topk_group)"
_KEPT = r"(?!.*(layers?|depth|experts?|vocab.*)$).*"  # sizes that depend on each other in some classes


def shrink(
    config: PreTrainedConfig,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    keep: str = "",
    layers: int = LAYERS,
    **given: Any,
) -> PreTrainedConfig:
    """`config` with small sizes, and with the fields in `given`. What a class derives from sizes is derived anew.

    Args:
        keep: a pattern of names whose values stay.
    """
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": heads * HEAD_DIM,
        "inner": 24 * heads,
        "experts": max(8, heads),
        "layers": layers,
    }
    kind: Any = type(config)
    fields: dict[str, Any] = {}
    there = count_in(config, "num_hidden_layers")
    for name, value in config.to_dict().items():
        if isinstance(getattr(kind, name, None), property):
            continue
        if name.endswith("_token_id"):
            fields[name] = None if value is None else 0 if name == "pad_token_id" else 1
        elif name in {"layer_types", "mlp_layer_types"} and isinstance(value, list):
            kinds = list(dict.fromkeys(value))  # use each kind of layer in turn
            fields[name] = [kinds[index % len(kinds)] for index in range(layers)]
        elif isinstance(value, list) and len(value) == there > 1:
            fields[name] = [value[index % there] for index in range(layers)]
        elif (isinstance(value, (int, float)) and not isinstance(value, bool)) or re.fullmatch(_ALSO_UNSET, name):
            small = next((small for pattern, small in _SMALL if re.fullmatch(pattern, name)), None)
            if small is not None and not (keep and re.fullmatch(keep, name)):
                fields[name] = sizes.get(small, small) if value is None or value else value
    for name in config.sub_configs:
        if isinstance(getattr(config, name, None), PreTrainedConfig):
            with contextlib.suppress(Exception):  # a part that can't be built on its own is not changed
                part = getattr(config, name)
                wanted = {k: v for k, v in given.items() if k in fields or k in part.to_dict()}
                fields[name] = shrink(part, heads, kv_heads, keep, layers, **wanted)
    usual = {} if keep else kind().to_dict()
    own = {n: v for n, v in config.to_dict().items() if n not in config.sub_configs and (n, v) not in usual.items()}
    own = {n: v for n, v in own.items() if not isinstance(getattr(kind, n, None), property)}
    made: PreTrainedConfig = kind(**{**own, **fields, "is_decoder": True, "use_cache": True, **given})
    return made


def choose_plan(
    config: PreTrainedConfig,
    name: str,
    backend: ParallelBackend,
    whole_experts: bool = False,
    auto: Any = AutoModelForCausalLM,
) -> tuple[str, Plan]:
    """A description of the plan for this checkpoint on the ranks of `backend`, and the plan. `whole_experts`: see
    `plans_of`. auto: transformers' class that makes the model.

    Raises:
        UnsupportedModelError: no plan gave the twin's own logits.
    """
    group = backend.group
    twin = make_twin(config, group.size, auto)
    tried = []
    for how, plan in plans_of(twin, whole_experts, backend.homes is not None):
        reason = _wrong(copy.deepcopy(twin), plan, backend)
        if not reason:
            return how, plan
        tried.append(f"{how}: {reason}")
        logger.debug("%s", tried[-1])
    why = "; ".join(tried) or "there is none"
    raise UnsupportedModelError(f"{name}: no plan for {group.size} ranks gives the model's own logits ({why})")


def make_twin(
    config: PreTrainedConfig, size: int, auto: Any = AutoModelForCausalLM, layers: int = LAYERS
) -> PreTrainedModel:
    """A model of these sizes: heads enough for all ranks, and heads of keys and values that are cut as the config's
    are.

    Raises:
        UnsupportedModelError: there is none.
    """
    text = config.get_text_config()
    heads, shared = (count_in(text, name) for name in ("num_attention_heads", "num_key_value_heads"))
    wanted = max(HEADS, 2 * size)
    kept = wanted if not shared or shared == heads else max(KV_HEADS, size) if shared % size == 0 else gcd(shared, size)
    failed: Exception | None = None
    for keep in ("", _KEPT):
        try:
            small = shrink(config, wanted, kept, keep, layers)
            with torch.random.fork_rng():
                torch.manual_seed(SEED)
                made: PreTrainedModel = auto.from_config(small, dtype=torch.float32, attn_implementation="eager")
                _draw(made)
                made.requires_grad_(False)
                logits_of(made.eval())
            return made
        except Exception as error:  # sizes that do not fit together
            failed = error
    raise UnsupportedModelError(f"a small {type(config).__name__} to check the plan for several ranks fails: {failed}")


def _draw(model: PreTrainedModel) -> None:
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, GAINS[parameter not in embeddings] * parameter.shape[-1] ** -0.5)


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    vocab = model.config.get_text_config().vocab_size
    ids = torch.arange(TOKENS) * 7919 % (vocab - 2) + 2
    rows: torch.Tensor
    if model.get_output_embeddings() is not None:
        rows = model(ids[None], use_cache=False).logits[0]
    else:  # of a model that is not for generating, the hidden states
        rows = model.base_model(ids[None])[0][0]
    return rows


def _wrong(model: PreTrainedModel, plan: Plan, wanted: ParallelBackend) -> str:
    """Why the plan is not right; empty: it is."""
    group, own = wanted.group, logits_of(model)
    sharding = sharding_of(model, plan, group.rank, group.size)
    inside = sharding.experts if wanted.homes else sharding.sums or sharding.added or sharding.experts
    reason = "" if inside else "it has no experts to divide" if wanted.homes else "nothing is cut in the layers"
    if wanted.parts and (sharding.added or sharding.experts):
        reason = "sum_parts is set, and experts are summed as they are cut"
    if not reason:
        backend = ParallelBackend(ReferenceBackend(), group, homes=wanted.homes)
        cut_parameters(model, sharding)
        install(model, sharding, backend)
        route(model, backend)
        with group.silence():  # an error of one rank alone would leave the others waiting
            reason = _fails(model)
    if not all(group.least([not reason])):
        return reason or "it fails on another rank"
    error = float(deviations(logits_of(model), own).max())
    if wanted.homes is not None:
        rows = [TOKENS] * group.size  # the same of each rank
        with wanted.homes.step(rows, rows):
            error = max(error, *(float(deviations(each, own).max()) for each in logits_of(model).split(TOKENS)))
    right = error <= LOGITS_TOLERANCE[torch.float32]
    return "" if all(group.least([right])) else f"logits differ by {error:.2g} standard deviations"


def _fails(model: PreTrainedModel) -> str:
    try:
        logits_of(model)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""
