"""The small JSON files of a checkpoint that a frontend reads, above all generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...ipc.config import ModelConfig
from ...ipc.errors import ModelNotFoundError
from ...ipc.params import SamplingParams
from ...ipc.tokenizer_files import generation_folder


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelNotFoundError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelNotFoundError(f"{path} holds no JSON object")
    return value


def generation_config(folder: Path, model: ModelConfig) -> dict[str, Any]:
    """The generation config of the checkpoint, or of the folder named instead, with the user's overrides."""
    given = model.generation_config
    if given not in ("auto", "none"):
        folder = generation_folder(given)
    found = {} if given == "none" else read_json(folder / "generation_config.json")
    return {**found, **model.override_generation_config}


def eos_token_ids(config: dict[str, Any]) -> list[int]:
    """The end-of-sequence ids of a generation config, which holds one, a list or none."""
    eos = config.get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])


def default_sampling_params(config: dict[str, Any]) -> SamplingParams:
    """The sampling parameters of a generation config. An explicit `do_sample: false` means greedy."""
    said = {**config, "max_tokens": config.get("max_new_tokens")}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    chosen = {name: said[name] for name in names if said.get(name) is not None}
    if config.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return SamplingParams(**chosen)
