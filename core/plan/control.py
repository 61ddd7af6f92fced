"""What a planner asks of a worker beside steps, and what it must know of it. Plain data, as step plans are.

A record's answer is what the method of `Worker` says that takes it; what takes long is a future.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
import numpy as np

from ...ipc.errors import EngineDeadError
from ...ipc.messages import Adapter, ModelFacts, Sampling
from ..memory.updates import LayerGroup
from .pooling_facts import PoolingFacts
from .step import StepPlan, StepResult


class PrepareAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read an adapter's folder. Answer: a future of `AdapterFacts`, or of what is wrong with the folder. The number
    has to be dropped: after an error too, because one of several ranks may have read it, and of a prompt adapter once
    its facts are there."""

    number: int
    adapter: Adapter
    frontend: int = 0  # whose request needs it: frontends take turns


class DropAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget an adapter, or that it is to be read."""

    number: int


class PrepareGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compile a grammar. Answer: a future of None, or of what is wrong with it."""

    number: int
    kind: str
    text: str
    frontend: int = 0  # whose request needs it: frontends take turns


class DropGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int


class DropFunctions(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget user functions that `Worker.lend_functions` numbered."""

    numbers: tuple[int, ...]


class CheckSampling(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask the classes of ``logits_processors`` whether they take a request. Error: InvalidRequestError if not."""

    sampling: Sampling


class KeepMedia(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep the arrays that a processor made of a media item. Once a plan has encoded it, only what the encoder gave is
    kept, until it is dropped."""

    number: int
    modality: str
    names: list[str]  # of the arrays, as the model's forward names them
    arrays: list[np.ndarray]


class DropMedia(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget a media item. No sequence that has a slot names it, unless its prompt is computed."""

    number: int


class Sleep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give up the KV cache and the GPU's memory for weights, which move to the host's; with `level` 2 weights are
    dropped. No step is in flight, and no slot is taken."""

    level: int


class Wake(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Undo `Sleep`: weights as they were, or from the checkpoint; an empty cache once both are there."""

    weights: bool
    kv_cache: bool


class ParameterRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a parameter."""

    name: str  # in the checkpoint
    start: int  # the first row
    values: np.ndarray  # [rows, ...]; uint16 for bfloat16


class SetParameters(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Replace rows of parameters.

    Errors: InvalidRequestError if the weights sleep or are quantized; KeyError or ValueError if there is no such
    parameter, or if it has another shape. Then none of the rows is replaced.
    """

    rows: list[ParameterRows]


class JoinTrainer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Join the process group of a trainer, which is rank 0 in it, and leave the present one. Answer: a future of None,
    done when all ranks have joined, or of a ConnectError."""

    address: str  # where the trainer listens
    port: int
    rank: int
    world_size: int
    places: int  # for the ranks of this core, from `rank` on


class LeaveTrainer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leave the trainer's group. What is being received of it still arrives, for nobody."""


class ReceiveParameters(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Receive parameters that the trainer broadcasts one after the other, and change nothing. Answer: a future of
    `ParameterRows`, one for each, or of an error; then the group is closed.

    Errors: InvalidRequestError if there is no group.
    """

    names: list[str]
    dtypes: list[str]  # float32, float16 or bfloat16
    shapes: list[list[int]]


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give the device's unused memory back, after a step that found none."""


class StartProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    prefix: str | None = None


class StopProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer: the trace's file, on the worker's machine."""


class Explain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer: what was learned of the model and decided, line by line."""


Control = (
    PrepareAdapter
    | DropAdapter
    | PrepareGrammar
    | DropGrammar
    | DropFunctions
    | CheckSampling
    | KeepMedia
    | DropMedia
    | Sleep
    | Wake
    | SetParameters
    | JoinTrainer
    | LeaveTrainer
    | ReceiveParameters
    | ReleaseMemory
    | StartProfile
    | StopProfile
    | Explain
)


class AdapterFacts(msgspec.Struct, frozen=True, array_like=True):
    digest: bytes  # of the folder's content
    embeddings: np.ndarray | None = None  # of a prompt adapter: float32 [virtual tokens, hidden]


class MediaFacts(msgspec.Struct, frozen=True, array_like=True):
    """How a model takes media in its prompts."""

    modalities: list[str]
    row_bytes: int  # of memory for each token of an item, at most, once it is encoded
    # what is computed in one step, because its tokens see later ones: "item"; "prompt", if it has items; "every" prompt
    spans: str = ""
    encoder_input: bool = False  # whether each prompt has one item, an encoder's input, which has no tokens in it
    lone: bool = False  # whether a prompt is either a text or one item


class WorkerFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a planner must know of a worker and its model."""

    model: ModelFacts
    groups: list[LayerGroup]  # of layers that share a block table; none: prompts are computed whole
    num_blocks: int  # in the pool, the null block included
    max_model_len: int  # tokens
    num_host_blocks: int = 0  # in host memory
    accepts_embeddings: bool = False  # prompts may be embeddings
    has_adapters: bool = False  # requests may have LoRA adapters
    asynchronous: bool = False  # the host has time to spare while a step runs
    pooling: PoolingFacts | None = None  # of a model that gives vectors
    most_steps: int = 1  # that it makes of one plan
    stages: int = 1  # of a pipeline: as many steps are under way at once
    media: MediaFacts | None = None  # of a model whose prompts may have media
    homes: int = 1  # ranks that each keep the requests of their own, with so many blocks each

    def depth(self, overlap: bool | None) -> int:
        """Steps in flight. overlap: whether the user asks for two; None: if that saves time."""
        if self.stages > 1:
            return self.stages
        return 2 if (self.asynchronous if overlap is None else overlap) else 1


class PendingStep(Protocol):
    """A launched plan."""

    @property
    def lacks_memory(self) -> bool:
        """Whether it is known already that the device found no memory for it."""

    def wait(self) -> StepResult:
        """Wait for the result, or for the next one: see `StepResult.more`."""


class Worker(Protocol):
    """One model on one or several devices. Steps are computed in the order they are launched."""

    facts: WorkerFacts
    decisions: Any  # what a restart need not find out again: plain values
    interrupt: np.ndarray  # int32 [1]: no further step of a plan of several is begun while it is not 0
    beat: Callable[[], None]  # called between parts of a step that may take long: the worker does not hang
    error: EngineDeadError | None  # why it can compute nothing any more

    def warm_up(self) -> None:
        """Do once what would make the first steps slow."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin a step, without waiting for it."""

    def control(self, record: Control) -> Any:
        """Do what `record` asks; raises a `MainspringError` if that fails."""

    def lend_functions(self, functions: Sequence[Callable[..., Any]]) -> tuple[int, ...]:
        """Numbers by which sequences name functions of this process. A worker elsewhere refuses."""

    def run_method(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """`collective_rpc`: a method by name, or a function of this process; one result for each rank."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """What is done in it stands under this name in a profile, if one is recorded."""

    def close(self) -> None:
        """End the processes that it has started."""
