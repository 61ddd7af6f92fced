"""The encoders of a model whose own forward calls them, without a method for it, as Qwen2-Audio's does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

INPUTS = {"audio": "input_features"}  # the arguments by which such a forward is known


class _Stopped(Exception):
    pass


class InnerEncoder:
    """Takes the place of ``get_<modality>_features``.

    The parts of the model that run before its language model encode one item. What the last of them gives is the
    output, and where the forward calls them for a prompt, they give the outputs of its items.
    """

    def __init__(self, inner: torch.nn.Module, decoder: torch.nn.Module, token: int) -> None:
        self._inner, self._decoder, self._token = inner, decoder, token
        self._parts = [part for part in inner.children() if all(one is not decoder for one in part.modules())]
        self._ran: dict[torch.nn.Module, Any] = {}  # what ran for the first item, in order, and outputs of that form
        self.__signature__ = inspect.signature(inner.forward)

    def __call__(self, return_dict: bool = True, **arrays: torch.Tensor) -> BaseModelOutputWithPooling:
        ran: dict[torch.nn.Module, Any] = {}

        def stop(*_: Any) -> None:
            raise _Stopped

        def keep(module: torch.nn.Module, _: Any, output: Any) -> None:
            ran[module] = output

        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.register_forward_hook(keep).remove)
            stack.callback(self._decoder.register_forward_pre_hook(stop).remove)
            ids = torch.full((1, 2), self._token, device=next(self._inner.parameters()).device)
            try:
                self._inner(input_ids=ids, **arrays)
            except _Stopped:
                pass
            except Exception:  # where rows and tokens are compared; before that, a part has not run
                if not ran or (self._ran and ran.keys() != self._ran.keys()):
                    raise
        rows = list(ran.values())[-1]
        self._ran = self._ran or tree_map_only(torch.Tensor, lambda x: x.new_zeros(()).expand(x.shape), ran)
        return BaseModelOutputWithPooling(pooler_output=rows)

    @contextmanager
    def giving(self, output: BaseModelOutputWithPooling) -> Iterator[None]:
        """In this context, the parts give this output."""
        given = {**self._ran, list(self._ran)[-1]: output.pooler_output}
        try:
            for part, value in given.items():
                vars(part)["forward"] = lambda *_, value=value, **__: value
            yield
        finally:
            for part in given:
                vars(part).pop("forward", None)


def add_methods(model: PreTrainedModel) -> None:
    """Give a model methods that encode, if its forward encodes itself."""
    base = model.base_model
    accepted = inspect.signature(base.forward).parameters
    for modality, name in INPUTS.items():
        token = getattr(model.config, f"{modality}_token_id", None)
        if name not in accepted or token is None:
            continue
        decoder = model.get_decoder()
        if any(part is decoder for part in base.children()):
            vars(base)[f"get_{modality}_features"] = InnerEncoder(base, decoder, token)
