"""A model's attention, learned from its config alone: a dry run in which every weight has a shape but no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ....ipc.config import LoadConfig, ModelConfig
from ....kernels.contract import AttentionSpec
from ....kernels.reference.reference_backend import ReferenceBackend
from ..load.loader import auto_class, read_config
from ..load.refuse import refuse_config, refuse_stateful, trial_run
from ..run.positions import longest_sequence
from .latent_probe import learn_latents
from .own_probe import learn_attention
from .recurrent_probe import learn_states

CPU, META = torch.device("cpu"), torch.device("meta")


def attention_of_config(model_config: ModelConfig) -> tuple[list[AttentionSpec], torch.dtype]:
    """What each attention call of a checkpoint asks for, and the checkpoint's dtype, of which no weight is read. Of a
    model that computes its attention itself, windows in buffers and repeated heads of keys are not seen this way.

    Raises:
        ModelNotFoundError: there is no such checkpoint.
        UnsupportedModelError: it can't be served, or its model can't be run without weights.
    """
    config = read_config(model_config, LoadConfig())
    refuse_config(config, model_config.model or "")
    dtype: Any = config.dtype or torch.float32 if model_config.dtype == "auto" else getattr(torch, model_config.dtype)
    limit = model_config.max_model_len or longest_sequence(config.get_text_config())
    with trial_run(str(model_config.model), " without weights"):
        with META:
            model = auto_class(config).from_config(
                config,
                dtype=torch.bfloat16,  # whatever it is: some operations know their shapes in 16 bits alone
                attn_implementation="eager",
                trust_remote_code=model_config.trust_remote_code,
            )
        with _Weightless():  # type: ignore[no-untyped-call]
            learn_states(model.eval())
            refuse_stateful(model)
            # All numbers are zeros here, so the shapes alone decide.
            calls = learn_latents(model, learn_attention(model, limit), ReferenceBackend())
    return [call.spec for call in calls], dtype


class _Weightless(TorchDispatchMode):
    """What an operation makes of a weight on the meta device and of other numbers is zeros on the CPU, so masks and
    positions, which a model may look at, are there. What would be made on the meta device is made on the CPU."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        on = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        wanted = {leaf for leaf in leaves if isinstance(leaf, torch.device)}
        if META not in on:
            args, kwargs = tree_map_only(torch.device, lambda on: CPU if on == META else on, (args, kwargs))
            return func(*args, **kwargs)
        if CPU not in on | wanted:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(META), (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: META, (args, kwargs))
        return tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device=CPU), func(*args, **kwargs))
