"""The trainer's side of weight transfer, under vLLM's names: it sends a model's weights to engines.

```python
sender = WeightTransferTrainerFactory.trainer_init(
    NCCLTrainerInitInfo("127.0.0.1", 29500, world_size=2, rank=0), client=engine, source=ModuleSource(model)
)
sender.send_weights()  # after each training step
```

`client` is an `LLM` or an `LLMEngine`, also one that is connected to a daemon's address for administrators, or an
object with its methods `init_weight_transfer_engine`, `start_weight_update`, `update_weights` and
`finish_weight_update`, which are given dicts. "NCCL" is vLLM's name for a broadcast from the trainer, here with gloo
over TCP; "IPC" for weights that go with the calls.

Each rank of a trainer makes a sender and calls `send_weights`. Rank 0 sends; the others iterate over their weights,
because the gathering of a sharded tensor takes part in all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from ..core.worker.trainer_group import TrainerGroup, in_thread
from ..ipc.errors import ConnectError, InvalidArgumentError, MainspringError

Pairs = Iterator[tuple[str, torch.Tensor]]
BUFFER_BYTES = 1 << 30  # of the arrays in one call, if the transfer is packed


@dataclass(frozen=True)
class ParamMeta:
    """A parameter, by its name in the checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The trainer's weights. The user's subclasses override both members."""

    @property
    def metadata(self) -> list[ParamMeta]:
        """All parameters in the order of `iter_full`; the same in each rank."""
        raise NotImplementedError

    def iter_full(self) -> Pairs:
        """Yield the name and the whole tensor of each parameter."""
        raise NotImplementedError


class ModuleSource(WeightSource):
    """The parameters of a module. Those that are sharded (`DTensor`) are gathered one by one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._module.named_parameters()]

    def iter_full(self) -> Pairs:
        for name, parameter in self._module.named_parameters():
            gather = getattr(parameter, "full_tensor", None)
            yield name, parameter if gather is None else gather()


class WeightSyncClient(Protocol):
    """What a sender needs of an engine."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> object: ...
    def start_weight_update(self) -> object: ...
    def update_weights(self, update_info: dict[str, Any], /) -> object: ...
    def finish_weight_update(self) -> object: ...


@dataclass
class IPCTrainerInitInfo:
    """Weights go with the calls of the client.

    Args:
        rank: of this process among the trainer's; 0 sends.
        packed: send several calls of about `packed_buffer_size_bytes` each, instead of one.
    """

    backend: ClassVar[str] = "ipc"
    packed: bool = False
    packed_buffer_size_bytes: int = BUFFER_BYTES
    rank: int = field(kw_only=True)


@dataclass
class NCCLTrainerInitInfo:
    """Weights are broadcast in a process group.

    Args:
        master_address, master_port: where rank 0 of the trainer listens; the engine's machine must reach it.
        world_size: the trainer's rank 0 and the engine.
        packed, packed_buffer_size_bytes, packed_num_buffers: without effect.
        rank: of this process among the trainer's; 0 sends.
    """

    backend: ClassVar[str] = "nccl"
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = BUFFER_BYTES
    packed_num_buffers: int = 2
    rank: int = field(kw_only=True)


class TrainerWeightTransferEngine:
    """Sends the weights of `source` to the engine of `client`. `WeightTransferTrainerFactory` makes it."""

    def __init__(self, init_info: Any, client: WeightSyncClient, source: WeightSource) -> None:
        self._info, self._client, self._source = init_info, client, source
        if self.is_sender:
            self._open()

    @property
    def is_sender(self) -> bool:
        return bool(self._info.rank == 0)

    def send_weights(self) -> None:
        """Let the engine serve the weights that `source` has now. Requests go on with the present ones until all have
        arrived; an update that fails changes nothing.

        Raises:
            ConnectError: the engine has left the group.
            InvalidArgumentError: `source` does not yield what its metadata say.
            MainspringError: the engine's refusal. After an error make a new sender.
        """
        metadata = self._source.metadata
        if not self.is_sender:
            for _ in self._source.iter_full():
                pass
            return
        self._client.start_weight_update()
        try:
            self._send(metadata, _checked(self._source.iter_full(), metadata))
        except BaseException:
            self._give_up()
            raise
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """Close what connects this sender with the engine."""

    def _open(self) -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        """Let the engine drop the update that it has begun to get."""
        raise NotImplementedError

    def _send(self, metadata: list[ParamMeta], pairs: Pairs) -> None:
        raise NotImplementedError


class IPCTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """See `IPCTrainerInitInfo`."""

    def _open(self) -> None:
        self._client.init_weight_transfer_engine({})

    def _give_up(self) -> None:
        with contextlib.suppress(MainspringError):  # the error that is being raised says more
            self._open()

    def _send(self, metadata: list[ParamMeta], pairs: Pairs) -> None:
        described: list[ParamMeta] = []
        tensors: list[torch.Tensor] = []
        size = 0
        for meta, (_, tensor) in zip(metadata, pairs, strict=True):
            described.append(meta)
            tensors.append(tensor.detach())
            size += tensor.nbytes
            if self._info.packed and size >= self._info.packed_buffer_size_bytes:
                self._client.update_weights(_update_info(described) | {"ipc_handles": tensors})
                described, tensors, size = [], [], 0
        if described:
            self._client.update_weights(_update_info(described) | {"ipc_handles": tensors})


class NCCLTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """See `NCCLTrainerInitInfo`."""

    _group: TrainerGroup | None = None

    def _open(self) -> None:
        info = self._info
        place = {"master_address": info.master_address, "master_port": info.master_port}
        joined = in_thread(
            self._client.init_weight_transfer_engine, {**place, "rank_offset": 1, "world_size": info.world_size}
        )
        opened = in_thread(TrainerGroup, info.master_address, info.master_port, 0, info.world_size)
        self._group = _result(opened, joined)
        joined.result()

    def _give_up(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _send(self, metadata: list[ParamMeta], pairs: Pairs) -> None:
        group = self._group
        if group is None:
            raise ConnectError("this sender has failed or was shut down: make a new one")
        received = in_thread(self._client.update_weights, _update_info(metadata))
        try:
            for _, tensor in pairs:
                _result(in_thread(group.broadcast, tensor.detach().to("cpu").contiguous()), received)
        except ConnectError:
            if (refusal := received.exception()) is not None:  # the engine has left because of it
                raise refusal from None
            raise
        received.result()


class WeightTransferTrainerFactory:
    """Makes senders."""

    @classmethod
    def trainer_init(
        cls, init_info: Any, *, client: WeightSyncClient, source: WeightSource | None = None
    ) -> TrainerWeightTransferEngine:
        """A sender, once it is connected with the engine. `init_info` chooses its kind.

        Raises:
            InvalidArgumentError: there is no source, or no sender for `init_info`.
            ConnectError: the address can't be opened, or the engine did not come within 5 minutes.
            MainspringError: the engine's refusal.
        """
        if source is None:
            raise InvalidArgumentError("source is None; it must be a WeightSource")
        kinds: dict[type, type[TrainerWeightTransferEngine]] = {
            IPCTrainerInitInfo: IPCTrainerWeightTransferEngine,
            NCCLTrainerInitInfo: NCCLTrainerWeightTransferEngine,
        }
        if type(init_info) not in kinds:
            raise InvalidArgumentError(f"init_info is {init_info!r:.80}; it must be an NCCLTrainerInitInfo or IPC's")
        return kinds[type(init_info)](init_info, client, source)


def _result(ours: Future[Any], theirs: Future[Any]) -> Any:
    """The result of what this side does, unless what the engine does fails before."""
    wait([ours, theirs], return_when=FIRST_COMPLETED)
    if theirs.done() and not ours.done():
        theirs.result()
    return ours.result()


def _update_info(metadata: list[ParamMeta]) -> dict[str, Any]:
    return {
        "names": [one.name for one in metadata],
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in metadata],
        "shapes": [list(one.shape) for one in metadata],
    }


def _checked(pairs: Pairs, metadata: list[ParamMeta]) -> Pairs:
    """The pairs, as long as they are what the engine was told to expect."""
    count = 0
    for count, (name, tensor) in enumerate(pairs, 1):
        told = metadata[count - 1] if count <= len(metadata) else None
        if told != (found := ParamMeta(name, tensor.dtype, tuple(tensor.shape))):
            raise InvalidArgumentError(f"parameter {count - 1} of the source is {found}, but its metadata say {told}")
        yield name, tensor
    if count < len(metadata):
        raise InvalidArgumentError(f"the source has {count} parameters, but its metadata {len(metadata)}")
