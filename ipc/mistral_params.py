"""Mistral's own config, params.json, as fields of transformers' config (``config_format="mistral"``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ModelNotFoundError, UnsupportedModelError, shown

# key of params.json → field of transformers' config
_RENAMED = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "dtype": "dtype",
}
_REQUIRED = ("dim", "n_layers", "hidden_dim", "n_heads", "vocab_size", "norm_eps")
_MOE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_ONLY = {"model_type": ("transformer",), "activation": ("silu",), "causal": (True,)}  # keys that may have these values
_ELSEWHERE = ("rope_theta", "sliding_window", "moe", "yarn")  # keys that `hf_fields` reads one by one
DEFAULT_LENGTH = 128_000  # tokens, where params.json names no length


def read_params(
    name: str, config_format: str, revision: str | None = None, download_dir: str | None = None
) -> dict[str, Any] | None:
    """The fields that transformers' config has for the params.json of a checkpoint, a folder or a hub id. None: its
    config is config.json. With ``auto`` that is so unless `name` is a folder that has only params.json.

    Raises:
        ModelNotFoundError: there is no params.json, or it can't be read.
        UnsupportedModelError: it describes a model that can't be served.
    """
    folder = Path(name).expanduser()
    if config_format == "hf":
        return None
    if config_format == "auto" and ((folder / "config.json").is_file() or not (folder / "params.json").is_file()):
        return None
    try:
        path = folder / "params.json"
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "params.json", revision=revision, cache_dir=download_dir))
        params = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"config_format is {config_format!r}, and params.json of {name!r} can't be read ({type(error).__name__})"
        ) from error
    if not isinstance(params, dict):
        raise ModelNotFoundError(f"params.json of {name!r} holds no JSON object")
    fields = hf_fields(params)
    if "max_position_embeddings" not in fields:
        fields["max_position_embeddings"] = _length_beside(path) or DEFAULT_LENGTH
    return fields


def hf_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the config of a dense Mistral model, of one whose layers differ in their window, or of Mixtral.

    Raises:
        UnsupportedModelError: a key is missing, or it or its value is not known. A key that is not known may be null,
            false or empty.
    """
    for key in _REQUIRED:
        if params.get(key) is None:
            raise UnsupportedModelError(f"params.json lacks the key {key!r}")
    for key, value in params.items():
        # the keys with an underscore were switched off by their author
        known = key in _RENAMED or key in _ELSEWHERE or key.startswith("_") or value in (None, False, {})
        if not known and value not in _ONLY.get(key, ()):
            raise UnsupportedModelError(f"params.json has the key {key!r} with {shown(value)}, which is not supported")
    fields = {ours: params[key] for key, ours in _RENAMED.items() if params.get(key) is not None}
    fields |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    window = params.get("sliding_window")
    # Mistral's own code has this default, too
    theta = params.get("rope_theta") or (1_000_000.0 if window is None else 10_000.0)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": float(theta)}
    if params.get("yarn"):
        fields["rope_parameters"] |= {"rope_type": "yarn", **_yarn(params["yarn"])}
    fields["sliding_window"] = window
    if isinstance(window, list):
        fields |= _windows(window, fields["num_hidden_layers"])
    if params.get("moe"):
        if fields["model_type"] != "mistral":
            raise UnsupportedModelError("params.json has both moe and windows that differ by layer in sliding_window")
        fields |= _part("moe", params["moe"], _MOE)
        fields |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    return fields


def _part(name: str, given: Any, renamed: Mapping[str, str]) -> dict[str, Any]:
    given = given if isinstance(given, dict) else {"": given}
    for key, value in given.items():
        if key not in renamed and value not in (None, False):
            raise UnsupportedModelError(
                f"params.json has the key {key!r} in {name} with {shown(value)}, which is not supported"
            )
    missing = [key for key in list(renamed)[:2] if given.get(key) is None]
    if missing:
        raise UnsupportedModelError(f"params.json lacks the key {missing[0]!r} in {name}")
    return {ours: given[key] for key, ours in renamed.items() if given.get(key) is not None}


def _yarn(given: Any) -> dict[str, Any]:
    rest = {key: value for key, value in given.items() if key != "apply_scale"} if isinstance(given, dict) else given
    found = {key: float(value) for key, value in _part("yarn", rest, _YARN).items()}
    found["original_max_position_embeddings"] = int(found["original_max_position_embeddings"])
    # without the scale, the attention's logits are those of unscaled positions
    return found if given.get("apply_scale", True) else {**found, "attention_factor": 1.0}


def _windows(windows: list[Any], num_layers: int) -> dict[str, Any]:
    """Of a pattern of windows, one for each layer, that is repeated."""
    sizes = {size for size in windows if size is not None}
    if len(sizes) > 1 or not windows or num_layers % len(windows):
        raise UnsupportedModelError(
            f"params.json has the key 'sliding_window' with {shown(windows)}; it must be one window, or a pattern of "
            "one window and null that fits the layers"
        )
    if None not in windows or not sizes:
        return {"sliding_window": windows[0]}
    layers = ["full_attention" if size is None else "sliding_attention" for size in windows]
    return {
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": sizes.pop(),
        "layer_types": layers * (num_layers // len(windows)),
    }


def _length_beside(params: Path) -> int | None:
    """The length that a config.json beside params.json names."""
    try:
        found = json.loads((params.parent / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None
