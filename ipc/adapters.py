"""Adapters as users name them: a folder in PEFT's format on the core's machine, and a number that the user chooses."""

from __future__ import annotations

import os
from dataclasses import InitVar, dataclass

from .errors import InvalidArgumentError, NotSupportedError, shown, suggests_names
from .messages import Adapter
from .params import is_text

MAX_NAME, MAX_PATH = 256, 4096  # characters


@suggests_names
@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter. Its number is valid in one engine or connection; another one may use it for another adapter.

    Args:
        lora_name: for outputs and metrics.
        lora_int_id: from 1 on; one for each adapter.
        lora_path: folder with ``adapter_config.json`` and ``adapter_model.safetensors``, on the core's machine.
        lora_local_path: its older name.
        base_model_name: only None.

    Raises:
        InvalidArgumentError: a value is out of range.
        NotSupportedError: `base_model_name` is given.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: InitVar[str | None] = None
    base_model_name: InitVar[str | None] = None

    def __post_init__(self, lora_local_path: str | None, base_model_name: str | None) -> None:
        if base_model_name is not None:
            raise NotSupportedError("base_model_name is not supported yet; leave it out")
        if lora_local_path is not None:
            if self.lora_path != "":
                raise InvalidArgumentError("lora_local_path is the older name of lora_path: give one of them")
            object.__setattr__(self, "lora_path", lora_local_path)
        _check("lora", self.lora_name, self.lora_int_id, self.lora_path, "lora_path")

    @property
    def message(self) -> Adapter:
        return Adapter(self.lora_int_id, _exact(self.lora_name), _exact(os.fspath(self.lora_path)))


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
        tokens, where = self.prompt_adapter_num_virtual_tokens, _exact(os.fspath(self.prompt_adapter_local_path))
        return Adapter(self.prompt_adapter_id, _exact(self.prompt_adapter_name), where, tokens)


def _check(kind: str, name: object, number: object, path: object, path_field: str) -> None:
    if not is_text(name) or not 0 < len(name) <= MAX_NAME:
        raise InvalidArgumentError(f"{kind}_name is {shown(name)}; it must be a str of 1 to {MAX_NAME} characters")
    _check_int("lora_int_id" if kind == "lora" else f"{kind}_id", number, 2**63 - 1)
    where = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not is_text(where) or not 0 < len(where) <= MAX_PATH:
        raise InvalidArgumentError(f"{path_field} is {shown(path)}; it must be a path of 1 to {MAX_PATH} characters")


def _check_int(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be an int from 1 to {most}")


def _exact(text: str) -> str:
    """A plain str. msgpack refuses subclasses of str."""
    return str.__str__(text)
