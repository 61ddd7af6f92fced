"""What a user names an adapter by: a folder in PEFT's format, on the core's machine, and a number of the user's own."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidArgumentError, suggests_names
from .messages import Adapter

MAX_NAME, MAX_PATH = 256, 4096  # characters


@suggests_names
@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter. Its number belongs to the engine or connection that uses it: two may give theirs the same.

    Args:
        lora_name: for outputs and metrics.
        lora_int_id: from 1 on; one for each adapter.
        lora_path: folder with ``adapter_config.json`` and ``adapter_model.safetensors``, on the core's machine.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        _check("lora", self.lora_name, self.lora_int_id, self.lora_path, "lora_path")

    @property
    def message(self) -> Adapter:
        return Adapter(self.lora_int_id, self.lora_name, str(self.lora_path))


@suggests_names
@dataclass(frozen=True)
class PromptAdapterRequest:
    """A prompt adapter (PEFT's prompt tuning): embeddings that stand before a prompt as virtual tokens.

    Args:
        prompt_adapter_name: for errors.
        prompt_adapter_id: from 1 on; see `LoRARequest`.
        prompt_adapter_local_path: folder in PEFT's format, on the core's machine.
        prompt_adapter_num_virtual_tokens: how many virtual tokens it has.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int

    def __post_init__(self) -> None:
        where = self.prompt_adapter_local_path
        _check("prompt_adapter", self.prompt_adapter_name, self.prompt_adapter_id, where, "prompt_adapter_local_path")
        _check_int("prompt_adapter_num_virtual_tokens", self.prompt_adapter_num_virtual_tokens, 2**31 - 1)

    @property
    def message(self) -> Adapter:
        tokens, where = self.prompt_adapter_num_virtual_tokens, str(self.prompt_adapter_local_path)
        return Adapter(self.prompt_adapter_id, self.prompt_adapter_name, where, tokens)


def _check(kind: str, name: object, number: object, path: object, path_field: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidArgumentError(f"{kind}_name is {name!r:.80}; it must be a str of 1 to {MAX_NAME} characters")
    _check_int("lora_int_id" if kind == "lora" else f"{kind}_id", number, 2**63 - 1)
    if not 0 < len(str(path)) <= MAX_PATH:
        raise InvalidArgumentError(f"{path_field} is {path!r:.80}; it must be a path of 1 to {MAX_PATH} characters")


def _check_int(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidArgumentError(f"{name} is {value!r:.80}; it must be an int from 1 to {most}")
