"""What the stages of a pipeline do together in tests."""

from __future__ import annotations

from typing import Any

import torch

import tiny
from mainspring.benchmarks.architectures import MAX_TOKENS, drive
from mainspring.core.model.learn.whole_match import make_whole
from mainspring.core.model.load import sliced_reading
from mainspring.core.model.load.loader import load_model
from mainspring.core.parallel.group import RankGroup
from mainspring.core.parallel.parallel_backend import ParallelBackend
from mainspring.core.parallel.stages import Stages
from mainspring.core.worker.kv_layout import LayerShape
from mainspring.core.worker.stage_facts import facts_of_stages
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from rank_functions import PROMPTS

CPU = torch.device("cpu")


def load(world: RankGroup, path: str, tensor: int = 1, kernels: str = "reference", **how: Any) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    stages = Stages(world, world.size // tensor, tensor)
    group = stages.group_of_stage()
    backend: Any = ReferenceBackend() if kernels == "reference" else NativeBackend()
    backend = backend if group is None else ParallelBackend(backend, group)
    model = load_model(ModelConfig(model=path, **how), LoadConfig(), CPU, None, backend, stages=stages)
    if kernels != "reference":
        with stages.silence():
            make_whole(model, backend)
    return model, stages


def generate(
    world: RankGroup, path: str, tensor: int = 1, kernels: str = "reference"
) -> tuple[list[list[int]], list[str]]:
    """Greedy tokens of all prompts, and the notes of loading."""
    model, stages = load(world, path, tensor, kernels)
    agree_on_tokens(model, stages)
    return drive(model, PROMPTS, MAX_TOKENS), model.notes


def agree_on_tokens(model: Any, stages: Stages) -> None:
    """All stages choose the tokens that the first rank of the last one chooses."""
    forward, vocab = model.forward, model.vocab_size

    def chosen(*args: Any, **kwargs: Any) -> torch.Tensor:
        tokens = forward(*args, **kwargs).argmax(-1)
        stages.world.copy_of_leader(tokens)
        return torch.nn.functional.one_hot(tokens, vocab)

    model.forward = chosen


def read(world: RankGroup, path: str) -> tuple[list[str], dict[str, tuple[int, ...]], bool]:
    """The tensors that are read, the parameters that are held, and whether values of all names can be set."""
    names: list[str] = []
    whole = sliced_reading.safe_open

    class Noting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = whole(*args, **kwargs)

        def __enter__(self) -> Any:
            self._file.__enter__()
            return self

        def __exit__(self, *args: Any) -> Any:
            return self._file.__exit__(*args)

        def keys(self) -> Any:
            return self._file.keys()

        def get_slice(self, name: str) -> Any:
            names.append(name)
            return self._file.get_slice(name)

    sliced_reading.safe_open = Noting  # type: ignore[assignment, misc]
    try:
        model, _ = load(world, path)
    finally:
        sliced_reading.safe_open = whole
    parameters = model.parameters
    embedding = "model.embed_tokens.weight"
    parameters.check(embedding, 0, (tiny.VOCAB_SIZE, 64))
    for name in parameters.others:
        parameters.check(name, 0, parameters.whole_shape(name))
    if embedding not in parameters.others:
        parameters.set(embedding, torch.full((tiny.VOCAB_SIZE, 64), 7.0))
    head = model.model.get_output_embeddings().weight
    return sorted(names), {name: tuple(parameters.shape(name)) for name in parameters.names()}, bool((head == 7).all())


def refusal(world: RankGroup, path: str) -> str:
    try:
        load(world, path)
    except UnsupportedModelError as error:
        return str(error)
    return "it loads"


def layouts(world: RankGroup, path: str) -> tuple[list[tuple[str, int, int | None]], int, dict[LayerShape, int], str]:
    model, stages = load(world, path)
    facts = facts_of_stages(stages, model, ReferenceBackend(), f"weights of stage {stages.index}")
    layout = model.lay_out(ReferenceBackend(), 16, torch.float32, facts.most)
    groups = [(group.kind, group.token_bytes, group.window) for group in layout.groups]
    return groups, layout.block_elements, facts.most, facts.fingerprint
