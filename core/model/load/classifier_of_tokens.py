"""A generating model as a classifier: its labels are tokens (``classifier_from_token``), and the rows of its output
layer for these tokens become the head. Rerankers are published in this form."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification

from ....ipc.config import LoadConfig, ModelConfig
from ....ipc.errors import UnsupportedModelError
from ....ipc.tokenizer_files import read_files
from .loader import build_model, model_of_tensors

METHODS = ("from_2_way_softmax", "no_post_processing")


def classifier_of_tokens(
    config: PreTrainedConfig, model_config: ModelConfig, load_config: LoadConfig, device: torch.device
) -> PreTrainedModel:
    """Load a checkpoint as a classifier. Its config has, beside ``classifier_from_token``, the field ``method``:
    ``no_post_processing``: a label for each token; ``from_2_way_softmax``: one label, whose probability is that of the
    second token if the first one is the only other. The flag ``is_original_qwen3_reranker`` stands for the latter.

    Raises: as `load_model`.
    """
    own: Any = config
    tokens = own.classifier_from_token
    original = getattr(own, "is_original_qwen3_reranker", False)
    method = getattr(own, "method", None) or (METHODS[0] if original else None)
    if method not in METHODS or not isinstance(tokens, list) or (method == METHODS[0] and len(tokens) != 2):
        raise UnsupportedModelError(
            f"classifier_from_token is {tokens!r} and method {method!r}: give a list of tokens and one of "
            f"{', '.join(METHODS)}, the first one with two tokens"
        )
    token_ids = _ids(tokens, model_config, load_config)
    if type(config) not in (known := AutoModelForSequenceClassification._model_mapping):
        raise UnsupportedModelError(f"transformers has no classifier for the model_type {config.model_type!r}")
    generating: Any = build_model(config, model_config, load_config, torch.device("cpu"))
    head = generating.get_output_embeddings().weight.detach()[token_ids]
    if method == METHODS[0]:
        head = (head[1:].float() - head[:1].float()).to(head.dtype)
    own.num_labels = len(head)
    prefix = generating.base_model_prefix
    tensors = {f"{prefix}.{name}": tensor for name, tensor in generating.base_model.state_dict().items()}
    tensors["score.weight"] = head
    path = str(model_config.model)
    model = model_of_tensors(path, known[type(config)], config, tensors, model_config, load_config)
    return model.to(device)  # type: ignore[no-any-return]


def _ids(tokens: list[str], model_config: ModelConfig, load_config: LoadConfig) -> list[int]:
    from tokenizers import Tokenizer

    text = read_files(model_config, load_config.download_dir).get("tokenizer.json")
    if text is None:
        raise UnsupportedModelError(f"classifier_from_token needs a tokenizer.json, which {model_config.model!r} lacks")
    tokenizer = Tokenizer.from_str(text.decode())
    found = [tokenizer.token_to_id(token) for token in tokens]
    for token, number in zip(tokens, found, strict=True):
        if number is None:
            raise UnsupportedModelError(f"classifier_from_token names {token!r}, which is no token of the tokenizer")
    return [number for number in found if number is not None]
