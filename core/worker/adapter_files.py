"""Read adapters from folders in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``, no pickle.

Folders are untrusted input. Each file is read at once, up to the largest size that an adapter of this model can have.
Content that does not fit the model is an `InvalidRequestError` that names it. An adapter's digest covers both files.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...ipc.errors import InvalidRequestError
from ...ipc.messages import Adapter
from ..model.load.parameters import ParameterMap
from ..model.run.lora import Delta, LoRA, Place
from ..plan.control import AdapterFacts

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20  # of adapter_config.json: far above any real one, small enough to parse quickly
HEADER_BYTES = 16 << 20  # header of a safetensors file, allowed beside the tensor values
MAX_PATTERNS, MAX_PATTERN = 500, 200  # keys of `alpha_pattern`, and characters of a key, to bound the matching time
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_SAVED = re.compile(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight")  # saved beside an adapted output layer
_REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "kasa")  # initialisations that change the base model
# Fields that have no effect on the result, or are read below. Any other field that is set may change the computation.
_HARMLESS = set(
    "alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config exclude_modules "
    "fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform lora_alpha lora_dropout "
    "megatron_core peft_type peft_version qalora_group_size r rank_pattern revision runtime_config target_modules "
    "task_type use_rslora".split()
)


class LoRALimits(NamedTuple):
    """The limits that an adapter must respect."""

    places: Mapping[str, Place]
    max_rank: int
    parameters: ParameterMap  # the base model's; PEFT saves a copy of an adapted output layer with the adapter
    saved_bytes: int  # most bytes of such copies in an adapter's file


def read_lora(adapter: Adapter, limits: LoRALimits) -> LoRA:
    """Raises InvalidRequestError for an adapter that can't be computed as PEFT would compute it."""
    most = HEADER_BYTES + limits.saved_bytes
    most += sum(4 * limits.max_rank * (place.num_inputs + place.num_outputs) for place in limits.places.values())
    others = (shape for shape in limits.parameters.others.values() if len(shape) == 2)  # of other stages
    most += sum(4 * limits.max_rank * sum(shape) for shape in others)
    config, tensors, digest = _read(adapter, "LORA", most)
    try:
        return LoRA(digest, _deltas(config, tensors, limits))
    except (InvalidRequestError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidRequestError(f"the LoRA adapter {adapter.path!r}: {error}") from None


def read_prompt_adapter(adapter: Adapter, hidden_size: int) -> AdapterFacts:
    """Raises InvalidRequestError unless the folder holds prompt tuning for this hidden size, with as many virtual
    tokens as `adapter` names."""
    most = HEADER_BYTES + 4 * adapter.num_virtual_tokens * hidden_size
    _, tensors, digest = _read(adapter, "PROMPT_TUNING", most)
    embeddings, shape = tensors.pop("prompt_embeddings", None), [adapter.num_virtual_tokens, hidden_size]
    if embeddings is None or tensors or list(embeddings.shape) != shape:
        found = "none" if embeddings is None else list(embeddings.shape)
        raise InvalidRequestError(
            f"the prompt adapter {adapter.path!r} must hold one tensor prompt_embeddings of shape {shape}, virtual "
            f"tokens and hidden size; it has {found}{f' and {min(tensors)!r:.80}' if tensors else ''}"
        )
    return AdapterFacts(digest, embeddings.float().numpy())


def _read(adapter: Adapter, kind: str, most: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], bytes]:
    """The adapter's configuration, its tensors, and the digest of both files."""
    folder = Path(adapter.path).expanduser()
    text, data = _content(folder / CONFIG, MAX_CONFIG_BYTES), _content(folder / TENSORS, most)
    digest = hashlib.blake2b(hashlib.blake2b(text).digest() + hashlib.blake2b(data).digest(), digest_size=16).digest()
    try:
        config = json.loads(text)
        tensors = load(data)
    except (ValueError, RecursionError, SafetensorError, KeyError, RuntimeError) as error:
        raise InvalidRequestError(f"the adapter {adapter.path!r} is damaged: {error!s:.200}") from None
    if not isinstance(config, dict) or config.get("peft_type") != kind:
        found = config.get("peft_type") if isinstance(config, dict) else config
        raise InvalidRequestError(f"the adapter {adapter.path!r} has peft_type {found!r:.80}; it must be {kind!r}")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise InvalidRequestError(
                f"the adapter {adapter.path!r}: {name!r:.200} is {tensor.dtype}; it must be float32, float16 or "
                "bfloat16"
            )
        if not bool(tensor.isfinite().all()):
            raise InvalidRequestError(f"the adapter {adapter.path!r}: {name!r:.200} holds values that are not finite")
    return config, tensors, digest


def _content(path: Path, most: int) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidRequestError(f"{str(path)!r} is no file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequestError(f"the adapter's file {str(path)!r} can't be read: {why}") from None
    if len(data) > most:
        raise InvalidRequestError(f"{str(path)!r} has more than {most} bytes, which is the most for this model")
    return data


def _deltas(config: dict[str, Any], tensors: dict[str, torch.Tensor], limits: LoRALimits) -> dict[int, list[Delta]]:
    for name, value in config.items():
        if name not in _HARMLESS and value:
            raise InvalidRequestError(f"{name} is {value!r:.80}, which is not supported; it must not be set")
    if config.get("bias", "none") != "none":
        raise InvalidRequestError(f"bias is {config['bias']!r:.80}; it must be 'none'")
    if str(config.get("init_lora_weights")).startswith(_REWRITES_BASE):
        raise InvalidRequestError(
            f"init_lora_weights is {config['init_lora_weights']!r:.80}, which changes the model's own weights; save "
            "the adapter converted to plain LoRA"
        )
    pairs: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := _LORA.fullmatch(name):
            pairs[match[1]][match[2]] = tensor
        elif not (match := _SAVED.fullmatch(name)) or not _is_own(match[1] + ".weight", tensor, limits.parameters):
            raise InvalidRequestError(f"it holds {name!r:.200}, which is no part of a LoRA of linear layers")
    alphas = _patterns(config.get("alpha_pattern") or {})
    found: defaultdict[int, list[Delta]] = defaultdict(list)
    for module, pair in pairs.items():
        place = limits.places.get(module)
        if place is None and f"{module}.weight" in limits.parameters.others:
            continue  # the stage that has it looks at it
        if place is None:
            raise InvalidRequestError(f"{module!r:.200} is no linear layer of this model that an adapter can change")
        if len(pair) < 2:
            raise InvalidRequestError(f"of {module!r:.200} it holds lora_{min(pair)} alone")
        down, up = pair["A"], pair["B"]
        rank = len(down) if down.dim() == 2 else 0
        if not 1 <= rank <= limits.max_rank:
            raise InvalidRequestError(f"{module!r:.200} has rank {rank}; max_lora_rank is {limits.max_rank}")
        if list(down.shape) != [rank, place.num_inputs] or list(up.shape) != [place.num_outputs, rank]:
            raise InvalidRequestError(
                f"{module!r:.200} has shapes {list(down.shape)} and {list(up.shape)}; they must be "
                f"{[rank, place.num_inputs]} and {[place.num_outputs, rank]}"
            )
        alpha = float(next((alpha for key, alpha in alphas if key.match(module)), config.get("lora_alpha", 8)))
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        if not abs(scale) < float(torch.finfo(torch.float32).max):
            raise InvalidRequestError(f"lora_alpha is {alpha} for {module!r:.200}; it must be a finite number")
        if place.cut is not None and place.cut.dim:  # as the weight: columns of partial sums, or rows of outputs
            down = place.cut.of(down)
        elif place.cut is not None:
            up = place.cut.of(up)
        found[place.weight].append(Delta(down.float(), up.float(), scale, place.start))
    return dict(found)


def _is_own(name: str, tensor: torch.Tensor, parameters: ParameterMap) -> bool:
    """Whether `tensor` equals the base model's parameter of this name, as far as this rank can tell."""
    if name in parameters.others:
        return tensor.shape == parameters.whole_shape(name)
    try:
        held = parameters.slot(name).tensor
    except KeyError:
        return False
    if not (held.numel() or id(held) in parameters.packed):
        raise InvalidRequestError("it holds weights of the model, which sleep: call wake_up first")
    cut = parameters.cuts.get(name)
    if tensor.shape != parameters.whole_shape(name):
        return False
    return torch.equal((tensor if cut is None else cut.of(tensor)).to(held.dtype), parameters.get(name).cpu())


def _patterns(given: dict[str, Any]) -> list[tuple[re.Pattern[str], float]]:
    """Compile `alpha_pattern`: regular expressions that match the end of a module name. A pattern that may backtrack
    for long is refused."""
    found = []
    for key, alpha in given.items():
        slow = "{" in key or len(re.findall(r"[*+?]", key)) > 2 or re.search(r"\)\s*[*+?]", key)
        if slow or len(key) > MAX_PATTERN or len(given) > MAX_PATTERNS:
            raise InvalidRequestError(f"alpha_pattern has {len(given)} keys, such as {key!r:.80}, which may take long")
        try:
            found.append((re.compile(rf"(.*\.)?({key})$"), alpha))
        except re.error as error:
            raise InvalidRequestError(f"alpha_pattern has {key!r:.80}, which is no pattern: {error}") from None
    return found
