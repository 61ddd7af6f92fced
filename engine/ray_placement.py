"""Ray places the processes of an engine, and reports their deaths. It does nothing for a step.

`RanksInRay`: each further rank has an actor that offers it to the core, as `mainspring rank` does on a machine without
Ray. `CoreInRay`: the core itself, with its supervisor, runs in an actor, and the engine is a frontend over tcp.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..ipc.config import EngineConfig
from ..ipc.errors import (
    EngineDeadError,
    EngineStartError,
    InvalidArgumentError,
    NotSupportedError,
    from_wire,
    wire_name,
    wire_text,
)
from ..ipc.keys import AllowedKey, KeyPair, append_allowed, new_keypair
from ..ipc.transport import Endpoints, free_port, make_runtime_dir
from .placement import Placement

try:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:  # then `place` does not import this file
    ray = PlacementGroupSchedulingStrategy = None

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

C = TypeVar("C")
ROOM_SECONDS = 600.0  # that Ray has to find room for a placement group, or for an actor
LOOK_SECONDS = 0.5  # interval of checks of the actors
AGAIN_SECONDS = 1.0  # before an actor that has died is placed again
BUNDLES = "VLLM_RAY_BUNDLE_INDICES"  # environment variable: which bundles of a placement group to use, as "0,1"


class RankActor:
    """An actor that offers one rank to the core until it is killed."""

    def devices(self) -> list[str]:
        """The GPUs that Ray has given to it."""
        return _own_devices()

    def offer(self, address: str, keys: KeyPair, machine: str) -> None:
        from ..ipc.rank_agent import RankAgent

        RankAgent(address, KeyPair(*keys), machine=machine).run()


class CoreActor:
    """An actor in which a supervisor runs a core."""

    def start(self, config: EngineConfig, token: bytes, client_key: str, placement_group: Any) -> tuple[str, str]:
        """Start the core. Returns its address and its public key.

        Raises:
            RuntimeError: with the name and the text of the core's error.
        """
        from ..ipc.core_group import CoreGroup

        self._folder = make_runtime_dir()
        keys, allowed = new_keypair(Path(self._folder, "core.key")), Path(self._folder, "allowed")
        append_allowed(allowed, client_key, AllowedKey("engine", admin=True))
        host = ray.util.get_node_ip_address()
        address = f"tcp://{host}:{free_port(host)}"
        try:
            self._placement = place_ranks(config, placement_group)
            endpoints = Endpoints(address, "", keys.secret, str(allowed), token)
            self._cores = CoreGroup(self._placement.config, endpoints, self._folder)
            self._cores.start()
        except Exception as error:
            raise RuntimeError(wire_name(error), wire_text(error)) from None
        return address, keys.public

    def run(self) -> str:
        """Until the core is stopped, or has died too often; then why."""
        try:
            self._cores.run()
        except EngineDeadError as error:
            return str(error)
        finally:
            self._placement.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return "it was stopped"

    def stop(self) -> None:
        self._cores.stop()


class RanksInRay(Placement):
    """An actor in each bundle of a placement group but the core's own, which is one on this node. An actor that dies,
    with its node or alone, is placed again; the core has died with its rank, and the next one waits for it."""

    def __init__(self, config: EngineConfig, placement_group: PlacementGroup | None = None) -> None:
        if config.parallel_config.num_copies > 1:
            raise NotSupportedError("data_parallel_size is above 1 with ranks in Ray; make an engine for each copy")
        _connect()
        size = config.parallel_config.num_ranks
        self._made = placement_group is None and ray.util.get_current_placement_group() is None
        self._group = placement_group or ray.util.get_current_placement_group() or _make_group(config, size)
        self._folder = make_runtime_dir()
        self._actors: dict[int, Any] = {}  # by bundle
        self._running: dict[Any, int] = {}  # the bundle of each call of `RankActor.offer`
        self._closing = threading.Event()
        try:
            _wait(self._group.ready(), f"the placement group {_listed(self._group)}")
            first, *others = _bundles(self._group, size)
            host = ray.util.get_node_ip_address()
            self._keys, key_file = _key_file(self._folder)
            self._address = f"tcp://{host}:{(port := free_port(host))}"
            devices = self._devices(first)
            for bundle in others:
                self._start(bundle)
        except BaseException:
            self.close()
            raise
        parallel = msgspec.structs.replace(
            config.parallel_config, master_addr=host, master_port=port, rank_key_file=key_file, device_ids=devices
        )
        super().__init__(msgspec.structs.replace(config, parallel_config=parallel))
        threading.Thread(target=self._watch, name="mainspring-ray", daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(Exception):  # Ray may have ended
            for actor in self._actors.values():
                ray.kill(actor)
            if self._made:
                ray.util.remove_placement_group(self._group)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _devices(self, bundle: int) -> list[str]:
        """The GPUs of the core: this process's, or those of an actor that holds its bundle."""
        if (own := _own_devices()) or not self._group.bundle_specs[bundle].get("GPU"):
            return own
        actor = self._actors[bundle] = self._actor(bundle)
        found: list[str] = _wait(actor.devices.remote(), f"the bundle {self._group.bundle_specs[bundle]} of the core")
        return found

    def _actor(self, bundle: int) -> Any:
        spec = self._group.bundle_specs[bundle]
        needs = {"num_gpus": 1, "num_cpus": 0} if spec.get("GPU") else {"num_cpus": spec.get("CPU", 0)}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return ray.remote(max_restarts=0, scheduling_strategy=strategy, **needs)(RankActor).remote()

    def _start(self, bundle: int) -> None:
        node = ray.util.placement_group_table(self._group)["bundles_to_node_id"].get(bundle, "")
        actor = self._actors[bundle] = self._actor(bundle)
        self._running[actor.offer.remote(self._address, tuple(self._keys), node)] = bundle

    def _watch(self) -> None:
        """Place actors that have ended again."""
        lost: list[int] = []  # bundles whose actors have ended
        while (self._running or lost) and not self._closing.wait(LOOK_SECONDS):
            with contextlib.suppress(Exception):  # Ray is ending, or does not answer just now
                for call in ray.wait(list(self._running), timeout=0)[0] if self._running else ():
                    bundle = self._running.pop(call)
                    lost.append(bundle)
                    logger.error("Ray: the actor of bundle %d has ended, and is placed again: %s", bundle, _why(call))
                    with contextlib.suppress(Exception):
                        ray.kill(self._actors[bundle])  # it may only be out of reach
                if lost and not self._closing.wait(AGAIN_SECONDS):
                    self._start(lost[0])
                    del lost[0]


class CoreInRay(Placement):
    """The core in an actor. It is an owner of a core, as `EmbeddedCore` is."""

    def __init__(self, config: EngineConfig, placement_group: PlacementGroup | None = None) -> None:
        super().__init__(config)
        _connect()
        self.token = secrets.token_bytes(16)
        self._folder = make_runtime_dir()
        ours, self._key_file = _key_file(self._folder)
        group = placement_group or ray.util.get_current_placement_group()
        needs: dict[str, Any] = _needs(config)
        if group is not None:
            needs = {
                "num_cpus": 0,
                "num_gpus": min(1, group.bundle_specs[0].get("GPU", 0)),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            }
        elif config.parallel_config.distributed_executor_backend == "ray":
            needs = {"num_cpus": 0}  # its placement group has a bundle for the core
        self._actor = ray.remote(max_restarts=0, max_concurrency=4, **needs)(CoreActor).remote()
        try:
            started = self._actor.start.remote(config, self.token, ours.public, group)
            self.address, self._server_key = _wait(started, "the core")
        except BaseException:
            self.close()
            raise
        self._run = self._actor.run.remote()

    def client(self, launch: Callable[[EngineConfig], C], connect: Callable[..., C]) -> C:
        return connect(self, key=self._key_file, server_key=self._server_key)

    def dead_error(self) -> EngineDeadError | None:
        done, _ = ray.wait([self._run], timeout=0)
        return EngineDeadError(f"the core's actor has ended: {_why(self._run)}") if done else None

    def close(self) -> None:
        with contextlib.suppress(Exception):  # Ray may have ended
            self._actor.stop.remote()
            ray.wait([self._run], timeout=10.0)
        with contextlib.suppress(Exception):
            ray.kill(self._actor)
        shutil.rmtree(self._folder, ignore_errors=True)


def place_ranks(config: EngineConfig, placement_group: Any) -> Placement:
    """The placement of a core that is in this process's care."""
    ranked = config.parallel_config.distributed_executor_backend == "ray"
    return RanksInRay(config, placement_group) if ranked else Placement(config)


def _connect() -> None:
    """Join the Ray that the user has begun; else the one of `RAY_ADDRESS` or of this machine, or begin one."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False)


def _needs(config: EngineConfig) -> dict[str, int]:
    """What a rank needs of Ray."""
    device = config.device_config.device
    gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return {"num_gpus": 1, "num_cpus": 0} if gpu else {"num_cpus": 1}


def _make_group(config: EngineConfig, size: int) -> PlacementGroup:
    """A placement group with a bundle for each rank, the first one on this node."""
    resource = "GPU" if _needs(config).get("num_gpus") else "CPU"
    here = f"node:{ray.util.get_node_ip_address()}"
    first = {resource: 1.0} | ({here: 0.001} if here in ray.cluster_resources() else {})
    return ray.util.placement_group([first, *[{resource: 1.0}] * (size - 1)], strategy="PACK")


def _bundles(group: PlacementGroup, size: int) -> list[int]:
    """The bundles of the ranks, the core's first.

    Raises:
        InvalidArgumentError: there are too few, or none is on this node.
    """
    chosen = os.environ.get(BUNDLES, "")
    indices = [int(index) for index in chosen.split(",")] if chosen else list(range(group.bundle_count))[:size]
    if len(indices) != size or not all(0 <= index < group.bundle_count for index in indices):
        raise InvalidArgumentError(
            f"there must be a bundle for each of {size} ranks; the placement group has {group.bundle_count}"
            + (f", and {BUNDLES} is {chosen}" if chosen else "")
        )
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    here = [index for index in indices if nodes[index] == ray.get_runtime_context().get_node_id()]
    if not here:
        raise InvalidArgumentError(
            "no bundle of the placement group is on this node, where the core runs: run the engine in one of them, "
            "or give engine_use_ray=True"
        )
    return [here[0], *(index for index in indices if index != here[0])]


def _listed(group: PlacementGroup) -> str:
    return " ".join(map(str, group.bundle_specs))


def _own_devices() -> list[str]:
    return [str(device) for device in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def _key_file(folder: str) -> tuple[KeyPair, str]:
    path = Path(folder, "engine.key")
    return new_keypair(path), str(path)


def _wait(call: Any, what: str) -> Any:
    """The result of a call, without the warning of Ray about waiting in an actor's event loop.

    Raises:
        MainspringError: the core's error.
        EngineStartError: there is no room, or the actor has died.
    """
    try:
        return call.future().result(ROOM_SECONDS)
    except TimeoutError:
        raise EngineStartError(f"Ray has had no room for {what} for {ROOM_SECONDS:.0f} s") from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RuntimeError) and len(cause.args) == 2:
            raise from_wire(*cause.args) from None
        raise EngineStartError(f"Ray could not start {what}: {error!s:.500}") from None
    except ray.exceptions.RayError as error:
        raise EngineStartError(f"Ray could not start {what}: {error!s:.500}") from None


def _why(call: Any) -> str:
    """How a call of an actor has ended."""
    try:
        return str(ray.get(call))
    except ray.exceptions.RayError as error:
        return " ".join(str(error).split())[:300]
