"""Models that give vectors instead of tokens: which they are, how a checkpoint says its rows become one vector, and
its own classification head.

The files of sentence-transformers beside a checkpoint (modules.json) are followed. A head is the model's own forward,
run with our hidden states in the place of its trunk's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.auto.modeling_auto import (
    AutoModel,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ....ipc.config import LoadConfig, ModelConfig, PoolerConfig
from ....ipc.errors import InvalidArgumentError, NotSupportedError, UnsupportedModelError
from ....ipc.messages import Pooling
from ....ipc.tokenizer_files import checkpoint_folder
from ....kernels.contract import Backend
from ...parallel.parallel_backend import ParallelBackend
from ...parallel.sharded_model import route
from ...plan.pooling_facts import PoolingFacts
from ..learn.fuse import Decision
from ..learn.fuse_match import LOGITS_TOLERANCE
from ..learn.probe import UNLIMITED
from ..learn.row_invariant import check_rows, make_row_invariant
from ..load.classifier_of_tokens import classifier_of_tokens
from ..load.frozen_rope import freeze_rope
from ..load.kept_decisions import KeptDecisions
from ..load.loader import Prepare, build_model, heads_of, page, read_config, shards_of
from ..load.refuse import refuse_config, refuse_encoder_class, trial_run
from ..load.sliced_reading import reading
from ..media.dual_encoder import DualEncoder, is_dual_encoder
from ..media.retrieval import RetrievalMerger
from .attention import attention_set
from .encoder import EncoderModel, is_causal, verify_encoder
from .float_products import fast_products
from .paged_model import PagedModel

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Softmax": lambda x: x.softmax(-1),
}
_LEGACY = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "lasttoken"}
_MODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # rows [tokens, hidden] → [hidden]
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "lasttoken": lambda rows: rows[-1],
}
_HEADS = {
    "ForSequenceClassification": (AutoModelForSequenceClassification, ["classify"]),
    "ForTokenClassification": (AutoModelForTokenClassification, ["token_classify"]),
    "ForRetrieval": (AutoModelForPreTraining, ["token_embed"]),  # which has all classes of that name
}


class Dense(NamedTuple):
    """A layer between pooling and the vector; fp32."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str


class Recipe(NamedTuple):
    """From rows to an embedding."""

    mode: str
    dense: Sequence[Dense] = ()
    normalize: bool = True
    max_length: int | None = None  # tokens, that the checkpoint says it is good for


def wants_pooling(model: ModelConfig, load: LoadConfig) -> bool:
    """Whether a pooling model is asked for, or, where nothing is said, what the checkpoint is.

    Raises:
        InvalidArgumentError: `runner` and `task` contradict each other.
        ModelNotFoundError, UnsupportedModelError: as `read_config`.
    """
    by_task = "auto" if model.task == "auto" else "generate" if model.task == "generate" else "pooling"
    if "auto" not in (model.runner, by_task) and model.runner != by_task:
        raise InvalidArgumentError(f"runner is {model.runner!r} and task is {model.task!r}: give one of them")
    runner = by_task if model.runner == "auto" else model.runner
    if runner != "auto" or not model.model:
        return runner == "pooling"
    if (_folder(model, load) / "modules.json").is_file():
        return True
    return any(not issubclass(head, GenerationMixin) for head in heads_of(read_config(model, load)))


class PoolingModel:
    """A trunk that gives hidden states, and what makes vectors of them."""

    def __init__(
        self, model: PreTrainedModel, trunk: PagedModel | EncoderModel, tasks: list[str], recipe: Recipe
    ) -> None:
        self.model, self.trunk, self.recipe = model, trunk, recipe
        self.retrieves, self.is_plain = tasks == ["token_embed"], tasks == ["embed"]
        self.has_head = not (self.retrieves or self.is_plain)
        self._activation = _activation(model.config) if self.has_head else "Identity"
        by_pairs = tasks == ["classify"] and model.config.num_labels == 1
        more = ["score"] if by_pairs else [] if self.has_head else ["token_embed", "score"]
        self.tasks = list(dict.fromkeys([*tasks, *more]))
        self.notes: list[str] = []
        self.width = recipe.dense[-1].weight.shape[0] if recipe.dense else trunk.hidden_size
        if isinstance(trunk, DualEncoder):
            self.tasks, self.width = ["embed", "score"], trunk.width
        elif self.retrieves:
            row = torch.ones(1, trunk.hidden_size)
            self.width = head_output(model, torch.zeros(1, dtype=torch.int64), row).shape[-1]

    def facts(self) -> PoolingFacts:
        last_row_alone = self.recipe.mode == "lasttoken"
        of_tokens = self.width if self.retrieves else self.trunk.hidden_size
        return PoolingFacts(self.tasks, of_tokens, self.width, self.has_head, last_row_alone)

    @torch.inference_mode()
    def finish(self, pooling: Pooling, token_ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The vector, or vectors, of a request, in fp32, from its hidden states ``[tokens, hidden]``, fp32 too."""
        if self.has_head:
            logits = head_output(self.model, torch.from_numpy(token_ids.astype(np.int64)), torch.from_numpy(rows))
            out = ACTIVATIONS[self._activation](logits) if pooling.activate in (None, True) else logits
            return out.cpu().numpy()
        vectors, normalize = torch.from_numpy(rows), True
        if self.retrieves:  # by the model's own code, which gives them the length 1
            ids = torch.from_numpy(token_ids.astype(np.int64))
            vectors, normalize = head_output(self.model, ids, vectors), bool(pooling.dimensions)
        elif isinstance(self.trunk, DualEncoder):
            vectors = self.trunk.pool(token_ids, vectors)
        elif pooling.task == "embed":
            vectors, normalize = _MODES[self.recipe.mode](vectors), self.recipe.normalize
            for weight, bias, activation in self.recipe.dense:
                vectors = ACTIVATIONS[activation](F.linear(vectors[None], weight, bias)[0])
        return finish_vectors(pooling, vectors, normalize)

    def explain(self) -> list[str]:
        """What was learned and decided at load, for ``--explain-model``."""
        named = "its own head" if not self.is_plain else f"{self.recipe.mode}, {len(self.recipe.dense)} dense layers"
        lines = self.trunk.explain() if isinstance(self.trunk, PagedModel) else [f"model: {type(self.model).__name__}"]
        return [*lines, *self.notes, f"pooling: {named}; tasks: {', '.join(self.tasks)}"]


def finish_vectors(pooling: Pooling, vectors: torch.Tensor, normalize: bool = True) -> np.ndarray:
    """The part that a request wants of vectors ``[..., width]``, of length 1 if it says so, or else if `normalize`."""
    vectors = vectors.float().cpu()
    if pooling.dimensions:
        vectors = vectors[..., : pooling.dimensions]
    if normalize if pooling.activate is None else pooling.activate:
        vectors = F.normalize(vectors, dim=-1)
    return vectors.numpy()


def load_pooling_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    device: torch.device,
    backend: Backend,
    decisions: Mapping[str, Decision] | KeptDecisions | None,
    prepare: Prepare,
    pooler: PoolerConfig | None = None,
) -> PoolingModel:
    """Load a checkpoint for pooling. Arguments and errors as `load_model`."""
    pooler = pooler or PoolerConfig()
    config, name = read_config(model_config, load_config), model_config.model or ""
    if model_config.quantization is not None:
        raise NotSupportedError(f"quantization is {model_config.quantization!r}; pooling models are not quantized yet")
    refuse_config(config, name)
    architecture = (config.architectures or [""])[0]
    auto, tasks = next((head for end, head in _HEADS.items() if architecture.endswith(end)), (AutoModel, ["embed"]))
    of_tokens = bool(getattr(config, "classifier_from_token", None))
    if of_tokens:
        tasks, auto = ["classify"], AutoModelForSequenceClassification
    retrieves = tasks == ["token_embed"]
    if retrieves and isinstance(backend, ParallelBackend):
        raise NotSupportedError(f"{architecture} takes images, and can't be divided over several ranks")
    shards = shards_of(config, name, backend, auto=auto)
    if of_tokens:
        with reading(shards.cuts_of) if shards else nullcontext():
            model = classifier_of_tokens(config, model_config, load_config, device)
    else:
        model = build_model(config, model_config, load_config, device, auto, shards.cuts_of if shards else None)
    model.requires_grad_(False).eval()
    if is_dual_encoder(model):
        if shards is not None or pooler.seq_pooling_type or pooler.pooling_type:
            raise NotSupportedError(
                f"{type(model).__name__} is a dual encoder: it pools by its own code, and on one rank; unset "
                "pooling_type of pooler_config, and tensor_parallel_size"
            )
        return _dual_encoder(model, pooler)
    if shards is not None:
        shards.finish(model)
    trunk: Any = model.base_model
    notes: list[str] = []
    with trial_run(type(trunk).__name__):
        causal = is_causal(trunk)
    if retrieves and not causal:
        raise UnsupportedModelError(f"{type(trunk).__name__} is an encoder that takes images, which is not served yet")
    recipe = _recipe(_folder(model_config, load_config), "lasttoken" if causal else "cls")
    if model is not trunk:
        with trial_run(type(model).__name__):
            notes.append(_verify_head(model))
    if causal:
        with trial_run(type(model).__name__):
            merger = RetrievalMerger(model) if retrieves else None
        served: Any = page(trunk, model_config.max_model_len, backend, decisions, prepare, merger=merger)
    else:
        refuse_encoder_class(type(trunk))
        if isinstance(backend, ParallelBackend):
            route(trunk, backend)
        with trial_run(type(trunk).__name__):
            served = _encoder(trunk, notes)
    if mode := pooler.seq_pooling_type or pooler.pooling_type:
        recipe = recipe._replace(mode={"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}[mode])
    pooling = PoolingModel(model, served, tasks, recipe)
    pooling.notes += [*([shards.note] if shards else []), *notes]
    return _with_first_task(pooling, pooler)


def _with_first_task(pooling: PoolingModel, pooler: PoolerConfig) -> PoolingModel:
    if pooler.task is not None:
        if pooler.task not in pooling.tasks:
            raise InvalidArgumentError(f"pooler_config: the task is {pooler.task}; the model can {pooling.tasks}")
        pooling.tasks.sort(key=lambda task: task != pooler.task)
    return pooling


def _dual_encoder(model: PreTrainedModel, pooler: PoolerConfig) -> PoolingModel:
    with trial_run(type(model).__name__), fast_products(model.device, model.dtype):
        encoder = DualEncoder(model)
        notes = make_row_invariant(encoder.model) if model.device.type == "cpu" else []
        notes += [encoder.verify(), *check_rows(encoder.model, refuse=False)]
    pooling = PoolingModel(model, encoder, ["embed"], Recipe("cls"))
    pooling.notes += notes
    return _with_first_task(pooling, pooler)


def _encoder(model: PreTrainedModel, notes: list[str]) -> EncoderModel:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    notes += freeze_rope(model, limit) if limit else []
    with fast_products(model.device, model.dtype):  # which it is served with
        if model.device.type == "cpu":
            notes += make_row_invariant(model)
        encoder = EncoderModel(model)
        notes.append(verify_encoder(encoder))
        notes += check_rows(model, refuse=False)
    return encoder


@torch.inference_mode()
def head_output(model: PreTrainedModel, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """fp32 ``[labels]``, or ``[tokens, labels]``, or ``[tokens, width]`` of a retrieval model: what the head of `model`
    makes of its trunk's hidden states ``[tokens, hidden]``, of any dtype, anywhere."""
    trunk: Any = model.base_model
    states = hidden[None].to(model.device, model.dtype, copy=True)
    pooler = getattr(trunk, "pooler", None)
    output = BaseModelOutputWithPoolingAndCrossAttentions(
        last_hidden_state=states, pooler_output=None if pooler is None else pooler(states)
    )
    own = vars(trunk).get("forward")
    trunk.forward = lambda *_, **__: output
    try:
        found: torch.Tensor = model(input_ids=token_ids[None].to(model.device))[0]
    finally:
        del trunk.forward
        if own is not None:
            trunk.forward = own
    return found[0].float()


@torch.inference_mode()
def _verify_head(model: PreTrainedModel) -> str:
    """The head over the trunk's hidden states is the whole model; → a line for ``--explain-model``."""
    ids = torch.arange(2, 12, device=model.device) % model.config.get_text_config().vocab_size
    with attention_set(model, "eager"):
        own, hidden = model(input_ids=ids[None])[0][0].float(), model.base_model(input_ids=ids[None])[0][0]
    error, limit = float((head_output(model, ids, hidden) - own).abs().amax()), LOGITS_TOLERANCE[model.dtype]
    if not error <= limit * max(1.0, float(own.abs().amax())):
        raise UnsupportedModelError(
            f"the head of {type(model).__name__} needs more than the last hidden states: its output differs by "
            f"{error:.2g}"
        )
    return f"verified: the head of {type(model).__name__} over hidden states within {error:.1e} of the whole model"


def _activation(config: PreTrainedConfig) -> str:
    """What makes probabilities of a head's logits: as the checkpoint says, or as its kind has it."""
    own = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = own or getattr(config, "sbert_ce_default_activation_function", None)
    if named:
        name = str(named).rpartition(".")[2]
        if name not in ACTIVATIONS:
            raise UnsupportedModelError(f"config.json asks for the activation {named!r}, which is not known here")
        return name
    if config.problem_type == "regression":
        return "Identity"
    several = (config.num_labels or 0) > 1 and config.problem_type != "multi_label_classification"
    return "Softmax" if several else "Sigmoid"


def _folder(model: ModelConfig, load: LoadConfig) -> Path:
    return checkpoint_folder(str(model.model), model.revision, load.download_dir)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} can't be read: {error}") from error


def _recipe(folder: Path, default: str) -> Recipe:
    """What the files of sentence-transformers say; without them `default`, normalised."""
    if not (folder / "modules.json").is_file():
        return Recipe(default)
    recipe = Recipe(default, normalize=False)
    for module in _json(folder / "modules.json"):
        kind, place = str(module["type"]).rpartition(".")[2], folder / module["path"]
        if kind == "Transformer":
            named = (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length"))
            found = [_json(place / file).get(name) for file, name in named if (place / file).is_file()]
            longest = next((int(length) for length in found if length and length < UNLIMITED), None)
            recipe = recipe._replace(max_length=longest)
        elif kind == "Pooling":
            recipe = recipe._replace(mode=_mode(_json(place / "config.json")))
        elif kind == "Dense":
            recipe = recipe._replace(dense=[*recipe.dense, _dense(place)])
        elif kind == "Normalize":
            recipe = recipe._replace(normalize=True)
        else:
            raise UnsupportedModelError(f"{folder / 'modules.json'} has a module {kind}, which is not known here")
    return recipe


def _mode(config: Mapping[str, Any]) -> str:
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or ())
    if named is None:
        chosen = [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True]
        modes = [_LEGACY.get(name, name) for name in chosen if name != "include_prompt"] or ["mean"]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"the checkpoint pools by {' and '.join(modes)}; known is one of {', '.join(_MODES)}"
        )
    return str(modes[0])


def _dense(place: Path) -> Dense:
    config = _json(place / "config.json")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    known = config.get("module_input_name", "sentence_embedding") == "sentence_embedding"
    if activation not in ACTIVATIONS or not known or not (place / "model.safetensors").is_file():
        raise UnsupportedModelError(
            f"{place}: a dense layer needs model.safetensors, an activation among {', '.join(ACTIVATIONS)} and the "
            "pooled vector as its input"
        )
    tensors = load_file(place / "model.safetensors")
    bias = tensors.get("linear.bias")
    return Dense(tensors["linear.weight"].float(), None if bias is None else bias.float(), activation)
