"""A core that holds adapters, over the stand-in model: which it reads, and which stay in memory."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from msgspec.structs import replace

from harness import StandInWorker, message, run_core
from mainspring.core.loop import EngineCore
from mainspring.core.plan.control import AdapterFacts, DropAdapter, PrepareAdapter, PrepareGrammar
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import EngineConfig, LoRAConfig
from mainspring.ipc.errors import NotSupportedError
from mainspring.ipc.messages import Adapter, DesiredState, HeldAdapter, Sampling


class AdapterWorker(StandInWorker):
    """Reads any adapter, whose digest is its path, and compiles no grammar."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.facts = replace(self.facts, has_adapters=True)

    def control(self, record: Any) -> Any:
        super().control(record)
        if isinstance(record, PrepareGrammar):
            raise NotSupportedError("no grammars here")
        if isinstance(record, PrepareAdapter):
            read = Future[AdapterFacts]()
            read.set_result(AdapterFacts(record.adapter.path.encode()))
            return read

    @property
    def held(self) -> list[str]:
        """The paths of the adapters in memory."""
        dropped = {record.number for record in self.controls if isinstance(record, DropAdapter)}
        read = [record for record in self.controls if isinstance(record, PrepareAdapter)]
        return [record.adapter.path for record in read if record.number not in dropped]


def core_with_adapters() -> tuple[EngineCore, AdapterWorker]:
    config = EngineConfig(lora_config=LoRAConfig(enable_lora=True, max_loras=1, max_cpu_loras=3))
    core = EngineCore(config, AdapterWorker)
    assert isinstance(core.worker, AdapterWorker)
    return core, core.worker


def test_adapters_of_requests_that_are_refused_do_not_pile_up() -> None:
    core, worker = core_with_adapters()
    core.connect(0)
    for handle in range(9):
        lora = Adapter(handle + 1, "name", f"/{handle}")
        refused = replace(message(handle), sampling=Sampling(4, grammar=["regex", "a"]), lora=lora)
        core.add_request(0, refused)
    assert {finished.error for _, finished in run_core(core).values()} == {"NotSupportedError"}
    assert len(worker.held) <= 3


def test_a_core_reads_no_more_adapters_of_the_one_before_than_it_can_keep() -> None:
    core, worker = core_with_adapters()
    owners = [bytes([i]) * 16 for i in range(20)]
    held = [HeldAdapter(owner, Adapter(1, "name", f"/{owner[0]}"), pinned=not owner[0]) for owner in owners]
    core.restore(DesiredState(adapters=held))
    assert set(worker.held) == {"/18", "/19", "/0"}
    assert len(worker.controls) == 3
    assert core.adapters._pinned() == [], "its frontend is not here"
    core.connect(0, session=owners[0])
    assert core.adapters._pinned() == [b"/0"]
    assert decode_value(core.call("list_loras", encode_value([]))) == [1]
